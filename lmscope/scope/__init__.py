"""Readers of the stream; nothing below here imports torch."""

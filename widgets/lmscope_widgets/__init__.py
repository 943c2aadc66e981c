"""Widgets that draw the stream; importing this package imports nothing."""

"""Speculative decoding: guess several tokens ahead, check the guesses in one forward.

The parts work by themselves; the engine does not draft yet.
"""

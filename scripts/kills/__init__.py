"""Kills a run on purpose, again and again, and recounts what is left of it."""

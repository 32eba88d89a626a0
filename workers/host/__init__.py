"""Reads this machine's facts, and starts programs on it."""

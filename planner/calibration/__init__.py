"""Measures this machine with the engine itself, and fits the prices of plans."""

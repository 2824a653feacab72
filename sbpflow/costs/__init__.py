"""Predicted costs of a step: how often ids repeat, counts of work, and prices. NumPy only."""

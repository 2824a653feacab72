"""Predicts the costs of a step from id repetition, work counts, and prices. Uses only NumPy."""

"""Predicts the cost of a training step from how often ids repeat, counts of work, and prices. Uses
only NumPy.
"""

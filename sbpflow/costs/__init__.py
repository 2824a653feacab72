"""Predicts the cost of a training step from statistics of ids, counts of work, and prices. Uses
only NumPy.
"""

"""Computes the cost of a plan: counts of work, their prices, and the resulting step time."""

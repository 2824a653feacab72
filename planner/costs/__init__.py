"""Computes the cost of a plan from counts of work and their prices."""

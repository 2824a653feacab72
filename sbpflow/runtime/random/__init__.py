"""Computes random numbers as pure functions of a seed, a name and a position."""

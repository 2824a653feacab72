"""Turns table layouts into groups, stacks, and transfers. Pure data and pure functions."""

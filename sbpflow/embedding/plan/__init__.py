"""Converts table layouts to groups, stacks, and transfers. Pure data and pure functions."""

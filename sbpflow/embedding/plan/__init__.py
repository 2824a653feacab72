"""Converts table layouts to groups, stacks, and transfers, with pure data and pure functions."""

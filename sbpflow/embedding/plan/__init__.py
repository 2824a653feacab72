"""Turns table layouts into groups, stacks, and transfers with pure data and pure functions."""

"""Converts table layouts to groups, stacks, and transfers. This package contains only pure data and
pure functions.
"""

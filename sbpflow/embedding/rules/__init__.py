"""Defines the sparse optimizers. Each module defines the constants, state, and torch step of
one.
"""

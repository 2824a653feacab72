"""Defines the sparse optimizers. Each module defines the constants, the state, and the torch step
of one optimizer.
"""

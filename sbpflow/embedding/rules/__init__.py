"""Defines the sparse optimizers, and lists the kernels that run them. Each other module defines the
constants, the state, and the torch step of one optimizer.
"""

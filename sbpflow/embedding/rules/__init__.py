"""Defines the sparse optimizers; each module has the constants, state, and step in torch."""

"""Defines the sparse optimizers; each module defines an optimizer's constants, state, and torch
step."""

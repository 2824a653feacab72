"""The sparse optimizers; each module has the constants, the state, and the step in torch."""

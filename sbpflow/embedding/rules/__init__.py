"""The sparse optimizers, one module each: constants, state, and the step in torch."""

"""The sparse optimizers, one module each: what is kept by row, and the step in torch."""

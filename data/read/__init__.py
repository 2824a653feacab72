"""A prepared set to batches, on every rank in one global order."""

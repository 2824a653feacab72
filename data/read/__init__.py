"""Read a prepared set into batches, in one global order on all ranks."""

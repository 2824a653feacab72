"""Read a prepared set as batches; all ranks share one global order of rows."""

"""Convert raw rows to a prepared set."""

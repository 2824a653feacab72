"""Raw rows to a prepared set."""

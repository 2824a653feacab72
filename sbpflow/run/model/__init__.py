"""The model interface of a run, and ordinary torch modules as models."""

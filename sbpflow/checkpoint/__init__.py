"""Saves and loads checkpoints, which do not depend on the number of ranks."""

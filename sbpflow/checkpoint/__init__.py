"""Writes and reads checkpoints, which do not depend on the number of ranks."""

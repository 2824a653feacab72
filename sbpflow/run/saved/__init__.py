"""Checkpoints of a run: saving, resuming and loading."""

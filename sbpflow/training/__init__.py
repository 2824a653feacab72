"""Runs the training loop, and measures and reports its progress."""

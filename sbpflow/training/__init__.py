"""The training loop and what it measures and reports."""

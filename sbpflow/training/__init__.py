"""Contains the training loop and the code that measures and reports a run's progress."""

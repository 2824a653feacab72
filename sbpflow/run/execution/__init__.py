"""Executes a run on its ranks: start, warm-up, training job, prediction, and machine checks."""

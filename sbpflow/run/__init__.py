"""Runs as a whole: the model interface, planning, execution, checkpoints, export, reports."""

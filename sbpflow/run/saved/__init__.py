"""Saves, resumes and loads the checkpoints of a run."""

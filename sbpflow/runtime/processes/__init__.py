"""Starts the ranks of a job, connects them to each other, and combines their exits into one
message."""

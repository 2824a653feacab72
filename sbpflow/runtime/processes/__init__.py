"""Starts the ranks of a job, connects them to each other, and combines their errors into one
message."""

"""How the ranks of a job start, find one another, and end with one message."""

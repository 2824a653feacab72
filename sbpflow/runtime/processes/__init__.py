"""Lets the ranks of a job start, find each other, and exit with one message."""

"""Checks the ids of a batch and converts them to row numbers in stores."""

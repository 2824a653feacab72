"""Checks a batch's ids and converts them to row numbers of stores."""

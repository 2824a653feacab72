"""Checks a batch's ids and converts them to rows of stores."""

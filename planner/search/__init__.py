"""Searches for the plan with the shortest predicted time, using seeds, local search, and bounds."""

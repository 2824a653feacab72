"""Searches for the plan with the least predicted time: seeds, exact and local search, bounds."""

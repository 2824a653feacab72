"""Search for the plan of least predicted time: seeds, exact and local search, bounds."""

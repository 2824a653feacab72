"""What a step costs: how often ids repeat, counts of work, and their prices. NumPy only."""

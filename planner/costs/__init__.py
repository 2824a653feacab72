"""What a plan costs: counts of work, their prices, and the step they make."""

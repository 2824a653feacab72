"""A run as a whole: its plan, how it is explained."""

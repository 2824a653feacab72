"""Random numbers as functions of a seed, a name and a place."""

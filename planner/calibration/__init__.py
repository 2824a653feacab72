"""Runs the engine on this machine, and fits the prices of plans to the measured times."""

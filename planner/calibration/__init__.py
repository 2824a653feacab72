"""Measures this machine by running the engine and fits the prices of plans to the measurements."""

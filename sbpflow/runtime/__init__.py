"""Supports the ranks of a run and their machines: startup, shutdown, devices, files, randomness."""

"""Scores rows with exported bundles; sbpflow's server and the bundles themselves use this code."""

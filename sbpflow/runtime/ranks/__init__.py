"""Connects the ranks of a run: process groups, hosts, and a log of sent data."""

"""Planners from published papers behind a common interface, for comparison."""

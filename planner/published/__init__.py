"""Implements planners from published papers behind one interface, for comparison."""

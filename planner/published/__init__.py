"""Planners as published in papers, behind one interface, for comparison."""

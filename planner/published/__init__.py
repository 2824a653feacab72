"""Planners as their papers publish them, behind one interface, so that a user can compare."""

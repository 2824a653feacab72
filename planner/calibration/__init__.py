"""Measures this machine with the engine itself, and fits what plans are priced by."""

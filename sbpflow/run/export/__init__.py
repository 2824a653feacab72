"""Exports trained models to programs without sbpflow."""

"""Stores and kernels of table rows and their optimizer state."""

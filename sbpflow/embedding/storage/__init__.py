"""Stores and kernels for table rows and their optimizer state."""

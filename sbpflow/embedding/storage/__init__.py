"""Stores and kernels for the rows of tables and their optimizer state."""

"""Stores that hold a few rows in slots of a kernel and all rows in slower memory."""

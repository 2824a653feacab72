"""Stores that keep some rows in slots of a kernel, and all rows in slower memory."""

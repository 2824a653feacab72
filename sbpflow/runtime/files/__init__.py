"""Reads and writes files and folders: paths, locks, JSON and caches."""

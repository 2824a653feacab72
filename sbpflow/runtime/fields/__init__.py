"""Annotations of configuration fields, and the import of users' classes."""

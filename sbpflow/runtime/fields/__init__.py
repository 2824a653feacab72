"""Annotations of configuration fields, and classes of a user's own."""

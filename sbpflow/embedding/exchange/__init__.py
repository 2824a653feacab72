"""Exchanges the ids, vectors, and gradients of groups."""

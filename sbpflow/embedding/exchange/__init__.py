"""Exchanges the ids, vectors, and gradients of groups, with one class per exchange."""

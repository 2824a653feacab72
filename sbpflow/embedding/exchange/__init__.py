"""Exchanges the ids, vectors, and gradients of groups. There is one class per exchange."""

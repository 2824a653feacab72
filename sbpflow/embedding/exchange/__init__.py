"""How ids, vectors, and gradients of a group travel: one class per exchange."""

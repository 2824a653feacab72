"""Defines global tensors, of which each rank stores a part, their operators, and their autograd."""

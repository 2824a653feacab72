"""Defines global tensors (each rank stores a part of a tensor), their operators, and autograd."""

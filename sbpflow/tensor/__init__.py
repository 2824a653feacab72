"""Defines global tensors, their operators, and autograd. Each rank stores a part of the tensor."""

"""Defines global tensors with autograd and operators; each rank stores a part of a logical
tensor."""

"""Global tensors: logical tensors of which a rank holds a part, with autograd and operators."""

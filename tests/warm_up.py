"""Compiles the tables' kernels into the user's cache, so that the ranks need not compile them."""

import torch

from sbpflow.embedding.rules.registry import RULES, sparse_optimizer
from sbpflow.embedding.storage.numba_storage import warm_up

if __name__ == "__main__":
    rules = [sparse_optimizer(rule, lr=0.1) for rule in RULES]
    for dtype in (torch.float32, torch.float64):
        warm_up(rules, dtype, dtype)

"""torch.optim for the dense part, from the configuration."""

from collections.abc import Iterable

import torch
from torch import Tensor

from sbpflow.config.schema import AdamW, DenseAdagrad, DenseOptimizer, DenseSgd, RmsProp


def make_dense_optimizer(
    config: DenseOptimizer, parameters: Iterable[Tensor]
) -> torch.optim.Optimizer | None:
    """The optimizer over local parts; ``None`` if there are no parameters."""
    listed = list(parameters)
    if not listed:
        return None
    if isinstance(config, DenseSgd):
        return torch.optim.SGD(
            listed,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    if isinstance(config, DenseAdagrad):
        return torch.optim.Adagrad(
            listed,
            lr=config.lr,
            eps=config.eps,
            initial_accumulator_value=config.initial_accumulator,
            weight_decay=config.weight_decay,
        )
    if isinstance(config, RmsProp):
        return torch.optim.RMSprop(
            listed,
            lr=config.lr,
            alpha=config.alpha,
            eps=config.eps,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
    kind = torch.optim.AdamW if isinstance(config, AdamW) else torch.optim.Adam
    return kind(
        listed,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def state_per_element(config: DenseOptimizer) -> int:
    """Numbers of optimizer state per parameter element."""
    if isinstance(config, DenseSgd):
        return 1 if config.momentum else 0
    if isinstance(config, DenseAdagrad):
        return 1
    if isinstance(config, RmsProp):
        return 2 if config.momentum else 1
    return 2

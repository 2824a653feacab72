"""torch.optim for the dense part, from the configuration."""

from collections.abc import Iterable

import torch
from torch import Tensor

from sbpflow.config.schema import Adam, AdamW, DenseAdagrad, DenseOptimizer, DenseSgd, RmsProp


def make_dense_optimizer(
    config: DenseOptimizer, parameters: Iterable[Tensor], *, capturable: bool = False
) -> torch.optim.Optimizer | None:
    """The optimizer over local parts; ``None`` if there are no parameters.

    ``capturable``: one whose step a CUDA graph can hold, its rate a tensor, where torch has such.
    """
    listed = list(parameters)
    if not listed:
        return None
    if capturable and isinstance(config, CAPTURABLE):
        return _capturable(config, listed)
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
    return _ADAMS[type(config)](
        listed,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


CAPTURABLE = (Adam, AdamW, RmsProp)  # torch's SGD and Adagrad have their rate as a number alone


_ADAMS = {Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}


def _capturable(config: Adam | AdamW | RmsProp, listed: list[Tensor]) -> torch.optim.Optimizer:
    rate = torch.tensor(config.lr, dtype=torch.float32, device=listed[0].device)
    if isinstance(config, RmsProp):
        return torch.optim.RMSprop(
            listed,
            lr=rate,  # pyright: ignore[reportArgumentType] -- the stub lacks tensors
            alpha=config.alpha,
            eps=config.eps,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            capturable=True,
        )
    return _ADAMS[type(config)](
        listed,
        lr=rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        capturable=True,
        fused=True,
    )


def state_per_element(config: DenseOptimizer) -> int:
    """Numbers of optimizer state per parameter element."""
    if isinstance(config, DenseSgd):
        return 1 if config.momentum else 0
    if isinstance(config, DenseAdagrad):
        return 1
    if isinstance(config, RmsProp):
        return 2 if config.momentum else 1
    return {Adam: 2, AdamW: 2}[type(config)]

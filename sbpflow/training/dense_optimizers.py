"""Builds the torch.optim optimizer of the dense part from the configuration."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sbpflow.config.schema import Adam, AdamW, DenseAdagrad, DenseOptimizer, DenseSgd, RmsProp

_CLASSES: dict[type[DenseOptimizer], Any] = {
    Adam: torch.optim.Adam,
    AdamW: torch.optim.AdamW,
    DenseAdagrad: torch.optim.Adagrad,
    DenseSgd: torch.optim.SGD,
    RmsProp: torch.optim.RMSprop,
}
# Torch has no capturable SGD or Adagrad: their learning rate can only be a number.
_CAPTURABLE: dict[type[DenseOptimizer], dict[str, bool]] = {
    Adam: {"capturable": True, "fused": True},
    AdamW: {"capturable": True, "fused": True},
    RmsProp: {"capturable": True},
}


def make_dense_optimizer(
    config: DenseOptimizer, parameters: Iterable[Tensor], *, capturable: bool = False
) -> torch.optim.Optimizer | None:
    """The optimizer over local parts; ``None`` if there are no parameters.

    ``capturable`` asks for an optimizer whose step a CUDA graph can contain, with a tensor as its
    learning rate, if torch has one of this kind.
    """
    listed = list(parameters)
    if not listed:
        return None
    make = _CLASSES[type(config)]
    # The fields of a configuration class are the arguments of its torch class, but for these two.
    options = dataclasses.asdict(config)
    del options["name"]
    if isinstance(config, DenseAdagrad):
        options["initial_accumulator_value"] = options.pop("initial_accumulator")
    if capturable and type(config) in _CAPTURABLE:
        options |= _CAPTURABLE[type(config)]
        options["lr"] = torch.tensor(config.lr, dtype=torch.float32, device=listed[0].device)
    return make(listed, **options)


def state_per_element(config: DenseOptimizer) -> int:
    """Numbers of optimizer state per parameter element."""
    if isinstance(config, DenseSgd):
        return 1 if config.momentum else 0
    if isinstance(config, DenseAdagrad):
        return 1
    if isinstance(config, RmsProp):
        return 2 if config.momentum else 1
    return {Adam: 2, AdamW: 2}[type(config)]

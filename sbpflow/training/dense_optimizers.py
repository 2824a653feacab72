"""Builds the torch.optim optimizer of the dense part from the configuration."""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sbpflow.config.schema import Adam, AdamW, DenseAdagrad, DenseOptimizer, DenseSgd, RmsProp


def _uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """Return a subclass of an optimizer class that does not import torch's compiler, which takes a
    second of CPU time.

    torch decorates these methods for compiled training steps, which sbpflow does not have.
    """
    names = ("add_param_group", "zero_grad", "step")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(methods["step"])})


_CLASSES: dict[type[DenseOptimizer], Any] = {
    Adam: _uncompiled(torch.optim.Adam),
    AdamW: _uncompiled(torch.optim.AdamW),
    DenseAdagrad: _uncompiled(torch.optim.Adagrad),
    DenseSgd: _uncompiled(torch.optim.SGD),
    RmsProp: _uncompiled(torch.optim.RMSprop),
}
# torch's SGD and Adagrad are not capturable, so their learning rates are always Python floats.
_CAPTURABLE: dict[type[DenseOptimizer], dict[str, bool]] = {
    Adam: {"capturable": True, "fused": True},
    AdamW: {"capturable": True, "fused": True},
    RmsProp: {"capturable": True},
}


def make_dense_optimizer(
    config: DenseOptimizer, parameters: Iterable[Tensor], *, capturable: bool = False
) -> Optimizer | None:
    """Return an optimizer for this rank's parts of the parameters, or ``None`` if the rank has
    none.

    If ``capturable`` is set and torch supports it for the optimizer class, CUDA graphs can contain
    the optimizer's step, and the learning rate is a tensor.
    """
    listed = list(parameters)
    if not listed:
        return None
    make = _CLASSES[type(config)]
    # Except ``name``, fields of the configuration class are arguments of the torch class; only the
    # accumulator of Adagrad has another name there.
    options = dataclasses.asdict(config)
    del options["name"]
    if isinstance(config, DenseAdagrad):
        options["initial_accumulator_value"] = options.pop("initial_accumulator")
    if capturable and type(config) in _CAPTURABLE:
        options |= _CAPTURABLE[type(config)]
        options["lr"] = torch.tensor(config.lr, dtype=torch.float32, device=listed[0].device)
    return make(listed, **options)


def state_per_element(config: DenseOptimizer) -> int:
    """Return the number of optimizer state values per parameter element."""
    if isinstance(config, DenseSgd):
        return 1 if config.momentum else 0
    if isinstance(config, DenseAdagrad):
        return 1
    if isinstance(config, RmsProp):
        return 2 if config.momentum else 1
    return {Adam: 2, AdamW: 2}[type(config)]

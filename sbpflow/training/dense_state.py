"""Names the tensors of the dense part, so that checkpoints do not depend on the layout.

``dense/P`` is the parameter or buffer P; ``dense/P/STATE`` is the parameter's optimizer state
STATE, with one value per element. The optimizer's step counts are not saved, because the job saves
one step count for all parameters.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Place
from sbpflow.embedding.state import LogicalTensor, Rectangle
from sbpflow.errors import SbpError
from sbpflow.tensor.global_tensor import GlobalTensor


def dense_state(
    parameters: Mapping[str, GlobalTensor],
    buffers: Mapping[str, GlobalTensor],
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, LogicalTensor]:
    """Return all tensors of the dense part by name. After the first step, the names are the same on
    all ranks.

    Rectangles are those of the tensor viewed as a matrix [first dim, product of other dims].
    """
    tensors: list[LogicalTensor] = []
    for name, parameter in parameters.items():
        tensors.append(_logical(f"dense/{name}", parameter, parameter.part.detach()))
        for key, value in _optimizer_state(optimizer, parameter.part):
            tensors.append(_logical(f"dense/{name}/{key}", parameter, value))
    tensors += [_logical(f"dense/{name}", buffer, buffer.part) for name, buffer in buffers.items()]
    return {tensor.name: tensor for tensor in tensors}


def begin_state(optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Allocate the state that the optimizer would create in its first step, so that a restore can
    fill the state.

    All tensors are zero, and the step count of each parameter is ``step``.
    """
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for part in group["params"]:
            state = cast("dict[Tensor, dict[str, Any]]", optimizer.state)[part]
            for key, value in _first_state(optimizer, group, part).items():
                if key == "step":
                    state[key] = torch.full_like(value, step)
                elif isinstance(value, Tensor) and value.ndim:
                    state[key] = torch.zeros_like(part)
                else:
                    state[key] = value


def _first_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], part: Tensor
) -> dict[str, Any]:
    """Return the state that one step of a copy of the optimizer creates for a one-element
    parameter.

    A trial step is needed because torch cannot list the state of an optimizer before its first
    step.
    """
    probe = torch.zeros(1, dtype=part.dtype, device=part.device, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    twin = copy.copy(optimizer)
    twin.param_groups, twin.state = [{**group, "params": [probe]}], defaultdict(dict)
    twin.step()
    return cast("dict[Tensor, dict[str, Any]]", twin.state)[probe]


def _optimizer_state(
    optimizer: torch.optim.Optimizer | None, part: Tensor
) -> Iterator[tuple[str, Tensor]]:
    state = optimizer.state.get(part, {}) if optimizer is not None else {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == part.shape and key != "step":
            yield key, value


def _logical(name: str, parameter: GlobalTensor, values: Tensor) -> LogicalTensor:
    slices = parameter.layout.part_slices(parameter.shape, parameter.boxing.world.rank)
    mine: tuple[Rectangle, ...] = ()
    if slices is not None:
        rows = slices[0] if slices else slice(0, 1)
        columns = slices[1] if len(slices) == 2 else slice(0, math.prod(parameter.shape[1:]))
        lengths = tuple(part.stop - part.start for part in slices[1:])
        if len(slices) > 2 and lengths != parameter.shape[1:]:
            raise SbpError(
                f"{name}: {parameter!r} is split along a dim other than 0, so its parts are not "
                "rectangles; state of more than two dims can be split only along dim 0; use S(0)"
            )
        place = Place(rows.start, rows.stop, columns.start, columns.stop)
        mine = (Rectangle(place, values),)
    return LogicalTensor(name=name, shape=parameter.shape, rectangles=mine)

"""The logical names of the dense part's state: what is saved, whatever the layout.

``dense/P`` is parameter or buffer P, ``dense/P/STATE`` what the optimizer keeps of a parameter,
element by element; the optimizer's own count of steps is left out, for a job has one count for
everything.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from sbpflow.embedding.state import LogicalTensor, Rectangle
from sbpflow.errors import SbpError
from sbpflow.tensor.global_tensor import GlobalTensor


def dense_state(
    parameters: Mapping[str, GlobalTensor],
    buffers: Mapping[str, GlobalTensor],
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, LogicalTensor]:
    """Every tensor of the dense part by name, the same names on all ranks once a step was made.

    A tensor of more or fewer than two dims has its rectangle over [first dim, all others].
    """
    found: list[LogicalTensor] = []
    for name, parameter in parameters.items():
        found.append(_logical(f"dense/{name}", parameter, parameter.part.detach()))
        for key, value in _kept(optimizer, parameter.part):
            found.append(_logical(f"dense/{name}/{key}", parameter, value))
    found += [_logical(f"dense/{name}", one, one.part) for name, one in buffers.items()]
    return {tensor.name: tensor for tensor in found}


def begin_state(optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """Give each parameter the state that its optimizer makes at a first step, in zeros, and its
    count of ``step`` steps: to be filled with what was saved.
    """
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for part in group["params"]:
            kept = cast("dict[Tensor, dict[str, Any]]", optimizer.state)[part]
            for key, value in _of_first_step(optimizer, group, part).items():
                if key == "step":
                    kept[key] = torch.full_like(value, step)
                elif isinstance(value, Tensor) and value.ndim:
                    kept[key] = torch.zeros_like(part)
                else:
                    kept[key] = value


def _of_first_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], part: Tensor
) -> dict[str, Any]:
    """What a copy of the optimizer keeps of a parameter of one element after a step."""
    probe = torch.zeros(1, dtype=part.dtype, device=part.device, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    twin = copy.copy(optimizer)
    twin.param_groups, twin.state = [{**group, "params": [probe]}], defaultdict(dict)
    twin.step()
    return cast("dict[Tensor, dict[str, Any]]", twin.state)[probe]


def _kept(optimizer: torch.optim.Optimizer | None, part: Tensor) -> Iterator[tuple[str, Tensor]]:
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
        held = [part.stop - part.start for part in slices[1:]]
        if len(slices) > 2 and tuple(held) != parameter.shape[1:]:
            raise SbpError(
                f"{name}: {parameter!r} is split along a dim behind the first, and so no "
                "rectangle; state of more than two dims is split along dim 0 alone"
            )
        mine = (
            Rectangle(
                row_start=rows.start,
                row_stop=rows.stop,
                col_start=columns.start,
                col_stop=columns.stop,
                values=values,
            ),
        )
    return LogicalTensor(name=name, shape=parameter.shape, rectangles=mine)

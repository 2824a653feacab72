"""A conversion that autograd goes through: planned steps, and those of the adjoint back.

A rank outside a placement has an empty part here instead of None, so that it keeps its place in the
graph and joins the collectives of the backward.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbpflow.boxing import Boxing
from sbpflow.boxing_plan import BoxingStep
from sbpflow.layout import Layout

Steps = tuple[BoxingStep, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """There and back: ``forward`` leads src -> dst, ``backward`` the gradient of dst -> of src."""

    src: Layout
    forward: Steps
    dst: Layout
    backward: Steps
    channel: str


def run_part(boxing: Boxing, steps: Steps, part: Tensor, src: Layout, channel: str) -> Tensor:
    """``boxing.run`` with empty parts in place of None."""
    if not steps:
        return part
    out = boxing.run(steps, part if boxing.world.rank in src.placement else None, channel)
    if out is None:
        return torch.empty(0, dtype=part.dtype, device=boxing.world.device_of(steps[-1].dst))
    return out


def convert(part: Tensor, boxing: Boxing, way: Way) -> Tensor:
    """Run ``way.forward`` on ``part``; autograd will run ``way.backward``."""
    return _Convert.apply(part, boxing, way)  # pyright: ignore[reportReturnType]


class _Convert(torch.autograd.Function):
    """part under src -> part under dst; backward: under dual(dst) -> under dual(src)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        part: Tensor,
        boxing: Boxing,
        way: Way,
    ) -> Tensor:
        ctx.state = boxing, way
        return run_part(boxing, way.forward, part, way.src, way.channel)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        gradient: Tensor,
    ) -> tuple[Tensor, None, None]:
        boxing, way = ctx.state
        return run_part(boxing, way.backward, gradient, way.dst, way.channel), None, None

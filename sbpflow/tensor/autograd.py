"""A conversion that autograd goes through: planned steps, and those of the adjoint back.

A rank outside a placement has an empty part here instead of None, so that it keeps its place in the
graph and joins the collectives of the backward. Conversions are differentiable once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout

Steps = tuple[BoxingStep, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """There and back: ``forward`` leads src -> dst, ``backward`` the gradient of dst -> of src."""

    src: Layout
    forward: Steps
    dst: Layout
    backward: Steps
    channel: str


def run_part(boxing: Boxing, steps: Steps, part: Tensor, channel: str) -> Tensor:
    """``boxing.run`` with empty parts in place of None."""
    if not steps:
        return part
    # Empty parts are passed as they are: whether they require grad is compared in checked mode.
    out = boxing.run(steps, part, channel)
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
        return run_part(boxing, way.forward, part, way.channel)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        gradient: Tensor,
    ) -> tuple[Tensor, None, None]:
        boxing, way = ctx.state

        def adjoint(gradient: Tensor) -> Tensor:
            return run_part(boxing, way.backward, gradient, way.channel)

        return once(f"{way.src} -> {way.dst}", adjoint, gradient), None, None


def once(what: str, adjoint: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
    """``adjoint(gradient)``, through which no second derivative goes: that raises SbpError."""
    if gradient.requires_grad and torch.is_grad_enabled():  # under create_graph only
        return _Once.apply(gradient, adjoint, what)  # pyright: ignore[reportReturnType]
    return adjoint(gradient)


class _Once(torch.autograd.Function):
    """An adjoint inside a graph that create_graph keeps."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        gradient: Tensor,
        adjoint: Callable[[Tensor], Tensor],
        what: str,
    ) -> Tensor:
        ctx.what = what
        return adjoint(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:  # noqa: ANN401 -- torch gives it no public type
        raise SbpError(
            f"{ctx.what} has a first derivative only; take second ones where nothing is converted, "
            "on a plain tensor or within one part"
        )

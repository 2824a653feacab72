"""Runs conversions under autograd: the planned steps in the forward pass, and their adjoint in the
backward pass.

In this module, ranks outside a placement have an empty part instead of None. The empty part keeps
these ranks in the autograd graph, so that they join the collectives of the backward pass. Only
first derivatives are supported.
"""
# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

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
Context = Any  # the type of ``ctx`` in an autograd function, for which torch has no public name


@dataclass(frozen=True, slots=True)
class Way:
    """The boxing steps of a conversion src -> dst (``forward``) and of its gradient, dual(dst) ->
    dual(src) (``backward``).
    """

    src: Layout
    forward: Steps
    dst: Layout
    backward: Steps
    channel: str


def run_part(boxing: Boxing, steps: Steps, part: Tensor, channel: str) -> Tensor:
    """Call ``boxing.run``; return an empty part where ``boxing.run`` returns None."""
    if not steps:
        return part
    # Empty parts are passed too, because checked mode compares ``requires_grad`` on all ranks.
    out = boxing.run(steps, part, channel)
    if out is None:
        return torch.empty(0, dtype=part.dtype, device=boxing.device_of(steps[-1].dst))
    return out


def convert(part: Tensor, boxing: Boxing, way: Way) -> Tensor:
    """Run ``way.forward`` on ``part``, and have autograd run ``way.backward`` on the gradient."""
    return _Convert.apply(part, boxing, way)  # pyright: ignore[reportReturnType]


class _Convert(torch.autograd.Function):
    """Convert a part from src to dst, and the gradient from dual(dst) to dual(src)."""

    @staticmethod
    def forward(ctx: Context, part: Tensor, boxing: Boxing, way: Way) -> Tensor:
        ctx.state = boxing, way
        return run_part(boxing, way.forward, part, way.channel)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        boxing, way = ctx.state

        def adjoint(gradient: Tensor) -> Tensor:
            return run_part(boxing, way.backward, gradient, way.channel)

        return once(f"{way.src} -> {way.dst}", adjoint, gradient), None, None


Adjoint = Callable[[Tensor], Tensor]


def once(name: str, adjoint: Adjoint, gradient: Tensor) -> Tensor:
    """Return ``adjoint(gradient)``. Differentiating the result raises SbpError."""
    # In a backward pass, grad mode is enabled only if the caller set ``create_graph``.
    if gradient.requires_grad and torch.is_grad_enabled():
        return _Once.apply(gradient, adjoint, name)  # pyright: ignore[reportReturnType]
    return adjoint(gradient)


class _Once(torch.autograd.Function):
    """Runs an adjoint if create_graph is set; the backward pass of this node raises SbpError."""

    @staticmethod
    def forward(ctx: Context, gradient: Tensor, adjoint: Adjoint, name: str) -> Tensor:
        ctx.name = name
        return adjoint(gradient)

    @staticmethod
    def backward(ctx: Context, *_: Tensor) -> None:
        raise SbpError(
            f"{ctx.name} has no second derivative; compute second derivatives on a plain tensor, "
            "or within one part without conversions"
        )

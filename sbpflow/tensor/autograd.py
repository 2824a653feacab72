"""Conversions with autograd: planned steps, and the steps of the adjoint in the backward.

A rank outside a placement has an empty part here instead of None, so that it is part of the graph
and joins the collectives of the backward. Conversions are differentiable once.
"""
# pyright: reportIncompatibleMethodOverride=false
# (torch's base class declares forward and backward with any arguments)

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
Context = Any  # the ctx of an autograd function, for which torch has no public type


@dataclass(frozen=True, slots=True)
class Way:
    """``forward`` converts src -> dst; ``backward`` converts the gradient of dst to that of src."""

    src: Layout
    forward: Steps
    dst: Layout
    backward: Steps
    channel: str


def run_part(boxing: Boxing, steps: Steps, part: Tensor, channel: str) -> Tensor:
    """``boxing.run`` with empty parts in place of None."""
    if not steps:
        return part
    # Empty parts are passed too, since checked mode compares whether parts require grad.
    out = boxing.run(steps, part, channel)
    if out is None:
        return torch.empty(0, dtype=part.dtype, device=boxing.world.device_of(steps[-1].dst))
    return out


def convert(part: Tensor, boxing: Boxing, way: Way) -> Tensor:
    """Run ``way.forward`` on ``part``; autograd will run ``way.backward``."""
    return _Convert.apply(part, boxing, way)  # pyright: ignore[reportReturnType]


class _Convert(torch.autograd.Function):
    """Forward: part in src -> part in dst; backward: in dual(dst) -> in dual(src)."""

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
    """``adjoint(gradient)``; a second derivative through it raises SbpError."""
    if gradient.requires_grad and torch.is_grad_enabled():  # with create_graph only
        return _Once.apply(gradient, adjoint, name)  # pyright: ignore[reportReturnType]
    return adjoint(gradient)


class _Once(torch.autograd.Function):
    """An adjoint in the graph of a first derivative, which create_graph makes."""

    @staticmethod
    def forward(ctx: Context, gradient: Tensor, adjoint: Adjoint, name: str) -> Tensor:
        ctx.name = name
        return adjoint(gradient)

    @staticmethod
    def backward(ctx: Context, *_: Tensor) -> None:
        raise SbpError(
            f"{ctx.name} has no second derivative; compute second derivatives without conversions, "
            "on a plain tensor or within one part"
        )

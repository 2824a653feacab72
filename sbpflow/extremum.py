"""Gradients through P(max) and P(min), which are not linear: the holder of the extremum gets all.

Out of P(max): the gradient of an element goes to the rank whose term is the extremum; of several,
to the first in coordinate order; of none (NaN), to nobody. Into P(max), from S or B on the same
placement: back along the way the terms came, nothing is sent.
"""

from typing import Any

import torch
from torch import Tensor

from sbpflow.boxing import Boxing
from sbpflow.boxing_moves import find_moves, is_local, shift
from sbpflow.boxing_plan import plan_boxing
from sbpflow.conversion import Steps, run_part
from sbpflow.errors import SbpError
from sbpflow.layout import Layout
from sbpflow.sbp import Broadcast, Partial


def convert_extremum(
    part: Tensor,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    boxing: Boxing,
    forward: Steps,
    channel: str,
) -> Tensor:
    """Convert from or to P(max) or P(min), differentiably.

    Raises SbpError for a conversion into them that would send, and from one to another.
    """
    if not dst.has_extremum:
        return _OutOf.apply(part, src, dst, shape, boxing, forward, channel)  # pyright: ignore[reportReturnType]
    if src.has_extremum or not is_local(find_moves(src, dst, shape)):
        raise SbpError(
            f"{src} -> {dst} has no gradient: only S and B on the same placement turn into "
            f"{dst} differentiably; go through B, or detach() first"
        )
    return _Into.apply(part, src, dst, shape, boxing, forward, channel)  # pyright: ignore[reportReturnType]


def _whole_on(layout: Layout) -> Layout:
    """The layout with its P axes turned to B: every rank of them has the reduced value."""
    nd_sbp = tuple(Broadcast() if isinstance(s, Partial) else s for s in layout.nd_sbp)
    return Layout(layout.placement, nd_sbp)


class _OutOf(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        part: Tensor,
        src: Layout,
        dst: Layout,
        shape: tuple[int, ...],
        boxing: Boxing,
        forward: Steps,
        channel: str,
    ) -> Tensor:
        out = run_part(boxing, forward, part, src, channel)
        ctx.save_for_backward(part, out)
        ctx.state = src, dst, shape, boxing, forward, channel
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        gradient: Tensor,
    ) -> tuple[Tensor | None, ...]:
        src, dst, shape, boxing, forward, channel = ctx.state
        part, out = ctx.saved_tensors
        name = forward[0].id.rsplit("/", 1)[0] if forward else "extremum"
        home = _whole_on(src)

        def bring(x: Tensor, start: Layout, end: Layout, what: str) -> Tensor:
            steps = plan_boxing(
                start, end, shape, x.dtype, id=f"{name}/bwd/{what}", backend=world.backend_of(end)
            )
            return run_part(boxing, steps, x, start, channel)

        world = boxing.world
        value = bring(out, dst, home, "value")
        whole_gradient = bring(gradient, dst.dual(), home, "gradient")
        # Outside the placement the part is empty and the index never meets an element.
        index = src.placement.index(world.rank)
        claim = torch.where(part == value, index, src.placement.size)
        claims = tuple(Partial("min") if isinstance(s, Partial) else s for s in src.nd_sbp)
        winner = bring(claim, Layout(src.placement, claims), home, "winner")
        return (whole_gradient * (winner == index), *(None,) * 6)


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        part: Tensor,
        src: Layout,
        dst: Layout,
        shape: tuple[int, ...],
        boxing: Boxing,
        forward: Steps,
        channel: str,
    ) -> Tensor:
        ctx.state = src, dst, shape, boxing.world.rank, part.shape
        return run_part(boxing, forward, part, src, channel)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        gradient: Tensor,
    ) -> tuple[Tensor | None, ...]:
        src, dst, shape, rank, part_shape = ctx.state
        out = gradient.new_zeros(part_shape)
        origin, target = src.part_slices(shape, rank), dst.part_slices(shape, rank)
        for move in find_moves(src, dst, shape):
            if move.dst == rank and origin is not None and target is not None:
                out[shift(move.box, origin)] = gradient[shift(move.box, target)]
        return (out, *(None,) * 6)

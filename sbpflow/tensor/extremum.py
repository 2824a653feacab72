"""Gradients through P(max) and P(min), which are not linear: the holder of the extremum gets all.

Out of P(max): the gradient of an element goes to the rank whose term is the extremum; of several,
to the first in coordinate order; of none (NaN), to nobody. Into P(max), from S or B on the same
placement: back along the way the terms came, nothing is sent. Whatever else becomes P(max) passes
through such a layout (``boxing.plan.last_linear_layout``). Copies along B axes of the grid have
gradients that add up, as everywhere.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.moves import find_moves, shift
from sbpflow.boxing.plan import plan_boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast, Partial, Sbp, dual
from sbpflow.tensor.autograd import Steps, once, run_part


@dataclass(frozen=True, slots=True)
class ExtremumWay:
    """src -> dst by ``forward``, of a tensor of ``shape``; ``incoming`` lays out the gradient of
    the result, None for that of P(max), whose gradient stays where its terms are.
    """

    src: Layout
    forward: Steps
    dst: Layout
    incoming: Layout | None
    shape: tuple[int, ...]
    channel: str


def convert_extremum(part: Tensor, boxing: Boxing, way: ExtremumWay) -> Tensor:
    """Convert from P(max) or P(min) to a layout without, or into them without a transfer."""
    if way.dst.has_extremum:
        return _Into.apply(part, boxing, way)  # pyright: ignore[reportReturnType]
    return _OutOf.apply(part, boxing, way)  # pyright: ignore[reportReturnType]


def _value_home(layout: Layout) -> Layout:
    """The layout with its P axes turned to B: every rank of them has the reduced value."""
    nd_sbp = tuple(Broadcast() if isinstance(s, Partial) else s for s in layout.nd_sbp)
    return Layout(layout.placement, nd_sbp)


def _gradient_home(layout: Layout) -> Layout:
    """Where the whole gradient is along the P axes, and else as in the dual: B axes have terms."""
    nd_sbp: tuple[Sbp, ...] = tuple(
        Broadcast() if isinstance(s, Partial) else dual(s) for s in layout.nd_sbp
    )
    return Layout(layout.placement, nd_sbp)


def _claim(layout: Layout, rank: int) -> tuple[int, int]:
    """Place of this rank among the terms, in coordinate order of the P axes, and their number.

    Copies along B axes claim alike, for they must agree on the holder.
    """
    coord = layout.placement.coord(rank) or (0,) * layout.placement.ndim
    place, count = 0, 1
    for at, size, sbp in zip(coord, layout.placement.shape, layout.nd_sbp, strict=True):
        if isinstance(sbp, Partial):
            place, count = place * size + at, count * size
    return place, count


class _OutOf(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        part: Tensor,
        boxing: Boxing,
        way: ExtremumWay,
    ) -> Tensor:
        out = run_part(boxing, way.forward, part, way.channel)
        ctx.save_for_backward(part, out)
        ctx.state = boxing, way
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        gradient: Tensor,
    ) -> tuple[Tensor, None, None]:
        boxing, way = ctx.state
        part, out = ctx.saved_tensors
        world, src = boxing.world, way.src
        name = way.forward[0].id.rsplit("/", 1)[0] if way.forward else "extremum"

        def bring(x: Tensor, start: Layout, end: Layout, what: str) -> Tensor:
            backend = world.backend_of(end)
            id = f"{name}/bwd/{what}"
            steps = plan_boxing(start, end, way.shape, x.dtype, id=id, backend=backend)
            return run_part(boxing, steps, x, way.channel)

        def adjoint(gradient: Tensor) -> Tensor:
            home = _value_home(src)
            value = bring(out, way.dst, home, "value")
            whole = bring(gradient, way.incoming, _gradient_home(src), "gradient")
            # Outside the placement the part is empty and the place never meets an element.
            place, nobody = _claim(src, world.rank)
            claim = torch.where(part == value, place, nobody)
            claims = tuple(Partial("min") if isinstance(s, Partial) else s for s in src.nd_sbp)
            winner = bring(claim, Layout(src.placement, claims), home, "winner")
            return whole * (winner == place)

        return once(f"{src} -> {way.dst}", adjoint, gradient), None, None


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        part: Tensor,
        boxing: Boxing,
        way: ExtremumWay,
    ) -> Tensor:
        ctx.state = boxing.world.rank, part.shape, way
        return run_part(boxing, way.forward, part, way.channel)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401 -- torch gives it no public type
        gradient: Tensor,
    ) -> tuple[Tensor, None, None]:
        rank, part_shape, way = ctx.state
        src, dst, shape = way.src, way.dst, way.shape

        def adjoint(gradient: Tensor) -> Tensor:
            out = gradient.new_zeros(part_shape)
            origin, target = src.part_slices(shape, rank), dst.part_slices(shape, rank)
            for move in find_moves(src, dst, shape):
                if move.dst == rank and origin is not None and target is not None:
                    out[shift(move.box, origin)] = gradient[shift(move.box, target)]
            return out

        return once(f"{src} -> {dst}", adjoint, gradient), None, None

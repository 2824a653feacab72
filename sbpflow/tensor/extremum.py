"""Computes gradients through P(max) and P(min), which are not linear.

In a conversion from P(max), the gradient of an element goes to the rank whose term is the maximum;
if several terms are equal to the maximum, it goes to the first of their ranks in coordinate order.
The gradient of a NaN element is dropped. In a conversion from S or B to P(max) on the same
placement, each gradient stays on its rank. Every other conversion to P(max) first converts to such
an S or B layout (``boxing.plan.last_linear_layout``). As in other conversions, gradients of copies
along B axes are summed. P(min) works like P(max).
"""
# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

from dataclasses import dataclass

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.moves import find_moves, shift
from sbpflow.boxing.plan import plan_boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast, Partial, Sbp, dual
from sbpflow.tensor.autograd import Context, Steps, once, run_part


@dataclass(frozen=True, slots=True)
class ExtremumWay:
    """The steps (``forward``) that convert a tensor of ``shape`` from src to dst.

    ``incoming`` is the layout of the result's gradient. For a P(max) or P(min) result, ``incoming``
    is None, because each rank stores the gradient of its own term.
    """

    src: Layout
    forward: Steps
    dst: Layout
    incoming: Layout | None
    shape: tuple[int, ...]
    channel: str


def convert_extremum(part: Tensor, boxing: Boxing, way: ExtremumWay) -> Tensor:
    """Convert from P(max) or P(min) to S or B, or, without communication, from S or B to P(max) or
    P(min).
    """
    if way.dst.has_extremum:
        return _Into.apply(part, boxing, way)  # pyright: ignore[reportReturnType]
    return _OutOf.apply(part, boxing, way)  # pyright: ignore[reportReturnType]


def _value_home(layout: Layout) -> Layout:
    """Return ``layout`` with B in place of P, so that every rank stores the reduced value."""
    nd_sbp = tuple(Broadcast() if isinstance(s, Partial) else s for s in layout.nd_sbp)
    return Layout(layout.placement, nd_sbp)


def _gradient_home(layout: Layout) -> Layout:
    """Return the layout that gives each rank the gradient of its term: B in place of P, and the
    dual of every other sbp.
    """
    nd_sbp: tuple[Sbp, ...] = tuple(
        Broadcast() if isinstance(s, Partial) else dual(s) for s in layout.nd_sbp
    )
    return Layout(layout.placement, nd_sbp)


def _claim(layout: Layout, rank: int) -> tuple[int, int]:
    """Return the position of this rank's term among all terms, and the number of terms.

    The position depends only on the rank's coordinates along P axes, so copies along B axes have
    the same position and agree on which term is the extremum.
    """
    coord = layout.placement.coord(rank) or (0,) * layout.placement.ndim
    place, count = 0, 1
    for at, size, sbp in zip(coord, layout.placement.shape, layout.nd_sbp, strict=True):
        if isinstance(sbp, Partial):
            place, count = place * size + at, count * size
    return place, count


class _OutOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, part: Tensor, boxing: Boxing, way: ExtremumWay) -> Tensor:
        out = run_part(boxing, way.forward, part, way.channel)
        ctx.save_for_backward(part, out)
        ctx.state = boxing, way
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        boxing, way = ctx.state
        part, out = ctx.saved_tensors
        world, src = boxing.world, way.src
        owner = way.forward[0].id.rsplit("/", 1)[0] if way.forward else "extremum"

        def redistribute(x: Tensor, start: Layout, end: Layout, name: str) -> Tensor:
            steps = plan_boxing(start, end, way.shape, x.dtype, id=f"{owner}/bwd/{name}")
            return run_part(boxing, steps, x, way.channel)

        def adjoint(gradient: Tensor) -> Tensor:
            home = _value_home(src)
            value = redistribute(out, way.dst, home, "value")
            whole = redistribute(gradient, way.incoming, _gradient_home(src), "gradient")
            # Several terms may equal the extremum, but only one may get the gradient. For each
            # element, every rank whose own term is the extremum claims the gradient with its
            # position, and the lowest position wins. On ranks outside the placement, all tensors
            # are empty.
            place, no_place = _claim(src, world.rank)
            claim = torch.where(part == value, place, no_place)
            claims = tuple(Partial("min") if isinstance(s, Partial) else s for s in src.nd_sbp)
            winner = redistribute(claim, Layout(src.placement, claims), home, "winner")
            return torch.where(winner == place, whole, 0)  # 0 * inf would be NaN

        return once(f"{src} -> {way.dst}", adjoint, gradient), None, None


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, part: Tensor, boxing: Boxing, way: ExtremumWay) -> Tensor:
        ctx.state = boxing.world.rank, part.shape, way
        return run_part(boxing, way.forward, part, way.channel)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
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

"""Finds the cheapest route between two layouts: a shortest path whose edges are steps.

A step changes one axis, goes directly to the destination, or arrives on another placement with S
instead of B on some axes. It costs the bytes of its
collective plus a constant, so small tensors take routes with fewer steps. The search is a pure
function.
"""

import heapq
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import torch

from sbpflow.boxing.moves import elements_sent, one_step_legal
from sbpflow.boxing.step import make_step
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, NdSbp, Partial, Sbp, Split

# The fixed cost of a collective, in bytes, is OneFlow's constant per transfer
# (AUTO_PARALLEL_TRANSFER_COST, oneflow/core/framework/sbp_infer_util.cpp at 25c8978, 2025-08).
COLLECTIVE_COST_BYTES = 16500


def cheapest_route(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> tuple[Layout, ...]:
    """Return the layouts on the cheapest route, including both ends.

    Of equally cheap routes, the one with the fewest steps wins, and then the one listed first.
    """
    # Dijkstra's algorithm: nodes are layouts, edges are steps, and lengths are costs in bytes. A
    # fixed table of routes would not do, because the cheapest route depends on sizes: for (P, S(0))
    # -> (B, B), either gathering or reducing first can be cheaper. Queue entries are (cost, number
    # of steps, listing order, route): ranks plan independently, so all must break ties in the same
    # way.
    values = _values(src, dst, shape)
    best: dict[Layout, float] = {}
    queue: list[tuple[int, int, int, tuple[Layout, ...]]] = [(0, 0, 0, (src,))]
    pushed = 0
    while queue:
        cost, _, _, route = heapq.heappop(queue)
        layout = route[-1]
        if layout == dst:
            return route
        if best.get(layout, float("inf")) <= cost:
            continue
        best[layout] = cost
        for after in _next_layouts(layout, dst, values, shape):
            price = _price(layout, after, shape, dtype, backend)
            pushed += 1
            heapq.heappush(queue, (cost + price, len(route), pushed, (*route, after)))
    raise SbpError(f"cannot convert {src} to {dst} for shape {list(shape)}: no route exists")


# Routes between the same layouts share most of their steps: when the signature of an op is deduced,
# only one in seven of the steps on the compared routes is new.
@lru_cache(maxsize=16384)
def _price(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> int:
    step = make_step("", src, dst, shape, dtype, backend)
    return step.total_bytes + COLLECTIVE_COST_BYTES * bool(step.groups)


def _values(src: Layout, dst: Layout, shape: tuple[int, ...]) -> tuple[Sbp, ...]:
    """Return the sbps to try on an axis: those of both ends, B, and a split of the longest dim."""
    longest = [Split(max(range(len(shape)), key=shape.__getitem__))] if shape else []
    return tuple(dict.fromkeys((*src.nd_sbp, *dst.nd_sbp, *longest, Broadcast())))


def _next_layouts(
    layout: Layout, dst: Layout, values: tuple[Sbp, ...], shape: tuple[int, ...]
) -> Iterator[Layout]:
    ends = [dst.nd_sbp]
    if layout.placement != dst.placement:
        # A tensor may arrive on another placement with S instead of B on some axes.
        splits = [value for value in values if isinstance(value, Split)]
        options = [[sbp, *splits] if isinstance(sbp, Broadcast) else [sbp] for sbp in dst.nd_sbp]
        ends = list(product(*options))
    changed = [
        (*layout.nd_sbp[:axis], value, *layout.nd_sbp[axis + 1 :])
        for axis, value in product(range(layout.placement.ndim), values)
        if value != layout.nd_sbp[axis] and not isinstance(value, Partial)
    ]
    for after in [*_legal(dst.placement, ends), *_legal(layout.placement, changed)]:
        if after != layout and _fits(after, shape) and one_step_legal(layout, after):
            yield after


def layouts_before(src: Layout, dst: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Yield layouts with S or B in place of P(max) and P(min), from which ``dst`` can be made
    without communication.
    """
    linear = [v for v in _values(src, dst, shape) if not isinstance(v, Partial)]
    options = [
        linear if isinstance(sbp, Partial) and sbp.op != "sum" else [sbp] for sbp in dst.nd_sbp
    ]
    for layout in _legal(dst.placement, list(product(*options))):
        # Layouts that would leave ranks empty are skipped.
        if layout.accepts(shape) and not any(elements_sent(layout, dst, shape).values()):
            yield layout


def _legal(placement: Placement, candidates: list[NdSbp]) -> Iterator[Layout]:
    for nd_sbp in candidates:
        try:
            yield Layout(placement, nd_sbp)
        except SbpError:  # the explicit sizes do not fit the length of this axis
            continue


@lru_cache(maxsize=4096)
def _fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Return True if every rank gets a valid part.

    A part is invalid if the explicit sizes of nested splits do not add up.
    """
    try:
        for rank in layout.placement.ranks:
            layout.part_slices(shape, rank)
    except SbpError:
        return False
    return True

"""The cheapest route between two layouts: a shortest path over steps, by bytes. Pure.

A step changes one axis, or jumps to the destination at once. Bytes are those of the collective that
the step would run, plus a constant per collective, so that small tensors take fewer of them.
"""

import heapq
from collections.abc import Iterator
from itertools import product

import torch

from sbpflow.boxing.moves import elements_sent, one_step_legal
from sbpflow.boxing.step import make_step
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, NdSbp, Partial, Sbp, Split

# The fixed cost of a collective, in bytes: OneFlow's constant per transfer
# (AUTO_PARALLEL_TRANSFER_COST, oneflow/core/framework/sbp_infer_util.cpp at 25c8978, 2025-08).
COLLECTIVE_COST_BYTES = 16500


def cheapest_route(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> tuple[Layout, ...]:
    """The layouts to pass through, ends included. Ties go to fewer steps, then to listing order."""
    # Dijkstra's algorithm: a node is a layout, an edge one step, its length the bytes of that step.
    # A fixed table of routes was not enough, for the cheapest depends on sizes: (P, S(0)) -> (B, B)
    # may gather or reduce first. Queue entries are (cost, steps, order of listing, route), so
    # that every rank, which plans for itself, decides ties alike.
    values = _values(src, dst, shape)
    best: dict[Layout, float] = {}
    queue: list[tuple[int, int, int, tuple[Layout, ...]]] = [(0, 0, 0, (src,))]
    pushed = 0
    while queue:
        cost, _, _, route = heapq.heappop(queue)
        here = route[-1]
        if here == dst:
            return route
        if best.get(here, float("inf")) <= cost:
            continue
        best[here] = cost
        for there in _next_layouts(here, dst, values, shape):
            step = make_step("", here, there, shape, dtype, backend)
            price = step.total_bytes + COLLECTIVE_COST_BYTES * bool(step.groups)
            pushed += 1
            heapq.heappush(queue, (cost + price, len(route), pushed, (*route, there)))
    raise SbpError(f"there is no way from {src} to {dst} for shape {list(shape)}")


def _values(src: Layout, dst: Layout, shape: tuple[int, ...]) -> tuple[Sbp, ...]:
    """What an axis may be on the way: all that occurs at the ends, B, and the longest dim split."""
    longest = [Split(max(range(len(shape)), key=shape.__getitem__))] if shape else []
    return tuple(dict.fromkeys((*src.nd_sbp, *dst.nd_sbp, *longest, Broadcast())))


def _next_layouts(
    here: Layout, dst: Layout, values: tuple[Sbp, ...], shape: tuple[int, ...]
) -> Iterator[Layout]:
    ends = [dst]
    if here.placement != dst.placement:
        ends = [Layout(dst.placement, nd) for nd in _arrivals(dst, values)]
    changed = [
        (*here.nd_sbp[:axis], value, *here.nd_sbp[axis + 1 :])
        for axis, value in product(range(here.placement.ndim), values)
        if value != here.nd_sbp[axis] and not isinstance(value, Partial)
    ]
    for layout in [*ends, *_legal(here.placement, changed)]:
        if layout != here and _fits(layout, shape) and one_step_legal(here, layout):
            yield layout


def layouts_before(src: Layout, dst: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Those that become ``dst`` without a transfer, with S or B for each P(max) or P(min) of it."""
    linear = [v for v in _values(src, dst, shape) if not isinstance(v, Partial)]
    options = [
        linear if isinstance(sbp, Partial) and sbp.op != "sum" else [sbp] for sbp in dst.nd_sbp
    ]
    for layout in _legal(dst.placement, list(product(*options))):
        try:
            layout.check_user(shape)
        except SbpError:  # a user's tensor fills its ranks, here as at the ends
            continue
        if not any(elements_sent(layout, dst, shape).values()):
            yield layout


def _arrivals(dst: Layout, values: tuple[Sbp, ...]) -> Iterator[NdSbp]:
    """Where to land on the other placement: the destination, or its B axes still split."""
    options = [
        [sbp, *(v for v in values if isinstance(v, Split))] if isinstance(sbp, Broadcast) else [sbp]
        for sbp in dst.nd_sbp
    ]
    for nd_sbp in product(*options):
        if all(
            not isinstance(sbp, Split) or sbp.sizes is None or len(sbp.sizes) == parts
            for sbp, parts in zip(nd_sbp, dst.placement.shape, strict=True)
        ):
            yield nd_sbp


def _legal(placement: Placement, candidates: list[NdSbp]) -> Iterator[Layout]:
    for nd_sbp in candidates:
        try:
            yield Layout(placement, nd_sbp)
        except SbpError:  # explicit sizes that belong to another axis
            continue


def _fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether every rank's part is defined: explicit sizes of nested splits must add up."""
    try:
        for rank in layout.placement.ranks:
            layout.part_slices(shape, rank)
    except SbpError:
        return False
    return True

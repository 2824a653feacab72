"""Computes the expected results of conversions without the code under test.

It only slices with Python ranges, fills, concatenates, and adds, and uses neither plans nor groups.
"""

import itertools
import math
import random

import torch

from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split


def pieces(size, split, parts):
    """Return (start, stop) of each part; the first parts get one more element if needed."""
    lengths = split.sizes
    if lengths is None:
        lengths = [size // parts + (1 if part < size % parts else 0) for part in range(parts)]
    stops = list(itertools.accumulate(lengths))
    return [(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def coordinate(layout: Layout, rank: int):
    """Return the row-major coordinates of a rank in its grid, or None."""
    if rank not in layout.placement.ranks:
        return None
    index = layout.placement.ranks.index(rank)
    coord = []
    for axis in range(len(layout.placement.shape)):
        below = math.prod(layout.placement.shape[axis + 1 :])
        coord.append(index // below % layout.placement.shape[axis])
    return coord


def extent(layout: Layout, shape, rank):
    """Return (start, stop) of a rank's part, for each dim."""
    box = [(0, size) for size in shape]
    for axis, (sbp, at) in enumerate(zip(layout.nd_sbp, coordinate(layout, rank), strict=True)):
        if isinstance(sbp, Split):
            start, stop = box[sbp.dim]
            first, last = pieces(stop - start, sbp, layout.placement.shape[axis])[at]
            box[sbp.dim] = (start + first, start + last)
    return box


def cut(full, box):
    return full[tuple(slice(start, stop) for start, stop in box)]


def shares(full, layout: Layout, seed=0):
    """Return the parts of all ranks; P parts are random whole numbers whose sum is the value. For
    P(max) and P(min), the value is the extremum of the parts, which several parts may share.
    """
    draw = random.Random(seed)
    parts = {}
    terms = {}
    for rank in layout.placement.ranks:
        coord = coordinate(layout, rank)
        partial = [axis for axis, s in enumerate(layout.nd_sbp) if isinstance(s, Partial)]
        # Ranks whose coordinates differ only along B axes have equal terms.
        key = tuple(
            -1 if isinstance(s, Broadcast) else at
            for s, at in zip(layout.nd_sbp, coord, strict=True)
        )
        if key not in terms:
            terms[key] = _term(full, layout, coord, partial, draw, terms)
        parts[rank] = cut(terms[key], extent(layout, full.shape, rank)).clone()
    return parts


def _term(full, layout, coord, partial, draw, terms):
    """Return a random term for a P coordinate; the last term makes the result equal to ``full``."""
    last = all(coord[axis] == layout.placement.shape[axis] - 1 for axis in partial)
    if not partial:
        return full
    op, other = reduction(layout), _random_like(full, draw)
    if op != "sum":
        other = full - other.abs() if op == "max" else full + other.abs()
    if not last:
        return other
    seen = torch.full_like(full, neutral(op, full.dtype))
    for key, term in terms.items():
        same = all(
            k in (-1, at)
            for axis, (k, at) in enumerate(zip(key, coord, strict=True))
            if axis not in partial
        )
        if same:
            seen = COMBINE[op](seen, term)
    return full - seen if op == "sum" else torch.where(seen == full, other, full)


def _random_like(full, draw):
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return torch.randint(-4, 5, full.shape, generator=generator).to(full.dtype)


COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduction(layout: Layout):
    """Return the reduction along the P axes, or "sum" if no axis is P."""
    return next((sbp.op for sbp in layout.nd_sbp if isinstance(sbp, Partial)), "sum")


def neutral(op, dtype):
    """Return the neutral element of a reduction."""
    if op == "sum":
        return 0
    if dtype.is_floating_point:
        return {"max": -math.inf, "min": math.inf}[op]
    return {"max": torch.iinfo(dtype).min, "min": torch.iinfo(dtype).max}[op]


def joined(parts, layout: Layout, shape, dtype):
    """Combine the parts of all ranks into the full value; B copies must be equal."""
    op = reduction(layout)
    total = torch.full(shape, neutral(op, dtype), dtype=dtype)
    seen = {}
    for rank in layout.placement.ranks:
        coord = coordinate(layout, rank)
        box = extent(layout, shape, rank)
        key = tuple(
            -1 if isinstance(s, Broadcast) else at
            for s, at in zip(layout.nd_sbp, coord, strict=True)
        )
        if key in seen:
            assert torch.equal(seen[key], parts[rank]), f"rank {rank} disagrees with its replica"
            continue
        seen[key] = parts[rank]
        target = cut(total, box)
        target.copy_(COMBINE[op](target, parts[rank]))
    return total


def has_partial(layout: Layout):
    return any(isinstance(sbp, Partial) for sbp in layout.nd_sbp)


def line_layout(device_type, num_ranks, sbp):
    """Return a 1-D layout over ranks 0 .. num_ranks-1."""
    return Layout(Placement.line(device_type, num_ranks), (sbp,))

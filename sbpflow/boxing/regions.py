"""Describes exchanges of boxes between ranks that share memory. They need no buffers: each box is
copied from the part to the message, and from the message to the result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sbpflow.boxing.copies import Shape, cutter, lengths
from sbpflow.boxing.moves import Box, shift
from sbpflow.boxing.step import BoxingStep
from sbpflow.runtime.ranks.shared_memory import MOST_BYTES, MOST_GATHERED
from sbpflow.sbp.sbp import Partial

Views = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a part. ``views`` returns the views that form the box: one view, or several views
    [rows, columns] side by side.
    """

    shape: Shape
    views: Views

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def take(self, part: Tensor, values: Tensor) -> None:
        """Copy the region of ``part`` into ``values``, a tensor of the box's shape."""
        views = self.views(part)
        if len(views) == 1:
            values.view(views[0].shape).copy_(views[0])
        else:
            torch.cat(views, 1, out=values)

    def put(self, part: Tensor, values: Tensor) -> None:
        """Copy ``values``, a tensor of the box's shape, into the region of ``part``."""
        views = self.views(part)
        if len(views) == 1:
            views[0].copy_(values.view(views[0].shape))
            return
        pieces = values.split([view.shape[1] for view in views], 1)
        for view, piece in zip(views, pieces, strict=True):
            view.copy_(piece)


@dataclass(frozen=True, slots=True)
class Direct:
    """The boxes that a rank sends to and receives from other ranks in a step.

    ``own`` copies the box that stays on the rank from the part to the result. ``shape`` is the
    shape of the result, or None outside the destination.
    """

    shape: Shape | None
    sends: dict[int, Region]
    receives: dict[int, Region]
    own: Callable[[Tensor, Tensor], None] | None


def direct_exchange(
    step: BoxingStep, rank: int, group: tuple[int, ...], least: int
) -> Direct | None:
    """Return the boxes of an all-to-all whose largest box has at least ``least`` bytes, or of such
    an all-gather of equal parts, at most ``MOST_GATHERED`` bytes per rank; None for other steps.

    All ranks of the group must make the same decision, so this function looks at the transfers of
    the whole group.
    """
    kinds = (*step.src.nd_sbp, *step.dst.nd_sbp)
    if any(isinstance(sbp, Partial) for sbp in kinds):
        return None
    inside = [m.numel for m in step.moves if m.src in group]
    if step.collective == "all_gather":
        alike = len(inside) == len(group) ** 2 and len(set(inside)) == 1
        if not alike or step.bytes_sent(rank) > MOST_GATHERED:
            return None
    elif step.collective != "all_to_all":
        return None
    if not least <= max(inside, default=0) * step.dtype.itemsize <= MOST_BYTES:
        return None
    src_box = step.src.part_slices(step.shape, rank)
    dst_box = step.dst.part_slices(step.shape, rank)
    leaving = _regions(step, rank, src_box, step.src_columns, sends=True)
    coming = _regions(step, rank, dst_box, step.dst_columns, sends=False)
    stays, place = leaving.pop(rank, None), coming.pop(rank, None)
    own = None if stays is None or place is None else _copy(stays, place, step.src_columns)
    shape = None if dst_box is None else lengths(dst_box)
    return Direct(shape, leaving, coming, own)


def _regions(
    step: BoxingStep, rank: int, whole: Box | None, columns: Sequence[int] | None, *, sends: bool
) -> dict[int, Region]:
    """Return the regions of this rank's part that it sends, or receives, by the other rank."""
    if whole is None:
        return {}
    moves = {
        m.dst if sends else m.src: m for m in step.moves if rank == (m.src if sends else m.dst)
    }
    shape = lengths(whole)
    boxes = {peer: shift(move.box, whole) for peer, move in moves.items() if move.numel}
    return {peer: Region(lengths(box), _views(box, shape, columns)) for peer, box in boxes.items()}


def _copy(
    stays: Region, place: Region, src_columns: Sequence[int] | None
) -> Callable[[Tensor, Tensor], None]:
    if src_columns is None:
        return lambda part, out: place.put(out, stays.views(part)[0])
    return lambda part, out: stays.take(part, place.views(out)[0])


def _views(box: Box, shape: Shape, columns: Sequence[int] | None) -> Views:
    """Return a function that returns the views of a box in a part of ``shape``.

    Column i of the layout is column ``columns[i]`` of the part, which must then be contiguous.
    Blocks of columns at equal distances form a single view [rows, blocks, columns of a block],
    because a single copy is faster than one for each block.
    """
    if columns is None:
        cut = cutter(box, shape)
        return lambda part: [cut(part)]
    rows, places = box[0], columns[box[1]]
    blocks = _blocks(places)
    starts = [block.start for block in blocks]
    widths = {block.stop - block.start for block in blocks}
    steps = {after - before for before, after in pairwise(starts)}
    if len(blocks) == 1 or (len(widths) == len(steps) == 1 and min(steps) > 0):
        size = (rows.stop - rows.start, len(blocks), min(widths))
        strides = (shape[1], min(steps, default=0), 1)
        first = rows.start * shape[1] + starts[0]

        return lambda part: [part.as_strided(size, strides, part.storage_offset() + first)]
    return lambda part: [part[rows, block] for block in blocks]


def _blocks(places: Sequence[int]) -> list[slice]:
    """Return ``places`` as ranges of ascending places."""
    breaks = [n for n, (a, b) in enumerate(pairwise(places), 1) if b != a + 1]
    edges = [0, *breaks, len(places)]
    return [slice(places[a], places[b - 1] + 1) for a, b in pairwise(edges)]

"""Computes which rank sends which box of a logical tensor to which rank, for any two layouts.

A conversion is a set of transfers (source rank, destination rank, box); ``step`` chooses the
collective that performs these transfers. The same rules apply to all layouts, placements, and
numbers of axes:

* Source ranks that differ only along B axes store the same data: one of them sends it.
* Source ranks that differ only along P axes store different terms: all are sent, and the receiver
  combines them.
* Destination ranks that differ only along P axes store terms of the result: exactly one of them
  receives each source term, and the others fill in the neutral element. All copies along B axes
  make the same choice.
* If source and destination reduce differently, as in P -> P(max), one rank must receive all terms
  of a box in order to combine them. A single step cannot do both reductions, so ``plan`` uses
  several steps; the transfers computed here only show whether anything must be sent.

Data that is already in place counts as a transfer from a rank to itself, at no cost. All functions
are pure arithmetic.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Sbp

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class BoxTransfer:
    """Rank ``src`` sends ``box`` to ``dst`` (possibly itself). The box uses indices of the full
    tensor.
    """

    src: int
    dst: int
    box: Box

    @property
    def numel(self) -> int:
        return numel(self.box)


@dataclass(frozen=True, slots=True)
class _Cell:
    """The ranks that store the same box (in a source, also the same term), grouped into ``rows`` of
    equal copies.

    A source cell has one row, and any of its ranks may send. A destination cell has one row per
    coordinate along the P axes; each source term goes to only one of these rows.
    """

    rows: tuple[tuple[int, ...], ...]
    box: Box


def numel(box: Box) -> int:
    """Return the number of elements in a box; 1 for a 0-d tensor."""
    # A loop is twice as fast as ``math.prod`` here, and this function is called for every pair of
    # parts.
    count = 1
    for extent in box:
        count *= extent.stop - extent.start
    return count


def shift(box: Box, origin: Box) -> Box:
    """Return ``box`` in coordinates relative to the start of ``origin``."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, origin, strict=True)
    )


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or ``None`` if it is empty."""
    both: list[slice] = []
    for x, y in zip(a, b, strict=True):
        start, stop = max(x.start, y.start), min(x.stop, y.stop)
        if start >= stop:
            return None
        both.append(slice(start, stop))
    return tuple(both)


@lru_cache(maxsize=4096)
def find_moves(src: Layout, dst: Layout, shape: tuple[int, ...]) -> tuple[BoxTransfer, ...]:
    """Return all transfers of ``src -> dst``, at most one per pair of ranks, ordered by (dst, src)
    cells."""
    # All terms of a source are sent, so each needs a cell. In a destination, a term goes to only
    # one of the coordinates along the P axes, so these coordinates share a cell.
    sources = _Sources(_cells(src, shape, (Broadcast,)))
    together = not one_step_legal(src, dst)
    moves: list[BoxTransfer] = []
    for target in _cells(dst, shape, (Broadcast, Partial)):
        # All source cells in a bundle send to the same row of the target cell. If source and
        # destination reduce differently, a bundle contains all cells that overlap the target cell
        # in the same box; otherwise, it contains a single cell.
        bundles: dict[object, tuple[Box, list[_Cell]]] = {}
        for number, source in enumerate(sources.near(target.box)):
            box = intersect(source.box, target.box)
            if box is not None:
                key = tuple((s.start, s.stop) for s in box) if together else number
                bundles.setdefault(key, (box, []))[1].append(source)
        for box, cells in bundles.values():
            offers = [
                [
                    _meet(cell.rows[0], receiver, src.placement, dst.placement)
                    for cell in cells
                    for receiver in row
                ]
                for row in target.rows
            ]
            pairs = min(offers, key=lambda offer: _effort(offer, src.placement, dst.placement))
            moves += [BoxTransfer(sender, receiver, box) for sender, receiver in pairs]
    return tuple(moves)


def one_step_legal(src: Layout, dst: Layout) -> bool:
    """Return True if a single step can do the conversion.

    A step does at most one kind of reduction, so P(max) -> P needs several steps.
    """
    ops = {sbp.op for sbp in (*src.nd_sbp, *dst.nd_sbp) if isinstance(sbp, Partial)}
    return len(ops) <= 1


def elements_sent(src: Layout, dst: Layout, shape: tuple[int, ...]) -> dict[int, int]:
    """Return how many elements each rank sends to others; ranks that send nothing may be missing.

    The counts match the transfers of ``find_moves``. On a single placement with one axis, they are
    computed without listing the transfers, whose number is quadratic in the number of ranks: unless
    every rank already stores its part, each rank sends all of its data once (or once to every rank
    if the destination is B), except the data that it keeps for its own part.
    """
    if src.placement != dst.placement or src.placement.ndim != 1:
        sent: dict[int, int] = {}
        for move in find_moves(src, dst, shape):
            if move.src != move.dst:
                sent[move.src] = sent.get(move.src, 0) + move.numel
        return sent
    for layout in (src, dst):
        # This call raises SbpError if the layout does not fit the shape.
        layout.part_slices(shape, layout.placement.ranks[0])
    (before,), (after,) = src.nd_sbp, dst.nd_sbp
    ranks = src.placement.ranks
    if not one_step_legal(src, dst):  # every other rank sends its term to the first rank
        return dict.fromkeys(ranks[1:], numel(src.part_slices(shape, ranks[0]) or ()))
    if isinstance(before, Broadcast) or isinstance(after, Partial):
        return {}  # every rank already stores what it needs
    copies = len(ranks) if isinstance(after, Broadcast) else 1
    sent = {}
    for rank in ranks:
        old, new = src.part_slices(shape, rank) or (), dst.part_slices(shape, rank) or ()
        kept = intersect(old, new)
        sent[rank] = copies * numel(old) - (numel(kept) if kept is not None else 0)
    return sent


class _Sources:
    """Finds the source cells that overlap a box without comparing every pair of cells.

    Along a dim, the boxes of a layout are either equal or disjoint. If the cells are sorted by
    their starts along that dim, the cells that overlap a box are adjacent, and a binary search
    finds the first and the last. The dim with the most splits is used.
    """

    def __init__(self, cells: list[_Cell]) -> None:
        full = [(cell, n) for n, cell in enumerate(cells) if numel(cell.box)]
        num_dims = len(cells[0].box) if cells else 0
        starts = [{cell.box[dim].start for cell, _ in full} for dim in range(num_dims)]
        dim = self._dim = max(range(num_dims), key=lambda dim: len(starts[dim]), default=-1)
        self._cells = full
        if dim >= 0:
            self._cells = sorted(full, key=lambda entry: (entry[0].box[dim].start, entry[1]))
            self._starts = [cell.box[dim].start for cell, _ in self._cells]
            self._stops = [cell.box[dim].stop for cell, _ in self._cells]

    def near(self, box: Box) -> list[_Cell]:
        """Return the cells that may overlap ``box``, in their original order."""
        if self._dim < 0:
            return [cell for cell, _ in self._cells]
        first = bisect_right(self._stops, box[self._dim].start)
        last = bisect_left(self._starts, box[self._dim].stop)
        return [cell for cell, _ in sorted(self._cells[first:last], key=itemgetter(1))]


def _cells(layout: Layout, shape: tuple[int, ...], together: tuple[type[Sbp], ...]) -> list[_Cell]:
    """Group the ranks by box; coordinates along axes of the kinds ``together`` share a cell."""
    cells: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for rank in layout.placement.ranks:
        placed = list(zip(layout.placement.coord(rank) or (), layout.nd_sbp, strict=True))
        cell = tuple(0 if isinstance(sbp, together) else at for at, sbp in placed)
        row = tuple(at if isinstance(sbp, Partial) else 0 for at, sbp in placed)
        cells.setdefault(cell, {}).setdefault(row, []).append(rank)
    return [
        _Cell(
            tuple(tuple(ranks) for ranks in rows.values()),
            layout.part_slices(shape, next(iter(rows.values()))[0]) or (),
        )
        for rows in cells.values()
    ]


def _meet(
    senders: tuple[int, ...], receiver: int, origin: Placement, target: Placement
) -> tuple[int, int]:
    """Return (sender, receiver); a receiver among ``senders`` sends to itself.

    For other receivers of the same placement, the sender is the rank whose coordinates differ from
    the receiver's along the fewest axes, so that a step that changes one axis communicates only
    along that axis. Between placements, the senders take turns.
    """
    if receiver in senders:
        return receiver, receiver
    turn = target.index(receiver) % len(senders)
    in_turn = (*senders[turn:], *senders[:turn])
    if origin != target:
        return in_turn[0], receiver
    return min(in_turn, key=lambda sender: _axes_between(origin, sender, receiver)), receiver


def _effort(pairs: list[tuple[int, int]], origin: Placement, target: Placement) -> tuple[int, int]:
    """Return the number of transfers between different ranks, and, within a placement, the number
    of axes they cross (else 0).
    """
    far = sum(_axes_between(origin, *pair) for pair in pairs) if origin == target else 0
    return sum(sender != receiver for sender, receiver in pairs), far


def _axes_between(placement: Placement, a: int, b: int) -> int:
    return sum(
        x != y for x, y in zip(placement.coord(a) or (), placement.coord(b) or (), strict=True)
    )

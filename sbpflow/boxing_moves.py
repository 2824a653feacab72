"""Who sends which box of a logical tensor to whom, for any two layouts. Pure arithmetic.

Every conversion is a set of moves (from rank, to rank, box); the collective that carries them is
chosen in ``boxing_plan``. One rule covers all pairs of layouts, placements and numbers of axes:

* source ranks that differ only along B axes hold the same data: one of them sends it;
* source ranks that differ only along P axes hold terms: each term is sent, the receiver adds them;
* destination ranks that differ only along P axes share a value as a sum: exactly one of them gets
  each term, the others fill in the neutral element.

A rank that already has what it needs sends it to itself, which costs nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import Broadcast, Partial

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Rank ``src`` gives ``box``, in indices of the full tensor, to ``dst``; they may be equal."""

    src: int
    dst: int
    box: Box

    @property
    def numel(self) -> int:
        return numel(self.box)


@dataclass(frozen=True, slots=True)
class _Cell:
    """Ranks of a layout that may stand in for one another, and the box each of them has."""

    ranks: tuple[int, ...]
    box: Box


def numel(box: Box) -> int:
    """Number of elements in a box; 1 for a 0-d tensor."""
    count = 1
    for extent in box:
        count *= extent.stop - extent.start
    return count


def shift(box: Box, origin: Box) -> Box:
    """``box`` in coordinates that start where ``origin`` starts."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, origin, strict=True)
    )


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes; ``None`` if it is empty."""
    both: list[slice] = []
    for x, y in zip(a, b, strict=True):
        start, stop = max(x.start, y.start), min(x.stop, y.stop)
        if start >= stop:
            return None
        both.append(slice(start, stop))
    return tuple(both)


@lru_cache(maxsize=4096)
def find_moves(src: Layout, dst: Layout, shape: tuple[int, ...]) -> tuple[Move, ...]:
    """All moves of ``src -> dst``, at most one per pair of ranks, ordered by (dst, src) cells."""
    sources = _cells(src, shape, Broadcast)
    moves: list[Move] = []
    for target in _cells(dst, shape, Partial):
        for source in sources:
            box = intersect(source.box, target.box)
            if box is not None:
                sender, receiver = _meet(source.ranks, target.ranks, src.placement, dst.placement)
                moves.append(Move(sender, receiver, box))
    return tuple(moves)


def is_local(moves: Iterable[Move]) -> bool:
    """Whether no move leaves its rank."""
    return all(move.src == move.dst for move in moves)


def _cells(layout: Layout, shape: tuple[int, ...], free: type) -> list[_Cell]:
    """Ranks grouped by their coordinates along all axes but those with a ``free`` sbp."""
    cells: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.placement.ranks:
        coord = layout.placement.coord(rank) or ()
        key = tuple(
            0 if isinstance(sbp, free) else at for at, sbp in zip(coord, layout.nd_sbp, strict=True)
        )
        cells.setdefault(key, []).append(rank)
    return [
        _Cell(tuple(ranks), layout.part_slices(shape, ranks[0]) or ()) for ranks in cells.values()
    ]


def _meet(
    senders: tuple[int, ...], receivers: tuple[int, ...], origin: Placement, target: Placement
) -> tuple[int, int]:
    """Who sends to whom, of ranks that stand in for one another.

    A rank to itself, if one is both. Else, on one placement, two that differ along the fewest axes,
    so that one-axis steps stay on their axis; between placements, senders take turns.
    """
    for rank in receivers:
        if rank in senders:
            return rank, rank
    receiver = receivers[0]
    turn = target.index(receiver) % len(senders)
    in_turn = (*senders[turn:], *senders[:turn])
    if origin != target:
        return in_turn[0], receiver
    pairs = product(in_turn, receivers)
    return min(pairs, key=lambda pair: _axes_between(origin, *pair))


def _axes_between(placement: Placement, a: int, b: int) -> int:
    return sum(
        x != y for x, y in zip(placement.coord(a) or (), placement.coord(b) or (), strict=True)
    )

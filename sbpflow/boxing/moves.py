"""Who sends which box of a logical tensor to whom, for any two layouts. Pure arithmetic.

Every conversion is a set of moves (from rank, to rank, box); the collective that carries them is
chosen in ``boxing_plan``. One rule covers all pairs of layouts, placements and numbers of axes:

* source ranks that differ only along B axes hold the same data: one of them sends it;
* source ranks that differ only along P axes hold terms: each term is sent, the receiver adds them;
* destination ranks that differ only along P axes share a value as a sum: exactly one of them gets
  each term, the others fill in the neutral element; it is the same one for all copies along B.

A rank that already has what it needs sends it to itself, which costs nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial

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
    """Ranks with the same box. ``rows`` has a row for each way to choose among them.

    Of a source: one row, any rank of which may send. Of a destination: one row per coordinate along
    the P axes, its ranks the copies along the B axes, all of which receive.
    """

    rows: tuple[tuple[int, ...], ...]
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
    """All moves of ``src -> dst``, at most one per pair of ranks, in order of (dst, src) cells."""
    sources = _cells(src, shape, _Role.SOURCE)
    moves: list[Move] = []
    for target in _cells(dst, shape, _Role.TARGET):
        for source in sources:
            box = intersect(source.box, target.box)
            if box is None:
                continue
            offers = [
                [_meet(source.rows[0], receiver, src.placement, dst.placement) for receiver in row]
                for row in target.rows
            ]
            pairs = min(offers, key=lambda offer: _effort(offer, src.placement, dst.placement))
            moves += [Move(sender, receiver, box) for sender, receiver in pairs]
    return tuple(moves)


def is_local(moves: Iterable[Move]) -> bool:
    """Whether no move leaves its rank."""
    return all(move.src == move.dst for move in moves)


class _Role(Enum):
    SOURCE = 0
    TARGET = 1


def _cells(layout: Layout, shape: tuple[int, ...], role: _Role) -> list[_Cell]:
    """The ranks grouped by what they must send, or receive, together."""
    # Terms of a source are sent each; coordinates along P of a destination are a choice.
    together = Broadcast if role is _Role.SOURCE else (Broadcast, Partial)
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
    """Who sends to ``receiver``: itself if it can.

    Else, on one placement, the one that differs along the fewest axes, so that one-axis steps stay
    on their axis; between placements, senders take turns.
    """
    if receiver in senders:
        return receiver, receiver
    turn = target.index(receiver) % len(senders)
    in_turn = (*senders[turn:], *senders[:turn])
    if origin != target:
        return in_turn[0], receiver
    return min(in_turn, key=lambda sender: _axes_between(origin, sender, receiver)), receiver


def _effort(pairs: list[tuple[int, int]], origin: Placement, target: Placement) -> tuple[int, int]:
    """How many must really send, and how far across the axes of one placement."""
    far = sum(_axes_between(origin, *pair) for pair in pairs) if origin == target else 0
    return sum(sender != receiver for sender, receiver in pairs), far


def _axes_between(placement: Placement, a: int, b: int) -> int:
    return sum(
        x != y for x, y in zip(placement.coord(a) or (), placement.coord(b) or (), strict=True)
    )

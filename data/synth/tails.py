"""Model a column's value frequencies: masses for the first ranks, and power laws for the other
ranks.

Rank 0 is the most frequent value. Tails are sampled with the inverse CDF, which maps a uniform
number to a rank without a table as large as the vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]
Bits = NDArray[np.uint64]

_TABLE_BITS = 16


def uniform(bits: Bits) -> Floats:
    """Convert random 64-bit integers to numbers in [0, 1)."""
    return (bits >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Segment:
    """Ranks [start, stop) with total ``mass`` and a density proportional to rank ** -slope."""

    start: float
    stop: float
    mass: float
    slope: float

    def cdf(self, rank: Floats) -> Floats:
        """Return the mass between the start of the segment and a (continuous) rank."""
        power = 1.0 - self.slope
        low, high = self.start**power, self.stop**power
        return self.mass * (rank**power - low) / (high - low)

    def quantile(self, mass: Floats) -> Floats:
        """Return the (continuous) rank up to which the segment has ``mass``: the inverse of
        ``cdf``.
        """
        power = 1.0 - self.slope
        low, high = self.start**power, self.stop**power
        return (low + np.clip(mass / self.mass, 0.0, 1.0) * (high - low)) ** (1.0 / power)

    def sharpened(self, skew: float) -> "Segment":
        """Return a segment whose density is this segment's density to the power ``skew``."""
        power, sharp = 1.0 - self.slope, 1.0 - self.slope * skew + 1e-9
        density = self.mass * power / (self.stop**power - self.start**power)
        mass = density**skew * (self.stop**sharp - self.start**sharp) / sharp
        return Segment(self.start, self.stop, mass, 1.0 - sharp)


@dataclass(frozen=True)
class Tail:
    """The distribution of one column over ``size`` ranks."""

    size: int
    head: tuple[float, ...]
    segments: tuple[Segment, ...]

    @cached_property
    def bounds(self) -> Floats:
        """Return the cumulative mass after each head rank and each segment."""
        return np.cumsum([*self.head, *(segment.mass for segment in self.segments)])

    @cached_property
    def _places(self) -> NDArray[np.int16]:
        """Return a table that maps the leading bits of a random number to its index in ``bounds``,
        or to -1 if the leading bits do not determine the index.
        """
        edges = np.arange((1 << _TABLE_BITS) + 1) / (1 << _TABLE_BITS)
        low = np.searchsorted(self.bounds, edges[:-1], side="right")
        high = np.searchsorted(self.bounds, edges[1:], side="left")
        return np.where(low == high, low, -1).astype(np.int16)

    def draw(self, bits: Bits) -> Ranks:
        """Return the ranks of uniformly random 64-bit integers."""
        places = self._places[bits >> np.uint64(64 - _TABLE_BITS)].astype(np.int64)
        undecided = np.flatnonzero(places < 0)
        places[undecided] = np.searchsorted(self.bounds, uniform(bits[undecided]), side="right")
        tail = np.flatnonzero(places >= len(self.head))
        if len(tail):
            self._fill(places, tail, uniform(bits[tail]))
        return np.minimum(places, self.size - 1, out=places)

    def quantile(self, mass: Floats) -> Ranks:
        """Return the ranks at which the cumulative mass of the column reaches ``mass``."""
        places = np.searchsorted(self.bounds, mass, side="right")
        tail = np.flatnonzero(places >= len(self.head))
        self._fill(places, tail, mass[tail])
        return np.minimum(places, self.size - 1, out=places)

    def _fill(self, places: Ranks, tail: NDArray[np.int64], mass: Floats) -> None:
        """At the indices ``tail`` of ``places``, replace segment numbers with ranks."""
        which = np.minimum(places[tail], len(self.bounds) - 1)
        for index, segment in enumerate(self.segments, start=len(self.head)):
            chosen = np.flatnonzero(which == index)
            rank = segment.quantile(mass[chosen] - self.bounds[index - 1])
            places[tail[chosen]] = np.clip(rank, segment.start, segment.stop - 1e-6)

    def tail_mass(self, ranks: Ranks) -> Floats:
        """Return the mass between the head and the middle of each rank beyond the head."""
        out = np.zeros(len(ranks))
        before = 0.0
        for segment in self.segments:
            chosen = np.flatnonzero((ranks >= int(segment.start)) & (ranks < segment.stop))
            out[chosen] = before + segment.cdf(np.minimum(ranks[chosen] + 0.5, segment.stop))
            before += segment.mass
        return out

    def masses(self) -> Floats:
        """Return the mass of every rank, as an array with one entry per rank."""
        masses = np.zeros(self.size)
        masses[: len(self.head)] = self.head
        for segment in self.segments:
            ranks = np.arange(int(segment.start), int(np.ceil(segment.stop)))
            edges = segment.cdf(np.clip([*ranks, segment.stop], segment.start, segment.stop))
            masses[ranks[0] : ranks[0] + len(ranks)] += np.diff(edges)[: self.size - ranks[0]]
        return masses

    def scaled(self, scale: float) -> "Tail":
        """Return a similar distribution over a smaller vocabulary, which keeps at least 1000 values
        (all values, if there are fewer).
        """
        size = max(min(self.size, 1000), round(self.size * scale))
        if size == self.size:
            return self
        first = self.segments[0].start
        shrink = (size - first) / (self.size - first)

        def move(rank: float) -> float:
            return first + (rank - first) * shrink

        segments = (Segment(move(s.start), move(s.stop), s.mass, s.slope) for s in self.segments)
        return Tail(size, self.head, tuple(segments))

    def sharpened(self, skew: float) -> "Tail":
        """Return the distribution with masses raised to the power ``skew``. A skew of 1 changes
        nothing; 0 makes all masses equal.
        """
        if skew == 1.0:
            return self
        head = [mass**skew for mass in self.head]
        segments = [segment.sharpened(skew) for segment in self.segments]
        total = sum(head) + sum(segment.mass for segment in segments)
        return Tail(
            self.size,
            tuple(mass / total for mass in head),
            tuple(Segment(s.start, s.stop, s.mass / total, s.slope) for s in segments),
        )


@dataclass(frozen=True)
class Coarsening:
    """Maps the ranks of a fine column to the ranks of a coarser column.

    The mapping turns the fine distribution almost exactly into the coarse distribution. Each fine
    head rank maps to the coarse head rank that lacks the most mass, and the next fine ranks fill up
    the coarse head. All other ranks fill the coarse tail in order, so that rare values map to rare
    values.
    """

    fine: Tail
    coarse: Tail

    @cached_property
    def _head(self) -> tuple[Ranks, Floats]:
        """Return the coarse ranks of the fine head ranks, and the mass that each coarse head rank
        still lacks.
        """
        lacking = np.array(self.coarse.head)
        target = np.empty(len(self.fine.head), dtype=np.int64)
        for rank, mass in enumerate(self.fine.head):
            target[rank] = np.argmax(lacking)
            lacking[target[rank]] -= mass
        return target, np.maximum(lacking, 0.0)

    @cached_property
    def _table(self) -> Ranks:
        """Return a lookup table of the coarse ranks of frequent fine ranks, which occur in most
        rows.
        """
        ranks = np.arange(min(self.fine.size, 1 << _TABLE_BITS))
        target, _ = self._head
        return np.concatenate([target, self._tail(ranks[len(target) :])])

    def __call__(self, ranks: Ranks) -> Ranks:
        """Return the coarse ranks of fine ``ranks``."""
        table = self._table
        out = table[np.minimum(ranks, len(table) - 1)]
        rest = np.flatnonzero(ranks >= len(table))
        out[rest] = self._tail(ranks[rest])
        return out

    def _tail(self, ranks: Ranks) -> Ranks:
        """Return the coarse ranks of fine ranks beyond the head."""
        _, lacking = self._head
        fine_tail, coarse_head = 1.0 - sum(self.fine.head), sum(self.coarse.head)
        coarse_tail = max(1.0 - coarse_head, 0.0)
        missing = float(lacking.sum())
        mass = self.fine.tail_mass(ranks) * (missing + coarse_tail) / max(fine_tail, 1e-12)
        out = np.empty(len(ranks), dtype=np.int64)
        in_head = mass < missing
        head = np.searchsorted(np.cumsum(lacking), mass[in_head], side="right")
        out[in_head] = np.minimum(head, len(lacking) - 1)
        out[~in_head] = self.coarse.quantile(coarse_head + mass[~in_head] - missing)
        return out

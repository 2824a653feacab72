"""How often the values of a column occur: exact masses for the first ranks, power laws for the rest.

Ranks count from 0, the most frequent value first. A tail is sampled by inverse CDF, so a uniform number
gives a rank without any table of the size of the vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Ranks [start, stop) with total ``mass``, falling as rank ** -slope."""

    start: float
    stop: float
    mass: float
    slope: float

    def cdf(self, rank: Floats) -> Floats:
        """Mass below the (continuous) rank, from the segment's start."""
        power = 1.0 - self.slope
        low, high = self.start**power, self.stop**power
        return self.mass * (rank**power - low) / (high - low)

    def quantile(self, mass: Floats) -> Floats:
        """The continuous rank below which ``mass`` of the segment lies."""
        power = 1.0 - self.slope
        low, high = self.start**power, self.stop**power
        return (low + np.clip(mass / self.mass, 0.0, 1.0) * (high - low)) ** (1.0 / power)


@dataclass(frozen=True)
class Tail:
    """The distribution of one column over ``size`` ranks."""

    size: int
    head: tuple[float, ...]
    segments: tuple[Segment, ...]

    @cached_property
    def bounds(self) -> Floats:
        """Cumulative mass after each head rank and after each segment."""
        return np.cumsum([*self.head, *(segment.mass for segment in self.segments)])

    def quantile(self, mass: Floats) -> Ranks:
        """Ranks of uniform numbers ``mass`` in [0, 1)."""
        places = np.searchsorted(self.bounds, mass, side="right")
        ranks = np.minimum(places, len(self.head) - 1).astype(np.int64)
        for index, segment in enumerate(self.segments, start=len(self.head)):
            last = index == len(self.bounds) - 1
            here = np.flatnonzero(places >= index if last else places == index)
            inside = segment.quantile(mass[here] - self.bounds[index - 1])
            ranks[here] = np.clip(inside, segment.start, segment.stop - 1e-6).astype(np.int64)
        return np.minimum(ranks, self.size - 1)

    def tail_mass(self, ranks: Ranks) -> Floats:
        """Mass between the head and the middle of each rank, for ranks beyond the head."""
        out = np.zeros(len(ranks))
        before = 0.0
        for segment in self.segments:
            here = np.flatnonzero((ranks >= int(segment.start)) & (ranks < segment.stop))
            out[here] = before + segment.cdf(np.minimum(ranks[here] + 0.5, segment.stop))
            before += segment.mass
        return out

    def scaled(self, scale: float) -> "Tail":
        """The same masses over a smaller vocabulary; columns of up to 1000 values stay as they are."""
        size = max(min(self.size, 1000), round(self.size * scale))
        if size == self.size:
            return self
        first = self.segments[0].start
        shrink = (size - first) / (self.size - first)
        segments = tuple(
            Segment(
                first + (s.start - first) * shrink,
                first + (s.stop - first) * shrink,
                s.mass,
                s.slope,
            )
            for s in self.segments
        )
        return Tail(size, self.head, segments)


@dataclass(frozen=True)
class Coarsening:
    """A fixed map from the ranks of a fine column to those of a coarser one.

    The pushforward of the fine distribution is (nearly) the coarse one: head ranks go where most mass is
    still wanted, tail ranks fill the coarse tail in order, and the rarest of them top up the coarse head.
    """

    fine: Tail
    coarse: Tail

    @cached_property
    def _head(self) -> tuple[Ranks, Floats]:
        """Coarse rank of each fine head rank, and the mass still wanted by each coarse head rank."""
        wanted = np.array(self.coarse.head)
        target = np.empty(len(self.fine.head), dtype=np.int64)
        for rank, mass in enumerate(self.fine.head):
            target[rank] = np.argmax(wanted)
            wanted[target[rank]] -= mass
        return target, np.maximum(wanted, 0.0)

    def __call__(self, ranks: Ranks) -> Ranks:
        """Coarse ranks of fine ``ranks``."""
        target, wanted = self._head
        num_head = len(self.fine.head)
        out = target[np.minimum(ranks, num_head - 1)]
        tail = np.flatnonzero(ranks >= num_head)
        out[tail] = self._tail(self.fine.tail_mass(ranks[tail]), wanted)
        return out

    def _tail(self, mass: Floats, wanted: Floats) -> Ranks:
        fine_tail, coarse_head = 1.0 - sum(self.fine.head), sum(self.coarse.head)
        coarse_tail = 1.0 - coarse_head
        scaled = mass * (coarse_tail + wanted.sum()) / fine_tail
        in_tail = scaled < coarse_tail
        tail_ranks = self.coarse.quantile(coarse_head + np.minimum(scaled, coarse_tail))
        edges = np.cumsum(wanted)
        head_ranks = np.searchsorted(edges, scaled - coarse_tail, side="right")
        return np.where(in_tail, tail_ranks, np.minimum(head_ranks, len(wanted) - 1))

"""Copies of vocabularies at one moment, for checkpoints, and their sums and clocks."""

from bisect import bisect_left
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property

import numpy as np

from sbpflow.embedding.storage.live_rows import Saved
from sbpflow.embedding.vocabulary import counting_loops
from sbpflow.embedding.vocabulary import key_map as km
from sbpflow.runtime.compute.compiled import Array


@dataclass(slots=True)
class Totals:
    """Sums over trained batches; see ``GrowthCounts``."""

    live: int = 0
    pending: int = 0
    admitted: int = 0
    evicted: int = 0
    forgotten: int = 0
    lookups: int = 0
    pending_lookups: int = 0
    refused_lookups: int = 0

    def add(self, other: "Totals") -> None:
        for one in fields(other):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(slots=True)
class Clock:
    """The samples seen after each batch; ``samples[i]`` belongs to batch ``first + i``."""

    first: int = 0
    samples: list[int] = field(default_factory=lambda: [0])

    @property
    def now(self) -> int:
        return self.first + len(self.samples) - 1

    def limit(self, idle: int | None) -> int:
        """Return the first batch within the last ``idle`` samples."""
        if idle is None:
            return -1
        return self.first + bisect_left(self.samples, self.samples[-1] - idle)

    def prune(self, idle: int, trained: int) -> None:
        """Forget batches that no limit needs."""
        if len(self.samples) > 8192:
            trained_at = min(trained - self.first, len(self.samples) - 1)
            keep = bisect_left(self.samples, self.samples[trained_at] - idle) - 1
            if keep > len(self.samples) // 2:
                self.samples, self.first = self.samples[keep:], self.first + keep


class VocabularyCopy:
    """The keys of a vocabulary at one moment; they are sorted on first use."""

    def __init__(
        self, arrays: km.Arrays, now: int, clock: Array, totals: Totals, *, has_clock: bool
    ) -> None:
        self._arrays, self._now, self._clock, self._has_clock = arrays, now, clock, has_clock
        self._totals = np.array(astuple(totals), np.int64)
        # The undo has marked entries that only announced batches use as free.
        self._rows = np.flatnonzero(arrays.rows[:, km.LAST] >= 0)
        self._pending = np.flatnonzero(arrays.pending[:, km.LAST] >= 0)
        self.num_rows, self.num_pending = self._rows.size, self._pending.size

    def size(self, kind: str) -> int:
        """Return the number of values of ``column``."""
        if kind == "clock":
            return (1 + self._clock.size) if self._has_clock else 0
        if kind == "totals":
            return self._totals.size
        return self.num_pending if kind.startswith("pending") else self.num_rows

    def column(self, kind: str) -> Array:
        """Return the values of one of ``state.KEY_TENSORS``."""
        saved = self.saved
        columns = {
            "keys": lambda: counting_loops.keys_of(saved.addresses),
            "last_uses": lambda: saved.lasts,
            "counts": lambda: saved.counts,
            "pending_keys": lambda: counting_loops.keys_of(saved.pending_addresses),
            "pending_last_uses": lambda: saved.pending_lasts,
            "pending_counts": lambda: saved.pending_counts,
            "clock": lambda: np.append(self._now, self._clock),
            "totals": lambda: self._totals,
        }
        return columns[kind]()

    @cached_property
    def saved(self) -> Saved:
        """Return the keys in the order of their addresses."""
        t = self._arrays
        addresses = stored_addresses(t.rows[self._rows])
        waiting = stored_addresses(t.pending[self._pending])
        order, waiting_order = np.argsort(addresses), np.argsort(waiting)
        rows, pending = self._rows[order], self._pending[waiting_order]
        return Saved(
            addresses=addresses[order],
            lasts=t.rows[rows, km.LAST],
            counts=t.row_counts[rows] if t.row_counts.size else np.zeros(rows.size, np.int32),
            pending_addresses=waiting[waiting_order],
            pending_lasts=t.pending[pending, km.LAST],
            pending_counts=t.pending[pending, km.COUNT],
            now=self._now,
            clock=self._clock,
        )


def stored_addresses(records: Array) -> Array:
    """Return the addresses of rows or counters."""
    high, low = records[:, km.HIGH].astype(np.int64), records[:, km.LOW].astype(np.int64)
    return (high << 32) | (low & km.LOW_32)

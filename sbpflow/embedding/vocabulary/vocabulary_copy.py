"""Copies of vocabularies for checkpoints, and the clocks of vocabularies."""

from bisect import bisect_left, bisect_right
from dataclasses import astuple, dataclass, field
from functools import cached_property

import numpy as np

from sbpflow.embedding.plan.growth import Totals
from sbpflow.embedding.storage.live_rows import NO_TIME, Saved
from sbpflow.embedding.vocabulary import counting_loops
from sbpflow.embedding.vocabulary import key_map as km
from sbpflow.runtime.compute.compiled import Array


@dataclass(slots=True)
class Clock:
    """The number of samples up to the end of each batch, and the latest event time so far.

    Element i belongs to batch ``first + i``. ``times`` are ``NO_TIME`` until the first event time.
    """

    first: int = 0
    samples: list[int] = field(default_factory=lambda: [0])
    times: list[int] = field(default_factory=lambda: [NO_TIME])

    @property
    def now(self) -> int:
        return self.first + len(self.samples) - 1

    def add(self, samples: int, time: int) -> None:
        """Begin a batch whose latest sample has this event time."""
        self.samples.append(self.samples[-1] + samples)
        self.times.append(max(self.times[-1], time))

    def undo(self) -> None:
        """Remove the last batch."""
        self.samples.pop()
        self.times.pop()

    def limit(self, idle: int | None, idle_time: float | None = None) -> int:
        """Return the first batch that is within both the last ``idle`` samples and the last
        ``idle_time``, or -1 if no batch is known to be outside of them.
        """
        # Batches before ``first`` may be within any limit that reaches back to ``first``: a run may
        # continue a clock that was pruned for smaller limits.
        samples, unknown = self.samples, -1 - self.first
        at = unknown
        if idle is not None:
            at = bisect_left(samples, samples[-1] - idle) or unknown
        if idle_time is not None:
            at = max(at, self._first_since(idle_time, len(samples) - 1) or unknown)
        return self.first + at

    def prune(self, idle: int, idle_time: float | None, trained: int) -> None:
        """Forget batches that are no longer needed to compute any limit."""
        samples = self.samples
        if len(samples) > 8192:
            at = min(trained - self.first, len(samples) - 1)
            keep = bisect_left(samples, samples[at] - idle) - 1
            if idle_time is not None:
                keep = min(keep, self._first_since(idle_time, at) - 1)
            if keep > len(samples) // 2:
                self.samples, self.times = samples[keep:], self.times[keep:]
                self.first += keep

    def _first_since(self, idle_time: float, at: int) -> int:
        """Return the first batch within the ``idle_time`` before batch ``at``.

        Batches before the first event time count as if they had that time.
        """
        oldest, timed = self.times[at] - idle_time, bisect_right(self.times, NO_TIME)
        if timed > at or self.times[timed] >= oldest:
            return 0
        return bisect_left(self.times, oldest)


class VocabularyCopy:
    """The keys of a vocabulary at one moment; they are sorted on first use."""

    def __init__(self, arrays: km.Arrays, now: int, clock: Clock, totals: Totals) -> None:
        self._arrays, self._now = arrays, now
        self._clock, self._times = np.array(clock.samples), np.array(clock.times)
        self._has_clock = int(arrays.state[km.FIRST_BUCKET]) == 0
        self._totals = np.array(astuple(totals), np.int64)
        self.num_rows, self.num_pending = totals.live, totals.pending

    def size(self, kind: str) -> int:
        """Return the number of values that ``column`` would return."""
        if kind == "clock":
            return (1 + self._clock.size) if self._has_clock else 0
        if kind == "times":
            return self._times.size if self._has_clock else 0
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
            "times": lambda: self._times,
            "totals": lambda: self._totals,
        }
        return columns[kind]()

    @cached_property
    def saved(self) -> Saved:
        """Return the keys in the order of their addresses."""
        slots = used_slots(self._arrays)
        slots = slots[np.argsort(slots[:, km.ADDRESS], kind="stable")]  # nearly sorted
        addresses, lasts = slots[:, km.ADDRESS], slots[:, km.VALUE] >> 32
        contents = slots[:, km.VALUE].astype(np.int32)  # the lower 32 bits
        has_row, row_counts = contents > 0, self._arrays.row_counts
        rows, waits = contents[has_row] - 1, ~has_row
        return Saved(
            addresses=addresses[has_row],
            lasts=lasts[has_row].astype(np.int32),
            counts=row_counts[rows] if row_counts.size else np.zeros(rows.size, np.int32),
            pending_addresses=addresses[waits],
            pending_lasts=lasts[waits].astype(np.int32),
            pending_counts=-contents[waits],
            now=self._now,
            clock=self._clock,
            times=self._times,
        )


def used_slots(t: km.Arrays) -> Array:
    """Return the slots of all keys, nearly in the order of their addresses."""
    edge = t.state[km.EDGE]
    slots = np.concatenate([t.new_slots, t.slots[edge:]]) if edge else t.slots
    return slots[slots[:, km.VALUE] != 0]

"""Assigns rows to slots, given only the row numbers of announced batches.

Decisions depend only on the order of the calls, never on timing. Rows are evicted in the order of
Belady's MIN, applied to the announced batches: first rows that no announced batch uses, starting
with the least recently used, and then rows whose next use is furthest away. Rows of batches that
are admitted but not yet released are never evicted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np

from sbpflow.embedding.cache.slot_lane import QUEUE_ENTRIES, Lane
from sbpflow.embedding.cache.slot_layout import NEVER, NEW, RECORD_BYTES, SLOT, Array, find_loops
from sbpflow.errors import ConfigError

LEAST_LANE = 1 << 16  # slots; fewer are not worth a thread of their own
SLOT_BYTES = 4 + 8 * QUEUE_ENTRIES  # bytes that the planning of a slot takes
LANE_THREADS = "slots"  # the start of the threads' names


def planning_bytes(num_rows: int, num_slots: int) -> int:
    """Return the size of a planner in bytes, excluding the lists of the batches in flight."""
    return RECORD_BYTES * (num_rows + 1) + 8 * (num_rows // 64 + 1) + SLOT_BYTES * num_slots


def cache_for(num_slots: int, num_rows: int) -> str:
    """Return a value for ``cache`` that gives 1.25 times ``num_slots`` slots, at most 100%."""
    return f"{min(100.0, math.ceil(1250 * num_slots / num_rows) / 10):g}%"


def name_tables(names: Iterable[str]) -> str:
    """Return the phrase that refers to the tables of a store in messages."""
    first, *others = dict.fromkeys(names)
    if not others:
        return f"table {first}"
    return f"tables {first} and {len(others)} other{'s' * (len(others) > 1)}"


class Admission(NamedTuple):
    """The missing rows of an admitted batch, and the rows evicted for them.

    ``stored`` rows have been written to slower memory; ``new`` rows never, so they still have their
    initial values. The slots of ``evicted`` rows are the ones that these rows had. The arrays are
    int32, and valid until the next admission.
    """

    stored: Array
    stored_slots: Array
    new: Array
    new_slots: Array
    evicted: Array
    evicted_slots: Array

    @property
    def num_rows(self) -> int:
        """Return the number of missing rows."""
        return self.stored.size + self.new.size

    @staticmethod
    def of(lanes: Sequence[tuple[Array, Array, Array, Array]]) -> "Admission":
        """Return the admission of all lanes, given the results of ``Lane.admit``."""
        columns: list[list[Array]] = [[] for _ in range(6)]
        for stored, new, slots, evicted in lanes:
            parts = (
                stored,
                slots[: stored.size],
                new,
                slots[stored.size :],
                evicted,
                slots[slots.size - evicted.size :],
            )
            for column, part in zip(columns, parts, strict=True):
                column.append(part)
        return Admission(*(np.concatenate(c) if len(c) > 1 else c[0] for c in columns))


class SlotPlanner:
    """Leases ``num_slots`` slots to the rows of batches, on a rank that has ``num_rows`` rows.

    Batches are numbered from 0, and are announced, admitted, and released in this order.
    ``records`` has one record for each row, and one for the address after the last row. With
    several threads, each plans the rows and the slots of one lane. There is only one lane if there
    are few slots, and after a lane could not hold its rows of a batch.
    """

    def __init__(
        self, num_rows: int, num_slots: int, *, compiled: bool | None = None, num_threads: int = 1
    ) -> None:
        if num_rows >= NEVER:
            raise ConfigError(
                f"a rank can have at most {NEVER - 1:,} cached rows, got {num_rows:,}; use more "
                "ranks"
            )
        self._loops = find_loops(compiled=compiled)
        self.num_rows, self.num_slots = num_rows, num_slots
        self.records = np.empty((num_rows + 1, 4), np.int32)
        self.records[:] = NEW, -1, 0, NEVER
        # Absent rows have the slot that the kernel reads as zeros.
        self.records[num_rows, SLOT] = num_slots
        seen = np.zeros(num_rows // 64 + 1, np.int64)
        count = min(num_threads, num_slots // LEAST_LANE)
        count = 1 << (max(count, 1).bit_length() - 1)
        sizes = [_lane_rows(num_rows, lane, count) for lane in range(count)]
        ends = [sum(sizes[:lane]) * num_slots // max(num_rows, 1) for lane in range(count + 1)]
        ends[-1] = num_slots
        self._lanes = [
            Lane(self._loops, self.records, seen, (start, stop), (lane, count))
            for lane, (start, stop) in enumerate(pairwise(ends))
        ]
        self._threads = ThreadPoolExecutor(count, LANE_THREADS) if count > 1 else None
        self.num_announced = self.num_admitted = self.num_released = 0
        # The last refused batch, the number of releases at that time, and the number of slots
        # needed.
        self._refused = (-1, 0, 0)

    @property
    def num_leased(self) -> int:
        """Return the number of rows of batches that are admitted but not released."""
        return sum(lane.num_leased for lane in self._lanes)

    @property
    def num_bytes(self) -> int:
        """Return the size of all arrays in bytes."""
        return self.records.nbytes + sum(lane.num_bytes for lane in self._lanes)

    def _map(self, work: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
        """Return ``work(lane, ...)`` for every lane."""
        run = map if self._threads is None else self._threads.map
        return list(run(work, self._lanes, *arguments))

    def announce(self, addresses: Array) -> int:
        """Announce the next batch's ``addresses``, which may repeat; return the number of distinct
        rows.
        """
        batch, oldest = self.num_announced, self.num_released
        counts = self._map(partial(Lane.announce, batch=batch, oldest=oldest), repeat(addresses))
        self.num_announced += 1
        return sum(counts)

    def admit(self) -> Admission | int:
        """Admit the oldest announced batch that is not yet admitted.

        If there are too few slots for this batch and the batches in flight, change nothing, and
        return the number of slots that would be enough.
        """
        batch = self.num_admitted
        # If nothing has been released since the last attempt, the batch still does not fit.
        if self._refused[:2] == (batch, self.num_released):
            return self._refused[2]
        counts = self._map(partial(Lane.count_needed, batch=batch))
        if (needed := sum(counts)) > self.num_slots:
            self._refused = (batch, self.num_released, needed)
            return needed
        if any(n > lane.num_slots for n, lane in zip(counts, self._lanes, strict=True)):
            self._merge_lanes()
            self._map(partial(Lane.count_needed, batch=batch))
        newest = self.num_announced - 1
        admitted = self._map(partial(Lane.admit, batch=batch, newest=newest))
        self.num_admitted += 1
        return Admission.of(admitted)

    def _merge_lanes(self) -> None:
        """Plan with one lane from now on, because a batch fits, but not in its lanes."""
        self._lanes = [Lane.merged(self._lanes, range(self.num_released, self.num_announced))]
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def release(self) -> None:
        """Release the oldest batch, even if it is not admitted."""
        batch = self.num_released
        is_admitted = batch < self.num_admitted
        self._map(partial(Lane.release, batch=batch, is_admitted=is_admitted))
        self.num_released += 1
        self.num_admitted = max(self.num_admitted, self.num_released)

    def translate(self, addresses: Array, slots: Array) -> int:
        """Write the slots of the addresses of an admitted batch; return the number of addresses
        without a slot.
        """
        count = len(self._lanes)
        parts = [np.array_split(array, count) for array in (addresses, slots)]
        return sum(self._map(Lane.translate, *parts))


def _lane_rows(num_rows: int, lane: int, count: int) -> int:
    """Return the number of rows of a lane, which has every ``count``-th block of 64 rows."""
    blocks, rest = divmod(num_rows, 64 * count)
    return 64 * blocks + min(max(rest - 64 * lane, 0), 64)

"""Assigns rows to slots, given only the row numbers of announced batches.

Decisions depend only on the order of the calls, never on timing. Rows are evicted in the order of
Belady's MIN, applied to the announced batches: first rows that no announced batch uses, starting
with the least recently used, and then rows whose next use is furthest away. Rows of batches that
are admitted but not yet released are never evicted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sbpflow.embedding.cache.slot_layout import (
    FREE,
    LEASED,
    NEVER,
    NEW,
    RECORD_BYTES,
    SLOT,
    TAIL,
    Array,
    find_loops,
)
from sbpflow.errors import ConfigError

_LEAST_RING, _LEAST_ROWS = 4, 64
_QUEUE_ENTRIES = 3  # queue entries per slot


def planning_bytes(num_rows: int, num_slots: int) -> int:
    """Return the size of a planner in bytes, excluding the lists of the batches in flight."""
    return (
        RECORD_BYTES * (num_rows + 1)
        + 8 * (num_rows // 64 + 1)
        + (4 + 8 * _QUEUE_ENTRIES) * num_slots
    )


def cache_for(num_slots: int, num_rows: int) -> str:
    """Return a value for ``cache`` that gives 1.25 times ``num_slots`` slots, at most 100%."""
    return f"{min(100.0, math.ceil(1250 * num_slots / num_rows) / 10):g}%"


def name_tables(names: Iterable[str]) -> str:
    """Return the phrase that refers to the tables of a store in messages."""
    first, *others = dict.fromkeys(names)
    if not others:
        return f"table {first}"
    return f"tables {first} and {len(others)} other{'s' * (len(others) > 1)}"


@dataclass(frozen=True, slots=True)
class Admission:
    """The missing rows of an admitted batch, and the rows evicted for them.

    ``slots`` contains the slots of the ``stored`` rows, followed by those of the ``new`` rows,
    which were never evicted and still have their initial values. ``evicted`` contains the rows that
    previously had the last ``len(evicted)`` of these slots. The arrays are int32, and valid until
    the next admission.
    """

    stored: Array
    new: Array
    slots: Array
    evicted: Array

    @property
    def stored_slots(self) -> Array:
        return self.slots[: self.stored.size]

    @property
    def new_slots(self) -> Array:
        return self.slots[self.stored.size :]

    @property
    def evicted_slots(self) -> Array:
        return self.slots[self.slots.size - self.evicted.size :]


class SlotPlanner:
    """Leases ``num_slots`` slots to the rows of batches, on a rank that has ``num_rows`` rows.

    Batches are numbered from 0, and are announced, admitted, and released in this order.
    ``records`` has one record for each row, and one for the address after the last row.
    """

    def __init__(self, num_rows: int, num_slots: int, *, compiled: bool | None = None) -> None:
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
        self._seen = np.zeros(num_rows // 64 + 1, np.int64)
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._queue = np.empty((_QUEUE_ENTRIES * num_slots, 2), np.int32)
        self._state = np.zeros(4, np.int64)
        self._state[FREE] = num_slots
        self._resize(_LEAST_RING, _LEAST_ROWS)
        # compiles the loop before training
        self._loops.compact(self.records, self._queue, self._state)
        self.num_announced = self.num_admitted = self.num_released = 0
        # The last refused batch, the number of releases at that time, and the number of slots
        # needed.
        self._refused = (-1, 0, 0)

    @property
    def num_leased(self) -> int:
        """Return the number of rows of batches that are admitted but not released."""
        return int(self._state[LEASED])

    @property
    def num_bytes(self) -> int:
        """Return the size of all arrays in bytes."""
        arrays = (
            self.records,
            self._seen,
            self._free,
            self._queue,
            self._rows,
            self._nexts,
            self._candidates,
        )
        return sum(array.nbytes for array in arrays)

    def announce(self, addresses: Array) -> int:
        """Announce the next batch's ``addresses``, which may repeat; return the number of distinct
        rows.
        """
        batch, start, count = self.num_announced, 0, 0
        ring, width = self._rows.shape
        if batch - self.num_released >= ring - 1:
            self._resize(2 * ring, width)
        at = batch % len(self._rows)
        self._num_candidates[at] = 0
        while True:
            start, count = self._loops.announce(
                addresses,
                start,
                count,
                batch,
                self.num_released,
                self.records,
                self._seen,
                self._rows,
                self._nexts,
                self._candidates,
                self._num_candidates,
            )
            if start == addresses.size:
                break
            self._resize(*np.multiply(self._rows.shape, (1, 2)))
        self._counts[at] = count
        self.num_announced += 1
        return count

    def admit(self) -> Admission | int:
        """Admit the oldest announced batch that is not yet admitted.

        If there are too few slots for this batch and the batches in flight, change nothing, and
        return the number of slots that would be enough.
        """
        batch = self.num_admitted
        # If nothing has been released since the last attempt, the batch still does not fit.
        if self._refused[:2] == (batch, self.num_released):
            return self._refused[2]
        stored, new, slots, evicted = self._found
        num_stored, num_new, num_evicted = self._loops.admit(
            batch,
            self.num_announced - 1,
            self._wanted(batch),
            self.num_slots,
            self.records,
            self._candidates,
            self._num_candidates,
            self._free,
            self._queue,
            self._state,
            stored,
            new,
            slots,
            evicted,
        )
        if num_stored < 0:
            self._refused = (batch, self.num_released, int(num_evicted))
            return int(num_evicted)
        self.num_admitted += 1
        return Admission(
            stored[:num_stored],
            new[:num_new],
            slots[: num_stored + num_new],
            evicted[:num_evicted],
        )

    def release(self) -> None:
        """Release the oldest batch, even if it is not admitted."""
        batch = self.num_released
        wanted = self._wanted(batch)
        if self._state[TAIL] + wanted.size > len(self._queue):
            self._loops.compact(self.records, self._queue, self._state)
        self._loops.release(
            batch,
            batch < self.num_admitted,
            wanted,
            self._nexts[batch % len(self._rows), : wanted.size],
            self.records,
            self._candidates,
            self._num_candidates,
            self._queue,
            self._state,
        )
        self.num_released += 1
        self.num_admitted = max(self.num_admitted, self.num_released)

    def translate(self, addresses: Array, slots: Array) -> int:
        """Write the slots of the addresses of an admitted batch; return the number of addresses
        without a slot.
        """
        return self._loops.translate(addresses, self.records, slots)

    def _wanted(self, batch: int) -> Array:
        at = batch % len(self._rows)
        return self._rows[at, : self._counts[at]]

    def _resize(self, ring: int, width: int) -> None:
        """Allocate space for more batches in flight, or for more rows per batch."""
        new = [np.empty((ring, width), np.int32) for _ in range(3)]
        counts = [np.zeros(ring, np.int64) for _ in range(2)]
        if hasattr(self, "_rows"):
            old = (self._rows, self._nexts, self._candidates)
            for batch in range(self.num_released, self.num_announced + 1):
                for source, target in zip(old, new, strict=True):
                    row = source[batch % len(source)]
                    target[batch % ring, : row.size] = row
                for source, target in zip(
                    (self._counts, self._num_candidates), counts, strict=True
                ):
                    target[batch % ring] = source[batch % source.size]
        self._rows, self._nexts, self._candidates = new
        self._counts, self._num_candidates = counts
        self._found = [np.empty(width, np.int32) for _ in range(4)]

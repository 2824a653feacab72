"""Plans the slots of a lane: every n-th block of 64 rows, with its own share of the slots, so that
the lanes of a planner can run in parallel.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from sbpflow.embedding.cache.slot_layout import FREE, HEAD, LAST, LEASED, PLACE, TAIL, Array

_LEAST_RING, _LEAST_ROWS = 4, 64
QUEUE_ENTRIES = 3  # queue entries per slot


class Lane:
    """Leases the slots [start, stop) of ``bounds`` to the rows of lane ``place[0]`` of
    ``place[1]``, a power of two. All lanes share ``records`` and ``seen``, but not their entries.
    """

    def __init__(
        self,
        loops: ModuleType,
        records: Array,
        seen: Array,
        bounds: tuple[int, int],
        place: tuple[int, int],
    ) -> None:
        start, stop = bounds
        self._loops, self._records, self._seen = loops, records, seen
        self._place, self.num_slots = place, stop - start
        self._free = np.arange(stop - 1, start - 1, -1, dtype=np.int32)
        self._queue = np.empty((QUEUE_ENTRIES * self.num_slots, 2), np.int32)
        self._state = np.zeros(4, np.int64)
        self._state[FREE] = self.num_slots
        self._mine = np.empty(0, np.int32)
        self._missing = (0, 0, 0)  # the result of ``count_missing``
        self._resize(_LEAST_RING, _LEAST_ROWS, range(0))
        # compiles the loop before training
        loops.compact(records, self._queue, self._state)

    @staticmethod
    def merged(lanes: Sequence["Lane"], in_flight: range) -> "Lane":
        """Return one lane with the rows and slots of all lanes, whose bounds are consecutive."""
        one, records = lanes[0], lanes[0]._records
        total = sum(lane.num_slots for lane in lanes)
        whole = Lane(one._loops, records, one._seen, (0, total), (0, 1))
        free = np.concatenate([lane._free[: lane._state[FREE]] for lane in lanes])
        queue = np.concatenate(
            [lane._queue[lane._state[HEAD] : lane._state[TAIL]] for lane in lanes]
        )
        whole._free[: free.size] = free
        whole._queue[: len(queue)] = queue[np.argsort(queue[:, 1], kind="stable")]
        whole._state[FREE], whole._state[TAIL] = free.size, len(queue)
        whole._state[LEASED] = sum(lane.num_leased for lane in lanes)
        ring = max(len(lane._rows) for lane in lanes)
        whole._resize(ring, sum(lane._rows.shape[1] for lane in lanes), range(0))
        for batch in in_flight:
            at, start, listed = batch % ring, 0, 0
            for lane in lanes:
                own = batch % len(lane._rows)
                rows = lane._wanted(batch)
                stop = start + rows.size
                whole._rows[at, start:stop] = rows
                whole._nexts[at, start:stop] = lane._nexts[own, : rows.size]
                records[rows[records[rows, LAST] == batch], PLACE] += start
                candidates = lane._candidates[own, : lane._num_candidates[own]]
                whole._candidates[at, listed : listed + candidates.size] = candidates
                start, listed = stop, listed + candidates.size
            whole._counts[at], whole._num_candidates[at] = start, listed
        return whole

    @property
    def num_leased(self) -> int:
        """Return the number of rows of batches that are admitted but not released."""
        return int(self._state[LEASED])

    @property
    def num_bytes(self) -> int:
        """Return the size of the arrays in bytes, including the lane's share of ``seen``."""
        arrays = (self._free, self._queue, self._rows, self._nexts, self._candidates)
        return sum(array.nbytes for array in arrays) + self._seen.nbytes // self._place[1]

    def announce(self, addresses: Array, *, batch: int, oldest: int) -> int:
        """List the lane's distinct rows among ``addresses``; return their number. ``oldest`` is the
        oldest batch in flight.
        """
        lane, count = self._place
        if count > 1:
            if self._mine.size < addresses.size or self._mine.dtype != addresses.dtype:
                self._mine = np.empty(addresses.size, addresses.dtype)
            number = self._loops.select(addresses, lane, count - 1, self._mine)
            addresses = self._mine[:number]
        start, count = 0, 0
        ring, width = self._rows.shape
        in_flight = range(oldest, batch + 1)
        if len(in_flight) >= ring:
            self._resize(2 * ring, width, in_flight)
        at = batch % len(self._rows)
        self._num_candidates[at] = 0
        while True:
            start, count = self._loops.announce(
                addresses,
                start,
                count,
                batch,
                oldest,
                self._records,
                self._seen,
                self._rows,
                self._nexts,
                self._candidates,
                self._num_candidates,
            )
            if start == addresses.size:
                break
            self._resize(len(self._rows), 2 * width, in_flight)
            width *= 2
        self._counts[at] = count
        return count

    def count_needed(self, *, batch: int) -> int:
        """Count the missing rows of a batch. Return how many slots the batches in flight would then
        need.
        """
        stored, new, _, _ = self._found
        self._missing = self._loops.count_missing(
            batch, self._wanted(batch), self._records, stored, new
        )
        return self.num_leased + self._missing[2]

    def admit(self, *, batch: int, newest: int) -> tuple[Array, Array, Array, Array]:
        """Admit the batch of the last ``count_needed``; ``newest`` is the last announced batch.

        Return stored rows, new rows, the slots of both, and evicted rows, which had the last of
        these slots.
        """
        stored, new, slots, evicted = self._found
        num_stored, num_new, _ = self._missing
        num_evicted = self._loops.admit(
            batch,
            newest,
            self._wanted(batch),
            *self._missing,
            self._records,
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
        slots, evicted = slots[: num_stored + num_new], evicted[:num_evicted]
        return stored[:num_stored], new[:num_new], slots, evicted

    def release(self, *, batch: int, is_admitted: bool) -> None:
        """Release the oldest batch, even if it is not admitted."""
        wanted = self._wanted(batch)
        if self._state[TAIL] + wanted.size > len(self._queue):
            self._loops.compact(self._records, self._queue, self._state)
        self._loops.release(
            batch,
            is_admitted,
            wanted,
            self._nexts[batch % len(self._rows), : wanted.size],
            self._records,
            self._candidates,
            self._num_candidates,
            self._queue,
            self._state,
        )

    def translate(self, addresses: Array, slots: Array) -> int:
        """Write the slots of addresses of any lanes; return how many have none."""
        return self._loops.translate(addresses, self._records, slots)

    def _wanted(self, batch: int) -> Array:
        at = batch % len(self._rows)
        return self._rows[at, : self._counts[at]]

    def _resize(self, ring: int, width: int, in_flight: range) -> None:
        """Allocate space for more batches in flight, or for more rows per batch."""
        new = [np.empty((ring, width), np.int32) for _ in range(3)]
        counts = [np.zeros(ring, np.int64) for _ in range(2)]
        if in_flight:
            old = (self._rows, self._nexts, self._candidates)
            for batch in in_flight:
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

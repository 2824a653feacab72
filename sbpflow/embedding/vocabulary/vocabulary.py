"""Decides which keys of one field have rows, on the rank that owns a range of key buckets.

The decisions of a batch depend only on the keys of this batch and of earlier ones, so they are made
when the batch is announced, before earlier batches have been trained. All changes are logged until
their batch has been trained. Thus evaluations and saves see the vocabulary of the trained batches,
and announced batches can be canceled. An evicted row is not overwritten before the batch that
reuses it is looked up; by then, all earlier batches have been trained.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from sbpflow.embedding.plan.growth import NUM_BUCKETS, Growth, first_row_of
from sbpflow.embedding.storage.live_rows import Changes, Saved
from sbpflow.embedding.vocabulary import counting_loops, entries, eviction_loops, undo_loops
from sbpflow.embedding.vocabulary import key_map as km
from sbpflow.embedding.vocabulary.vocabulary_copy import (
    Clock,
    Totals,
    VocabularyCopy,
    stored_addresses,
)
from sbpflow.errors import CheckpointError
from sbpflow.runtime.compute.compiled import Array

MIN_SLOTS = 1024
MAX_LOAD = 0.8  # share of used slots at which the map starts to grow
SWEPT_BUCKETS = 16  # every batch removes the idle keys of this many buckets
VICTIM_SHARE = 16  # a search finds this share of a bucket's rows to evict
_EMPTY = np.empty(0, np.int64)


@dataclass(slots=True)
class _Step:
    uses: Array
    logs: list[Array]
    totals: Totals
    samples: int


class Vocabulary:
    """The keys of buckets [first_bucket, last_bucket) of a table of ``num_rows`` rows."""

    NUM_TOTALS = len(fields(Totals))

    def __init__(self, growth: Growth, num_rows: int, first_bucket: int, last_bucket: int) -> None:
        self.growth, self.buckets = growth, (first_bucket, last_bucket)
        self._idle, self._forget = growth.evict.idle_samples, growth.forget_after_samples
        bounds = np.array(
            [first_row_of(bucket, num_rows) for bucket in range(first_bucket, last_bucket + 1)]
        )
        room = np.diff(bounds).astype(np.int32)
        self.first_row = int(bounds[0])
        if first_bucket == 0:  # row 0 is the shared row
            self.first_row, room[0] = 1, room[0] - 1
        self.num_rows = int(bounds[-1]) - self.first_row
        self.is_lfu = growth.evict.policy == "lfu"
        self._reset(room)

    def _reset(self, room: Array) -> None:
        num_buckets, rows = room.size, self.num_rows
        state = np.zeros(km.STATE_SIZE, np.int64)
        first = self.buckets[0]
        state[km.FIRST_BUCKET], state[km.FIRST_ROW] = first, self.first_row
        state[km.FIRST] = (first - NUM_BUCKETS // 2) << (km.SHIFT - 32)
        state[km.ADMIT_COUNT], state[km.IS_LFU] = self.growth.admit_count, self.is_lfu
        depth = max(4, -(-rows // num_buckets) // VICTIM_SHARE)
        self.arrays = km.Arrays(
            state=state,
            slots=_slots(0),
            new_slots=_slots(0),
            rows=np.empty((rows, 3), np.int32),
            row_counts=np.empty(rows if self.is_lfu else 0, np.int32),
            free_rows=np.empty(rows, np.int32),
            pending=np.empty((MIN_SLOTS, 4), np.int32),
            free_pending=np.empty(MIN_SLOTS, np.int32),
            live=np.zeros(num_buckets, np.int32),
            room=room,
            victims=np.empty((num_buckets, depth, 2), np.int32),
            heads=np.zeros(num_buckets, np.int32),
            tails=np.zeros(num_buckets, np.int32),
        )
        self.reserve(0)
        self._steps: deque[_Step] = deque()  # announced batches that have not been trained
        self._clock = Clock()
        self._patch: tuple[Array, Array] | None = None
        self._step_start = 0
        self.totals = Totals()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the map and the records in use."""
        t, s = self.arrays, self.arrays.state
        slots = t.slots.nbytes + t.new_slots.nbytes
        return slots + int(s[km.NEXT_ROW]) * 12 + int(s[km.NEXT_PENDING]) * 16

    @property
    def num_trained(self) -> int:
        """Return the number of trained batches."""
        return self._clock.now - len(self._steps)

    def announce(
        self, keys: Array, counts: Array, samples: int, *, begins_step: bool = True
    ) -> tuple[Array, Changes]:
        """Decide a batch of ``samples``; return the row of each key, 0 for the shared row.

        ``counts`` are the occurrences of ``keys``, or empty if each key counts once; keys can
        repeat. A key used by a batch of the same optimizer step keeps its row.
        """
        n, sizes = keys.size, np.zeros(4, np.int64)
        self._make_room(n)
        t = self.arrays
        self._clock.samples.append(self._clock.samples[-1] + samples)
        now = self._clock.now
        self._step_start = now if begins_step else self._step_start
        t.state[km.NOW], t.state[km.STEP_START] = now, self._step_start
        out, uses = np.empty(n, np.int64), np.empty((n, 3), np.int32)
        log, unresolved = np.empty((n, 5), np.int64), np.empty(n, np.int64)
        candidates = np.empty(n, np.int64)
        counting_loops.observe(t, keys, counts, out, uses, log, candidates, unresolved, sizes)
        num_uses, num_log, num_candidates, num_unresolved = sizes.tolist()
        candidates = candidates[:num_candidates]
        decided = np.empty((3 * num_candidates, 5), np.int64)
        new_rows, admitted = np.empty((2, num_candidates), np.int64)
        eviction_loops.decide(t, candidates, decided, new_rows, admitted, sizes)
        num_decided, num_new, num_evicted, _ = sizes.tolist()
        counting_loops.resolve(
            t, counts, unresolved[:num_unresolved], admitted[:num_new], out, sizes
        )
        num_pending, num_refused = sizes[:2].tolist()
        swept, num_idle, num_forgotten = self._sweep(now)
        step = _Step(
            uses=uses[:num_uses].copy(),
            logs=[log[:num_log].copy(), decided[:num_decided], swept],
            samples=samples,
            totals=Totals(
                live=num_new - num_evicted - num_idle,
                pending=num_log - num_new - num_forgotten,
                admitted=num_new,
                evicted=num_evicted + num_idle,
                forgotten=num_forgotten,
                lookups=int(counts.sum()) if counts.size else n,
                pending_lookups=num_pending,
                refused_lookups=num_refused,
            ),
        )
        self._steps.append(step)
        self._patch = None
        return out, self._changes(step, new_rows[:num_new])

    def _changes(self, step: _Step, new_rows: Array) -> Changes:
        _, decided, swept = step.logs
        gone = np.concatenate([
            log[(log[:, 0] == entries.REMOVED) & (log[:, 1] < km.PENDING), 1]
            for log in (decided, swept)
        ])  # fmt: skip
        freed = gone[self.arrays.rows[gone, km.LAST] < 0]
        addresses = stored_addresses(self.arrays.rows[new_rows])
        return Changes(new_rows + self.first_row, addresses, freed + self.first_row)

    def _sweep(self, now: int) -> tuple[Array, int, int]:
        """Remove idle keys from the buckets whose turn it is."""
        log = np.empty((0, 5), np.int64)
        if self._idle is None and self._forget is None:
            return log, 0, 0
        first, last = self.buckets
        start = now % (NUM_BUCKETS // SWEPT_BUCKETS) * SWEPT_BUCKETS
        start, stop = max(start, first) - first, min(start + SWEPT_BUCKETS, last) - first
        if start >= stop:
            return log, 0, 0
        sizes = np.zeros(4, np.int64)
        # A key used by this step stays, even if the step has more samples than the limit.
        limits = (
            min(self._clock.limit(self._idle), self._step_start),
            self._clock.limit(self._forget),
        )
        log = np.empty((eviction_loops.count_entries(self.arrays, start, stop), 5), np.int64)
        eviction_loops.sweep(self.arrays, start, stop, *limits, log, sizes)
        return log[: sizes[0]].copy(), int(sizes[1]), int(sizes[2])

    def owned(self, keys: Array) -> Array:
        """Return the keys in the buckets of this vocabulary."""
        addresses = np.empty(keys.size, np.int64)
        counting_loops.addresses_of(keys, addresses)
        buckets = (addresses >> km.SHIFT) + NUM_BUCKETS // 2
        return keys[(buckets >= self.buckets[0]) & (buckets < self.buckets[1])]

    def release(self) -> None:
        """End the oldest announced batch, which has been trained."""
        step = self._steps.popleft()
        self.totals.add(step.totals)
        self._patch = None
        longest = max(self._idle or 0, self._forget or 0)
        self._clock.prune(longest, self.num_trained)

    def roll_back(self) -> None:
        """Undo all announced batches."""
        while self._steps:
            step = self._steps.pop()
            for log in reversed(step.logs):
                self._make_room(log.shape[0])
                undo_loops.undo_log(self.arrays, log, True)
            undo_loops.undo_uses(self.arrays, step.uses)
            self._clock.samples.pop()
        self.arrays.heads[:] = self.arrays.tails
        self._patch = None

    def peek(self, keys: Array) -> Array:
        """Return the row of each key after the trained batches, 0 for the shared row."""
        out = np.empty(keys.size, np.int64)
        counting_loops.find_all(self.arrays, keys, out)
        addresses, rows = self._patched()
        if addresses.size:
            own = np.empty(keys.size, np.int64)
            counting_loops.addresses_of(keys, own)
            at = np.searchsorted(addresses, own).clip(max=addresses.size - 1)
            out = np.where(addresses[at] == own, rows[at], out)
        return np.where(out < 0, 0, out + self.first_row)

    def _patched(self) -> tuple[Array, Array]:
        """Return the addresses that announced batches changed, ascending, and their former rows."""
        if self._patch is None:
            logs = [log[::-1] for step in reversed(self._steps) for log in reversed(step.logs)]
            changes = np.concatenate(logs) if logs else np.empty((0, 5), np.int64)
            removed_row = (changes[:, 0] == entries.REMOVED) & (changes[:, 1] < km.PENDING)
            rows = np.where(removed_row, changes[:, 1], -1)
            order = np.argsort(changes[:, 2], kind="stable")
            addresses = changes[order, 2]
            is_oldest = np.append(addresses[1:] != addresses[:-1], True)[: addresses.size]
            self._patch = addresses[is_oldest], rows[order][is_oldest]
        return self._patch

    def save(self) -> "VocabularyCopy":
        """Return a copy of the vocabulary after the trained batches."""
        t, s = self.arrays, self.arrays.state
        used, pending = int(s[km.NEXT_ROW]), int(s[km.NEXT_PENDING])
        copies = t._replace(
            rows=t.rows[:used].copy(),
            row_counts=t.row_counts[:used].copy(),
            pending=t.pending[:pending].copy(),
        )
        for step in reversed(self._steps):
            for log in reversed(step.logs):
                undo_loops.undo_log(copies, log, False)
            undo_loops.undo_uses(copies, step.uses)
        trained = self.num_trained - self._clock.first
        clock = np.array(self._clock.samples[: trained + 1])
        has_clock = self.buckets[0] == 0
        return VocabularyCopy(copies, self.num_trained, clock, self.totals, has_clock=has_clock)

    def load(self, saved: Saved, totals: Sequence[int] = ()) -> None:
        """Replace the vocabulary; the keys get the first rows in the order of their addresses.

        ``totals`` are the sums of all owners so far, or empty.
        """
        if self._steps:
            raise RuntimeError("cannot load keys while batches are in flight")
        room = self.arrays.room
        self._reset(room)
        self.totals = Totals(*totals)
        self.totals.live = saved.addresses.size
        self.totals.pending = saved.pending_addresses.size
        live = np.bincount(
            (saved.addresses >> km.SHIFT) + NUM_BUCKETS // 2 - self.buckets[0],
            minlength=room.size,
        )
        if (live > room).any():
            bucket = int((live - room).argmax())
            fits = -(-int(live[bucket]) * NUM_BUCKETS * 5 // 4)
            raise CheckpointError(
                f"evict.max_rows: bucket {bucket + self.buckets[0]} has {int(room[bucket])} rows "
                f"for {int(live[bucket])} saved keys; use {fits} or more"
            )
        self.reserve(saved.addresses.size + saved.pending_addresses.size)
        self._make_room(saved.pending_addresses.size)
        t = self.arrays
        undo_loops.load_rows(t, saved.addresses, saved.lasts, saved.counts)
        undo_loops.load_pending(
            t, saved.pending_addresses, saved.pending_lasts, saved.pending_counts
        )
        clock = saved.clock.tolist()
        self._clock = Clock(saved.now - len(clock) + 1, clock)

    def erase(self, keys: Array) -> Array:
        """Remove keys and their counts; return the freed rows. No batch may be in flight."""
        if self._steps:
            raise RuntimeError("cannot erase keys while batches are in flight")
        sizes = np.zeros(2, np.int64)
        freed = eviction_loops.erase(self.arrays, keys, sizes)
        self.totals.live -= int(sizes[0])
        self.totals.pending -= int(sizes[1])
        return freed + self.first_row

    def _make_room(self, count: int) -> None:
        """Prepare for ``count`` new keys: grow arrays, and continue or start to grow the map."""
        t, s = self.arrays, self.arrays.state
        if s[km.NEXT_PENDING] + count > t.pending.shape[0]:
            size = max(2 * t.pending.shape[0], int(s[km.NEXT_PENDING]) + count)
            t.pending.resize((size, 4), refcheck=False)
            t.free_pending.resize(size, refcheck=False)
        num_entries = int(s[km.ENTRIES]) + count
        if not s[km.EDGE] and not s[km.NEW_SLOTS] and num_entries > MAX_LOAD * s[km.SLOTS]:
            factor = 1.25 if s[km.SLOTS] > 2**22 else 2.0
            self._begin_to_grow(max(int(s[km.SLOTS] * factor), int(num_entries / MAX_LOAD * 1.1)))
        t = self.arrays
        if s[km.NEW_SLOTS]:
            must_end = num_entries > 0.85 * s[km.SLOTS]
            portion = t.slots.shape[0] if must_end else max(16 * count, int(s[km.SLOTS]) // 256)
            if km.migrate(s, t.slots, t.new_slots, t.rows, t.pending, portion):
                self.arrays = t._replace(slots=t.new_slots, new_slots=_slots(0))
                s[km.SLOTS], s[km.SCALE] = s[km.NEW_SLOTS], s[km.NEW_SCALE]
                s[km.EDGE] = s[km.NEW_SLOTS] = s[km.NEW_SCALE] = 0

    def _begin_to_grow(self, slots: int) -> None:
        state = self.arrays.state
        self.arrays = self.arrays._replace(new_slots=_slots(slots))
        state[km.NEW_SLOTS], state[km.NEW_SCALE] = slots, self._scale(slots)

    def reserve(self, num_keys: int) -> None:
        """Make room for keys in an empty map."""
        slots, state = max(MIN_SLOTS, int(num_keys / 0.7)), self.arrays.state
        self.arrays = self.arrays._replace(slots=_slots(slots))
        state[km.SLOTS], state[km.SCALE] = slots, self._scale(slots)

    def _scale(self, slots: int) -> int:
        """Return the factor from the upper 32 bits of an address to a slot, times 2^32."""
        first, last = self.buckets
        return (slots << 32) // ((last - first) << (km.SHIFT - 32))


def _slots(count: int) -> Array:
    return np.zeros((count + km.PAD, 1), np.uint64)

"""Decides which keys of a field have rows, on the rank that owns their range of key buckets.

The decisions for a batch depend only on its keys and on those of earlier batches, so they can be
made when the batch is announced, before earlier batches have completed. All changes are logged
until their batch completes, so that evaluations and saves see the vocabulary as of the last
completed batch, and announced batches can be canceled. An evicted row is overwritten only when the
batch that reuses it is looked up; by then, all batches that used its old key have completed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from sbpflow.embedding.plan.growth import NUM_BUCKETS, SWEPT_BUCKETS, Growth, Totals, first_row_of
from sbpflow.embedding.storage.live_rows import NO_TIME, Changes, Saved
from sbpflow.embedding.vocabulary import counting_loops, eviction_loops, undo_loops
from sbpflow.embedding.vocabulary import key_map as km
from sbpflow.embedding.vocabulary.vocabulary_copy import Clock, VocabularyCopy, used_slots
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.runtime.compute.compiled import Array

MIN_SLOTS = 1024
# The map starts to grow when this share of its slots is used. Searches in emptier maps are shorter,
# but maps with more than ``LARGE`` slots should not take more memory than necessary.
MAX_LOAD, MAX_LOAD_IF_LARGE = 0.6, 0.8
LARGE = 2**22
TOO_FULL = 0.85  # a growing map must not use more of its slots
# If fewer of a batch's keys are distinct, the next batch's loop expects repeated keys.
MOST_DISTINCT = 1 / 8
# Each search selects 1 / ``VICTIM_SHARE`` of a bucket's rows, but at least 4, for eviction.
VICTIM_SHARE = 16
_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class _Step:
    """How to undo a batch: logs of its used, evicted, and idle keys, with the counts of their
    rows, and the previous value of ``_step_start``.
    """

    logs: list[tuple[Array, Array]]
    step_start: int
    admitted: Array
    totals: Totals

    def undo(self, t: km.Arrays) -> None:
        for log, counts in reversed(self.logs):
            undo_loops.undo(t, log, counts)


class Vocabulary:
    """The keys of buckets [first_bucket, last_bucket) of a table of ``num_rows`` rows."""

    def __init__(self, growth: Growth, num_rows: int, first_bucket: int, last_bucket: int) -> None:
        self.growth, self.buckets = growth, (first_bucket, last_bucket)
        self._idle, self._forget = growth.evict.idle_samples, growth.forget_after_samples
        self._idle_time = growth.evict.idle_time
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
            row_counts=np.empty(rows if self.is_lfu else 0, np.int32),
            free_rows=np.empty(rows, np.int32),
            live=np.zeros(num_buckets, np.int32),
            room=room,
            victims=np.empty((num_buckets, depth, 2), np.int64),
            heads=np.zeros(num_buckets, np.int32),
            tails=np.zeros(num_buckets, np.int32),
        )
        self.reserve(0)
        self._steps: deque[_Step] = deque()  # announced batches that have not completed
        self._clock = Clock()
        self._patch: tuple[Array, Array] | None = None
        self._step_start = 0
        self._repeats: bool | None = None  # whether the last batch contained few distinct keys
        self.totals = Totals()

    @property
    def num_bytes(self) -> int:
        """Return the size of the map and of the counts of rows in bytes."""
        t = self.arrays
        return t.slots.nbytes + t.new_slots.nbytes + t.row_counts.nbytes

    @property
    def num_trained(self) -> int:
        """Return the number of completed batches."""
        return self._clock.now - len(self._steps)

    def warm_up(self) -> None:
        """Compile the loops over the keys of a batch in every form, so that no batch has to wait
        for the compiler.
        """
        none, sizes, t = np.empty(0, np.int64), np.zeros(5, np.int64), self.arrays
        log, log_counts = self._new_log(0)
        eviction_loops.decide(t, none, log, log_counts, none, none, sizes)
        counting_loops.resolve(t, none, log, none, none, sizes)
        eviction_loops.sweep(t, 0, 1, 0, 0)
        for migrates, repeats in product((None, True), repeat=2):
            counting_loops.observe(
                t, none, none, none, log, log_counts, none, log, sizes, migrates, repeats
            )

    def announce(
        self,
        keys: Array,
        counts: Array,
        samples: int,
        *,
        begins_step: bool = True,
        time: int = NO_TIME,
        out: Array | None = None,
    ) -> tuple[Array, Changes]:
        """Decide which keys of a batch with ``samples`` samples have rows; return the row of each
        key (0 is the shared row), and the changes.

        ``counts`` are the numbers of occurrences of ``keys``, or empty if each counts once; keys
        may repeat. If ``begins_step`` is False, the batch belongs to the same optimizer step as the
        previous batch. A key keeps its row until the end of the step that uses it. ``time`` is the
        latest event time of the samples on all ranks. If ``out`` is given, the rows are written to
        it; it may be the same array as ``keys``.
        """
        n, sizes = keys.size, np.zeros(5, np.int64)
        self._make_room(n)
        t = self.arrays
        self._clock.add(samples, time)
        now = self._clock.now
        step_start = self._step_start
        self._step_start = now if begins_step else step_start
        t.state[km.NOW], t.state[km.STEP_START] = now, self._step_start
        t.state[km.PENDING_LIMIT] = pending_limit = self._clock.limit(self._forget)
        out = np.empty(n, np.int64) if out is None else out
        candidates, unresolved = np.empty(n, np.int64), np.empty((n, 2), np.int64)
        log, log_counts = self._new_log(n)
        counting_loops.observe(
            t, keys, counts, out, log, log_counts, candidates, unresolved, sizes, t.migrates,
            self._repeats,
        )  # fmt: skip
        num_used, num_counted, num_candidates, num_unresolved, num_restarted = sizes.tolist()
        self._repeats = True if num_used < n * MOST_DISTINCT else None
        logs = [(_part(log, num_used), _part(log_counts, num_used))]
        new_rows = admitted = _NONE
        num_new = num_evicted = num_pending = num_refused = 0
        candidates = candidates[:num_candidates]
        if num_candidates:
            new_rows, admitted = np.empty((2, num_candidates), np.int64)
            removed, removed_counts = self._new_log(num_candidates)
            eviction_loops.decide(t, candidates, removed, removed_counts, new_rows, admitted, sizes)
            num_new, num_evicted = sizes[:2].tolist()
            new_rows, admitted = new_rows[:num_new] + self.first_row, admitted[:num_new]
            logs.append((_part(removed, num_evicted), _part(removed_counts, num_evicted)))
        if num_unresolved:
            counting_loops.resolve(t, candidates, unresolved[:num_unresolved], counts, out, sizes)
            num_pending, num_refused = sizes[:2].tolist()
        swept, swept_counts, freed = self._sweep(now, pending_limit)
        logs.append((swept, swept_counts))
        num_idle, num_forgotten = freed.size, swept.shape[0] - freed.size
        totals = Totals(
            live=num_new - num_evicted - num_idle,
            pending=num_counted - num_new - num_forgotten,
            admitted=num_new,
            evicted=num_evicted + num_idle,
            forgotten=num_forgotten + num_restarted,
            lookups=int(counts.sum()) if counts.size else n,
            pending_lookups=num_pending,
            refused_lookups=num_refused,
        )
        self._steps.append(_Step(logs, step_start, admitted, totals))
        self._patch = None
        return out, Changes(new_rows, admitted, freed)

    def _new_log(self, n: int) -> tuple[Array, Array]:
        return np.empty((n, 2), np.int64), np.empty(n if self.is_lfu else 0, np.int32)

    def _sweep(self, now: int, pending_limit: int) -> tuple[Array, Array, Array]:
        """Remove idle keys from the buckets whose turn it is; return the log of these keys, the
        counts of their rows, and the freed rows.
        """
        none = (*self._new_log(0), _NONE)
        if self._idle is None and self._idle_time is None and self._forget is None:
            return none
        first, last = self.buckets
        start = now % (NUM_BUCKETS // SWEPT_BUCKETS) * SWEPT_BUCKETS
        start, stop = max(start, first) - first, min(start + SWEPT_BUCKETS, last) - first
        if start >= stop:
            return none
        # A key used by this step stays, even if the step has more samples than the limit.
        row_limit = min(self._clock.limit(self._idle, self._idle_time), self._step_start)
        return eviction_loops.sweep(self.arrays, start, stop, row_limit, pending_limit)

    def owned(self, keys: Array) -> Array:
        """Return the keys in the buckets of this vocabulary."""
        addresses = np.empty(keys.size, np.int64)
        counting_loops.addresses_of(keys, addresses)
        buckets = km.buckets_of(addresses)
        return keys[(buckets >= self.buckets[0]) & (buckets < self.buckets[1])]

    def release(self) -> None:
        """Complete the oldest announced batch, after its update."""
        step = self._steps.popleft()
        self.totals.add(step.totals)
        self._patch = None
        longest = max(self._idle or 0, self._forget or 0)
        self._clock.prune(longest, self._idle_time, self.num_trained)

    def roll_back(self) -> None:
        """Undo the newest announced batch."""
        t, state = self.arrays, self.arrays.state
        step = self._steps.pop()
        step.undo(t)
        self._clock.undo()
        self._step_start = step.step_start
        slots = used_slots(t)
        contents = slots[:, km.VALUE].astype(np.int32)  # the lower 32 bits
        buckets = km.buckets_of(slots[contents > 0, km.ADDRESS]) - self.buckets[0]
        t.live[:] = np.bincount(buckets, minlength=t.live.size)
        is_free = np.ones(int(state[km.NEXT_ROW]), np.bool_)
        is_free[contents[contents > 0] - 1] = False
        free_rows = np.flatnonzero(is_free)
        state[km.FREE_ROWS] = free_rows.size
        t.free_rows[: free_rows.size] = free_rows
        t.heads[:] = t.tails
        self._patch = None

    def peek(self, keys: Array) -> Array:
        """Return the row of each key as of the last completed batch; 0 is the shared row."""
        out = np.empty(keys.size, np.int64)
        counting_loops.find_all(self.arrays, keys, out, self.arrays.migrates)
        out = np.maximum(out, 0) - 1
        addresses, rows = self._patched()
        if addresses.size:
            own = np.empty(keys.size, np.int64)
            counting_loops.addresses_of(keys, own)
            at = np.searchsorted(addresses, own).clip(max=addresses.size - 1)
            out = np.where(addresses[at] == own, rows[at], out)
        return np.where(out < 0, 0, out + self.first_row)

    def _patched(self) -> tuple[Array, Array]:
        """Return the ascending addresses of the keys that announced batches changed, and their
        previous rows (-1 if they had none).
        """
        if self._patch is None:
            changes, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            for step in self._steps:
                removed = np.concatenate([log for log, _ in step.logs[1:]])
                contents = removed[:, km.VALUE].astype(np.int32).astype(np.int64)
                changes += [removed[contents > 0, km.ADDRESS], step.admitted]
                rows += [contents[contents > 0] - 1, np.full(step.admitted.size, -1, np.int64)]
            addresses, first = np.unique(np.concatenate(changes), return_index=True)
            self._patch = addresses, np.concatenate(rows)[first]
        return self._patch

    def save(self) -> "VocabularyCopy":
        """Return a copy of the vocabulary as of the last completed batch."""
        t = self.arrays
        copies = t._replace(
            state=t.state.copy(),
            slots=t.slots.copy(),
            new_slots=t.new_slots.copy(),
            row_counts=t.row_counts.copy(),
        )
        for step in reversed(self._steps):
            step.undo(copies)
        trained = self.num_trained - self._clock.first
        samples, times = self._clock.samples[: trained + 1], self._clock.times[: trained + 1]
        clock = Clock(self._clock.first, samples, times)
        return VocabularyCopy(copies, self.num_trained, clock, self.totals)

    def load(self, saved: Saved, totals: Sequence[int] = ()) -> None:
        """Replace the vocabulary. Keys get consecutive rows, starting with the first, in the order
        of their addresses.

        ``totals`` are the sums over all owners so far, or empty.
        """
        if self._steps:
            raise RuntimeError(
                "keys cannot be loaded while batches are in flight; release or cancel the "
                "batches first"
            )
        room = self.arrays.room
        self._reset(room)
        self.totals = Totals(*totals)
        self.totals.live = saved.addresses.size
        self.totals.pending = saved.pending_addresses.size
        buckets = km.buckets_of(saved.addresses) - self.buckets[0]
        live = np.bincount(buckets, minlength=room.size)
        if (live > room).any():
            bucket = int((live - room).argmax())
            numbers = np.arange(live.size) + self.buckets[0]
            # The shared row is in bucket 0.
            fits = int((live + (numbers == 0)).max()) * NUM_BUCKETS
            raise CheckpointError(
                f"evict.max_rows: bucket {bucket + self.buckets[0]} has {int(live[bucket])} saved "
                f"keys, but only {int(room[bucket])} rows; use {fits} or more (other fields may "
                "need more), or the limit of the saved run"
            )
        self.reserve(saved.addresses.size + saved.pending_addresses.size)
        t = self.arrays
        # A key with a row has occurred at least ``admit_count`` times; lru saves no counts.
        counts = np.maximum(saved.counts, self.growth.admit_count)
        undo_loops.load_rows(t, saved.addresses, saved.lasts, counts)
        t.live[:] = live
        undo_loops.load_pending(
            t, saved.pending_addresses, saved.pending_lasts, saved.pending_counts
        )
        first = saved.now - saved.clock.size + 1
        self._clock = Clock(first, saved.clock.tolist(), saved.times.tolist())

    def _make_room(self, count: int) -> None:
        """Make room for ``count`` new keys: start growing the map, or continue growing it."""
        s = self.arrays.state
        num_entries, num_slots = int(s[km.ENTRIES]) + count, int(s[km.SLOTS])
        load = _most_load(num_slots)
        if not s[km.EDGE] and not s[km.NEW_SLOTS] and num_entries > load * num_slots:
            factor = 1.25 if num_slots > LARGE else 2.0
            self._begin_to_grow(max(int(num_slots * factor), int(num_entries / load * 1.1)))
        t = self.arrays
        if not s[km.NEW_SLOTS]:
            return
        # If batches stay as large, this portion moves all slots before the map is too full.
        portion = max(int(count / (TOO_FULL - load)), num_slots // 256)
        if num_entries > TOO_FULL * num_slots:
            portion = t.slots.shape[0]
        if km.migrate(s, t.slots, t.new_slots, portion):
            self.arrays = t._replace(slots=t.new_slots, new_slots=_slots(0))
            s[km.SLOTS], s[km.SCALE] = s[km.NEW_SLOTS], s[km.NEW_SCALE]
            s[km.EDGE] = s[km.NEW_SLOTS] = s[km.NEW_SCALE] = 0
            if num_entries > TOO_FULL * s[km.SLOTS]:  # this batch is much larger than earlier ones
                self._make_room(count)

    def _begin_to_grow(self, slots: int) -> None:
        state, scale = self.arrays.state, self._scale(slots)
        self.arrays = self.arrays._replace(new_slots=_slots(slots))
        state[km.NEW_SLOTS], state[km.NEW_SCALE] = slots, scale

    def reserve(self, num_keys: int) -> None:
        """Make room for keys in an empty map."""
        load, state = _most_load(num_keys) - 0.1, self.arrays.state
        slots = max(MIN_SLOTS, int(num_keys / load))
        state[km.SLOTS], state[km.SCALE] = slots, self._scale(slots)
        self.arrays = self.arrays._replace(slots=_slots(slots))

    def _scale(self, slots: int) -> int:
        """Return the number of slots per unit of an address's upper 32 bits, times 2^32. Raise
        ConfigError if there are more slots than ``home`` can compute.
        """
        if slots > km.MAX_SLOTS:
            totals, forget = self.totals, self._forget
            use = "use a smaller number" if forget else "set it to a number of samples"
            raise ConfigError(
                f"forget_after_samples is {forget or 'not set'}: {totals.pending} keys without "
                f"rows and {totals.live} keys with rows need a map of {slots} slots on one rank, "
                f"but a map has at most {km.MAX_SLOTS}; {use}, or use more ranks"
            )
        first, last = self.buckets
        return (slots << 32) // ((last - first) << (km.SHIFT - 32))


def _most_load(slots: int) -> float:
    """Return the share of a map's slots that may be used before it starts to grow."""
    return MAX_LOAD_IF_LARGE if slots > LARGE else MAX_LOAD


def _part(array: Array, size: int) -> Array:
    """Return the first ``size`` elements, without keeping a much larger array in memory."""
    return array[:size] if 2 * size > array.shape[0] else array[:size].copy()


def _slots(count: int) -> Array:
    return np.zeros((count + km.PAD, 2), np.int64)

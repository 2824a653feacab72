"""Assign ids to values by a seeded permutation that balances the load over contiguous rows.

In frequency order, the first half of a table would receive 95-99 % of all lookups. A random order
is also unbalanced if one id is hot (missing, rare, or the top value). Therefore, after the
permutation, swaps of values balance the loads of the halves, quarters, and eighths of the rows. If
one id receives more than half of the lookups, no order is balanced, and the half with this id
contains the least frequent values.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.compiled import find_loops
from sbpflow.runtime.random.splitmix import GAMMA
from sbpflow.serving.cells import NUM_RESERVED_IDS, RARE_ID

Keys = NDArray[np.uint32] | NDArray[np.uint64]
Counts = NDArray[np.int64]
Slots = NDArray[np.int64]

_LEVELS = 3
_TOLERANCE = 0.02
_MAX_SWAPS = 1 << 17
_BLOCK = 1 << 16
"""Number of keys per lookup block, small enough for temporary arrays to stay in the CPU cache"""
_LARGE = 1 << 20
"""Hash tables with more keys than this are filled to two thirds, to save memory"""
_INSERTED = 1 << 20
"""Number of keys per insertion block"""
_MIN_COMPILED_KEYS = 1 << 16
"""Minimum number of keys in a lookup for which the compiled loop saves time"""
_HOT = 16
"""Keys with at least this many lookups are inserted first, so that the first probe finds most of
them
"""


def assign_ids(
    counts: Counts, reserved: tuple[int, int], seed: int, name: str
) -> NDArray[np.int32]:
    """Return ids, starting at 2, for n values with ``counts`` ([n]) lookups.

    ``reserved`` contains the lookup counts of ids 0 (missing) and 1 (rare). The result depends only
    on the arguments.
    """
    key = [seed, *name.encode()]
    order = np.random.Generator(np.random.PCG64(key)).permutation(len(counts))
    value_at = np.empty(len(order) + NUM_RESERVED_IDS, dtype=np.int32)
    value_at[:NUM_RESERVED_IDS], value_at[NUM_RESERVED_IDS:] = -1, order
    del order
    load = np.empty(len(value_at), dtype=np.int64)
    load[:NUM_RESERVED_IDS] = reserved
    load[NUM_RESERVED_IDS:] = counts[value_at[NUM_RESERVED_IDS:]]
    _balance(value_at, load, 0, len(load), int(load.sum()), _LEVELS)
    ids = np.empty(len(counts), dtype=np.int32)
    ids[value_at[NUM_RESERVED_IDS:]] = np.arange(NUM_RESERVED_IDS, len(value_at), dtype=np.int32)
    return ids


def _balance(
    value_at: NDArray[np.int32], load: Counts, start: int, stop: int, total: int, levels: int
) -> None:
    """Swap values between the halves of rows [start, stop) until both halves have about equal
    loads; then balance each half in the same way.
    """
    if levels == 0 or stop - start < 2 * NUM_RESERVED_IDS + 2:
        return
    middle = start + (stop - start + 1) // 2
    excess = int(load[start:middle].sum()) - int(load[middle:stop].sum())
    if abs(excess) > _TOLERANCE * total:
        halves = (range(max(start, NUM_RESERVED_IDS), middle), range(middle, stop))
        hot, cold = halves if excess > 0 else halves[::-1]
        _swap(value_at, load, hot, cold, abs(excess) // 2)
    _balance(value_at, load, start, middle, total, levels - 1)
    _balance(value_at, load, middle, stop, total, levels - 1)


def _swap(
    value_at: NDArray[np.int32], load: Counts, hot_rows: range, cold_rows: range, wanted: int
) -> None:
    """Move about ``wanted`` lookups from ``hot_rows`` to ``cold_rows`` by swapping values."""
    cold_load = load[cold_rows.start : cold_rows.stop]
    hot = np.flatnonzero(load[hot_rows.start : hot_rows.stop] > 0) + hot_rows.start
    idle = np.flatnonzero(cold_load == 0)
    pairs = min(len(hot), len(cold_load), _MAX_SWAPS)
    hot = hot[_first_sorted(-load[hot], pairs)]
    cold = idle[:pairs] if len(idle) >= pairs else _first_sorted(cold_load, pairs)
    cold = cold + cold_rows.start
    gains = load[hot] - load[cold]
    useful = np.flatnonzero((gains > 0) & (gains <= wanted))
    moved = np.cumsum(gains[useful])
    count = int(np.searchsorted(moved, wanted, side="right"))
    hot, cold = hot[useful[:count]], cold[useful[:count]]
    for array in (value_at, load):
        array[hot], array[cold] = array[cold], array[hot]


def _first_sorted(values: Counts, count: int) -> NDArray[np.int64]:
    """Return the indices of the ``count`` smallest values, in ascending order of value."""
    if count < len(values):
        chosen = np.sort(np.argpartition(values, count)[:count])
    else:
        chosen = np.arange(len(values))
    return chosen[np.argsort(values[chosen], kind="stable")]


def capacity_of(num_keys: int) -> int:
    """Return the number of slots of an ``IdTable`` with ``num_keys`` keys.

    For small tables, the number is a power of two and at least twice ``num_keys``, so that few keys
    collide. Large tables have 1.5 slots per key.
    """
    if num_keys > _LARGE:
        return num_keys + num_keys // 2
    return 1 << max(4, (2 * num_keys - 1).bit_length())


class IdTable:
    """An open-addressing hash table that maps keys of 32 or 64 bits to ids, and unknown keys to
    RARE_ID.

    An empty slot contains key 0 and RARE_ID, so that looking up an unknown key 0 returns the
    correct id. Keys with many lookups (``counts``) are inserted first, so that most lookups succeed
    at the first probe. ``keys`` and ``ids`` are the contents of the slots.
    """

    def __init__(self, keys: Keys, ids: NDArray[np.int32], counts: Counts) -> None:
        self._capacity = capacity_of(len(keys))
        self.keys = np.zeros(self._capacity, dtype=keys.dtype)
        self.ids = np.full(self._capacity, RARE_ID, dtype=np.int32)
        for chosen in _hottest_first(counts):
            self._insert(keys, ids, chosen)

    def _insert(self, keys: Keys, ids: NDArray[np.int32], left: Slots) -> None:
        # Each pass writes all keys whose slots are free, in a single numpy operation. If several
        # keys have the same slot, numpy stores one of their ids, whose key is then stored, too. The
        # other keys try the next slot.
        slots = self._slots(keys[left])
        while len(left):
            free = self.ids[slots] == RARE_ID
            self.ids[slots[free]] = ids[left[free]]
            is_stored = self.ids[slots] == ids[left]
            self.keys[slots[is_stored]] = keys[left[is_stored]]
            slots, left = self._next(slots[~is_stored]), left[~is_stored]

    def _slots(self, keys: Keys) -> NDArray[np.int64]:
        # Fibonacci hashing multiplies a key by 2^64 / golden ratio, and scales the high half of the
        # product to the capacity. If the capacity is a power of two, the slot consists of the
        # product's highest bits.
        spread = keys.astype(np.uint64) * np.uint64(GAMMA)
        spread >>= np.uint64(32)
        spread *= np.uint64(self._capacity)
        spread >>= np.uint64(32)
        return spread.astype(np.int64)

    def _next(self, slots: Slots) -> Slots:
        slots = slots + 1
        slots[slots == self._capacity] = 0
        return slots

    def lookup(self, keys: Keys) -> NDArray[np.int32]:
        """Return the ids (int32 [n]) of ``keys`` ([n])."""
        if (loops := find_loops(len(keys), _MIN_COMPILED_KEYS)) is not None:
            ids = np.empty(len(keys), dtype=np.int32)
            loops.look_up(self.keys, self.ids, keys, np.uint64(GAMMA), RARE_ID, ids)
            return ids
        blocks = [self._block(keys[i : i + _BLOCK]) for i in range(0, len(keys), _BLOCK)]
        return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int32)

    def _block(self, keys: Keys) -> NDArray[np.int32]:
        slots = self._slots(keys)
        ids = self.ids[slots]
        left = np.flatnonzero((self.keys[slots] != keys) & (ids != RARE_ID))
        slots, wanted = slots[left], keys[left]
        while len(left):
            slots = self._next(slots)
            next_ids = self.ids[slots]
            ids[left] = next_ids
            again = (self.keys[slots] != wanted) & (next_ids != RARE_ID)
            slots, wanted, left = slots[again], wanted[again], left[again]
        return ids


def _hottest_first(counts: Counts) -> Iterator[Slots]:
    """Yield groups of indices: first those of hot keys by descending count, in groups of growing
    size, and then all others in blocks.
    """
    hot = np.flatnonzero(counts >= _HOT)
    hot = hot[np.argsort(-counts[hot], kind="stable")]
    start, stop = 0, 16
    while start < len(hot):
        yield hot[start:stop]
        start, stop = stop, 8 * stop
    for start in range(0, len(counts), _INSERTED):
        yield start + np.flatnonzero(counts[start : start + _INSERTED] < _HOT)

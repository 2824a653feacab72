"""Which id a value gets: a seeded permutation, levelled so that contiguous row ranges carry equal load.

Never by frequency: in frequency order the first half of a table receives 95-99 % of all lookups. A
random order alone is not enough where one id is hot (missing, rare or the top value), so the fewest
swaps that level the halves, then the quarters and eighths, are applied to it. No order helps when one
id carries more than half of the lookups; then its half is filled with the coldest ids.
"""

import numpy as np
from numpy.typing import NDArray

from data.schema import NUM_RESERVED_IDS, RARE_ID

Keys = NDArray[np.uint32] | NDArray[np.uint64]
Counts = NDArray[np.int64]

_LEVELS = 3
_TOLERANCE = 0.02


def assign_ids(
    counts: Counts, reserved: tuple[int, int], seed: int, name: str
) -> NDArray[np.int32]:
    """Give each kept value (``counts`` lookups each) an id of 2.. in a seeded, levelled order.

    ``reserved`` are the lookups of ids 0 (missing) and 1 (rare). Depends on nothing but the arguments.
    """
    key = [seed, *name.encode()]
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(len(counts))
    row_of_value = np.argsort(np.argsort(bits)) + NUM_RESERVED_IDS
    value_at = np.full(len(counts) + NUM_RESERVED_IDS, -1)
    value_at[row_of_value] = np.arange(len(counts))
    load = np.zeros(len(value_at), dtype=np.int64)
    load[:NUM_RESERVED_IDS] = reserved
    load[row_of_value] = counts
    _level(value_at, load, 0, len(load), int(load.sum()), _LEVELS)
    ids = np.empty(len(counts), dtype=np.int32)
    ids[value_at[NUM_RESERVED_IDS:]] = np.arange(NUM_RESERVED_IDS, len(value_at), dtype=np.int32)
    return ids


def _level(
    value_at: NDArray[np.int64], load: Counts, start: int, stop: int, total: int, levels: int
) -> None:
    """Swap values between the halves of rows [start, stop) until their loads are as equal as can be."""
    if levels == 0 or stop - start < 2 * NUM_RESERVED_IDS + 2:
        return
    middle = start + (stop - start + 1) // 2
    excess = int(load[start:middle].sum()) - int(load[middle:stop].sum())
    if abs(excess) > _TOLERANCE * total:
        first = max(start, NUM_RESERVED_IDS)
        halves = (np.arange(first, middle), np.arange(middle, stop))
        hot, cold = halves if excess > 0 else halves[::-1]
        _swap(value_at, load, hot, cold, abs(excess) // 2)
    _level(value_at, load, start, middle, total, levels - 1)
    _level(value_at, load, middle, stop, total, levels - 1)


def _swap(
    value_at: NDArray[np.int64],
    load: Counts,
    hot: NDArray[np.int64],
    cold: NDArray[np.int64],
    wanted: int,
) -> None:
    """Move about ``wanted`` lookups from rows ``hot`` to rows ``cold`` by swapping pairs of values."""
    pairs = min(len(hot), len(cold))
    hot = hot[np.argsort(-load[hot], kind="stable")][:pairs]
    cold = cold[np.argsort(load[cold], kind="stable")][:pairs]
    gains = load[hot] - load[cold]
    useful = np.flatnonzero((gains > 0) & (gains <= wanted))
    moved = np.cumsum(gains[useful])
    count = int(np.searchsorted(moved, wanted, side="right"))
    hot, cold = hot[useful[:count]], cold[useful[:count]]
    for array in (value_at, load):
        array[hot], array[cold] = array[cold], array[hot]


class IdTable:
    """Open addressing from keys to ids for whole columns at once; an unknown key is RARE_ID."""

    def __init__(self, keys: Keys, ids: NDArray[np.int32]) -> None:
        capacity = 1 << max(4, (2 * len(keys) - 1).bit_length())
        self._shift = np.uint64(64 - capacity.bit_length() + 1)
        self._mask = np.int64(capacity - 1)
        self._keys = np.zeros(capacity, dtype=keys.dtype)
        self._ids = np.full(capacity, RARE_ID, dtype=np.int32)
        self._insert(keys, ids)

    def _slots(self, keys: Keys) -> NDArray[np.int64]:
        # Fibonacci hashing: the high bits of a product with 2^64 / golden ratio.
        spread = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (spread >> self._shift).astype(np.int64)

    def _insert(self, keys: Keys, ids: NDArray[np.int32]) -> None:
        slots, left = self._slots(keys), np.arange(len(keys))
        while len(left):
            free = self._ids[slots] == RARE_ID
            target = slots[free]
            self._keys[target] = keys[left[free]]
            self._ids[target] = ids[left[free]]
            lost = self._ids[slots] != ids[left]
            slots, left = (slots[lost] + 1) & self._mask, left[lost]

    def lookup(self, keys: Keys) -> NDArray[np.int32]:
        """Ids [n] of ``keys`` [n]."""
        slots = self._slots(keys)
        ids = self._ids[slots]
        left = np.flatnonzero((self._keys[slots] != keys) & (ids != RARE_ID))
        slots, wanted = slots[left], keys[left]
        while len(left):
            slots = (slots + 1) & self._mask
            found = self._ids[slots]
            ids[left] = found
            again = (self._keys[slots] != wanted) & (found != RARE_ID)
            slots, wanted, left = slots[again], wanted[again], left[again]
        return ids

"""Allocates places for the rows of an undo log.

Places are grouped into slabs of a few rows, and each slab belongs to one range of rows. ``take``
frees the slabs of a range. This module assigns places but stores no values, and is not thread-safe.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# A slab has 64 rows. On average, half a slab per range is wasted, but managing slabs takes less
# memory than managing single rows.
SLAB_BITS = 6
_FREE = -1


class Slabs:
    """Allocates places for at least ``places`` rows, in ``num_ranges`` ranges of ``range_rows``
    rows.
    """

    def __init__(self, places: int, num_ranges: int, range_rows: int) -> None:
        self._bits = SLAB_BITS
        self._rows = 1 << SLAB_BITS  # Number of rows per slab.
        # Every range may have one slab that is not full, and two more slabs must be available.
        self.num_slabs = max(-(-places // self._rows), num_ranges + 2)
        # If all slabs are free, this many rows fit, however they are distributed over ranges.
        self.sure_rows = (self.num_slabs - num_ranges) * self._rows // 2
        self._free = np.empty(self.num_slabs, np.int64)  # a stack of previously used slabs
        self._num_free = 0
        self._touched = 0  # slabs from this one on have never been used
        self._owner = np.full(self.num_slabs, _FREE, np.int32)
        self._starts = np.arange(num_ranges + 1) * range_rows
        self._open = np.full(num_ranges, _FREE)  # By range: the slab that has room, if any.
        # By range: the number of rows in that slab, or ``_rows`` if no slab has room.
        self._filled = np.full(num_ranges, self._rows)

    @property
    def num_places(self) -> int:
        return self.num_slabs * self._rows

    @property
    def touched_places(self) -> int:
        return self._touched * self._rows

    @property
    def used_share(self) -> float:
        return (self._touched - self._num_free) / self.num_slabs

    def place(self, rows: Ints) -> Ints | None:
        """Allocate places ([n]) for these rows, which must be ascending.

        If there is not enough room for all of them, return ``None`` and change nothing.
        """
        bounds = np.searchsorted(rows, self._starts)
        counts = np.diff(bounds)
        # By range: the number of slabs to add.
        added = -(-(self._filled + counts) // self._rows) - 1
        num_added = int(added.sum())
        if num_added > self._num_free:
            fresh = num_added - self._num_free
            if fresh > self.num_slabs - self._touched:
                return None
            self._set_free(np.arange(self._touched, self._touched + fresh))
            self._touched += fresh
        self._num_free -= num_added
        slabs = self._free[self._num_free : self._num_free + num_added][::-1]
        numbers = np.arange(counts.size)
        self._owner[slabs] = np.repeat(numbers, added)
        # Concatenate the slabs of all ranges: for each range the open slab, then the added ones.
        # The rows of a range fill its slabs from the first free row of the open slab on. The place
        # of every row is thus its index plus a shift per range, so no loop over ranges is needed.
        opened = np.cumsum(added) - added + numbers
        chain = np.empty(counts.size + num_added, np.int64)
        is_open = np.zeros(chain.size, bool)
        is_open[opened] = True
        chain[opened], chain[~is_open] = self._open, slabs
        shift = self._filled + opened * self._rows - bounds[:-1]
        at = np.arange(rows.size) + np.repeat(shift, counts)
        self._open = np.where(added > 0, chain[opened + added], self._open)
        self._filled = self._filled + counts - added * self._rows
        return (chain[at >> self._bits] << self._bits) + (at & (self._rows - 1))

    def take(self, number: int) -> Ints:
        """Free and return the places of all rows of range ``number``."""
        slabs = np.flatnonzero(self._owner == number)
        places = ((slabs << self._bits)[:, None] + np.arange(self._rows)).reshape(-1)
        if self._open[number] != _FREE:
            start = (self._open[number] << self._bits) + self._filled[number]
            end = (self._open[number] + 1) << self._bits
            places = places[(places < start) | (places >= end)]
        self._set_free(slabs)
        self._open[number], self._filled[number] = _FREE, self._rows
        return places

    def fullest(self) -> int:
        """Return the range with the most slabs. At least one slab must be in use."""
        return int(np.bincount(self._owner[self._owner >= 0]).argmax())

    def _set_free(self, slabs: Ints) -> None:
        self._owner[slabs] = _FREE
        self._free[self._num_free : self._num_free + slabs.size] = slabs[::-1]
        self._num_free += slabs.size

"""Where the rows of an undo log lie: in slabs of a few rows, each owned by one range of rows.

A range is read whole, and its slabs are free again at once. Bookkeeping alone: no values, and for
one thread.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

SLAB_BITS = 6  # 64 rows: half a slab per range lies idle, and a row costs no list of its own
_FREE = -1


class Slabs:
    """At least ``places`` places for rows of ``num_ranges`` ranges of ``range_rows`` rows each."""

    def __init__(self, places: int, num_ranges: int, range_rows: int) -> None:
        self._bits = SLAB_BITS
        self._rows = 1 << SLAB_BITS  # of a slab
        # Each range may have a slab that is not full, and there must be some besides.
        self.num_slabs = max(-(-places // self._rows), num_ranges + 2)
        # So many find room if all slabs are free, however they lie.
        self.sure_rows = (self.num_slabs - num_ranges) * self._rows // 2
        self._free = np.empty(self.num_slabs, np.int64)  # a stack of those that were used before
        self._num_free = 0
        self._touched = 0  # slabs that were ever used: the first so many
        self._owner = np.full(self.num_slabs, _FREE, np.int32)
        self._starts = np.arange(num_ranges + 1) * range_rows
        self._open = np.full(num_ranges, _FREE)  # the slab of a range that has room, if one has,
        self._filled = np.full(num_ranges, self._rows)  # and its rows; as if full where none has

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
        """[n] the places of these rows, which ascend; ``None``, and nothing is changed, if there is
        no room for all.
        """
        bounds = np.searchsorted(rows, self._starts)
        counts = np.diff(bounds)
        added = -(-(self._filled + counts) // self._rows) - 1  # slabs of each range
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
        # One behind the other: of each range the open slab, and those that are added. The rows of a
        # range fill them from where the open one ends.
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
        """The places of the rows of range ``number``, which are free from here on."""
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
        """The range that owns most slabs, of one or more."""
        return int(np.bincount(self._owner[self._owner >= 0]).argmax())

    def _set_free(self, slabs: Ints) -> None:
        self._owner[slabs] = _FREE
        self._free[self._num_free : self._num_free + slabs.size] = slabs[::-1]
        self._num_free += slabs.size

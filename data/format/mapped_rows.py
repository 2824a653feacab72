"""Rows of arrays that lie in several files: by ranges, and in runs from anywhere.

A process may have a limited number of maps (65,530 on Linux unless ``vm.max_map_count`` says
otherwise), so of a split with very many files only the first ones are mapped; rows of the others
are read from their files. A cache that maps what is used next in place of what was used last would
hit no more often, since an epoch visits every row once and in random order, and a miss would cost a
map and its removal where a read of the run is enough.

A call for each shard, or for each run, takes longer than copying 16 rows: a split of thousands of
shards has about one run of a batch in each. So the items of all maps are addressed from the lowest
of them on, as one overlapping view in which a row begins at every item, and torch copies a list of
its rows in one call. Between the maps lies memory that is not ours: only offsets of what lies
within one map are passed on.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from sbpflow.data.format.npy import check_array, map_array, read_array, touch

Array = NDArray[Any]
Places = NDArray[np.int64]

_SAME_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""Types that torch copies rows of, by their bytes."""


DEFAULT_MAP_COUNT = 65_530
"""Linux's own ``vm.max_map_count``, also where the system does not say its limit."""
_LOADERS = 4
"""A run has three loaders, of train, val and test; a fourth share is for all other maps."""


def map_count_limit() -> int:
    """How many maps a process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return DEFAULT_MAP_COUNT


def most_maps() -> int:
    """How many files a reader of one split may map."""
    return max(1, map_count_limit() // _LOADERS)


class FileRows:
    """Rows of a file that is not mapped: a slice of them is read when it is asked for.

    ``check_set`` is called after each read, and raises if the file may be of another set by then.
    """

    def __init__(
        self, path: Path, dtype: str, shape: tuple[int, ...], check_set: Callable[[], None]
    ) -> None:
        check_array(path, dtype, shape)
        self._path, self._dtype, self._shape = path, dtype, shape
        self._check_set = check_set

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, rows: slice) -> Array:
        start, stop, _ = rows.indices(len(self))
        try:
            return read_array(self._path, self._dtype, self._shape, start, stop)
        finally:  # also where the file does not fit: that the set was replaced says more
            self._check_set()


Rows = Array | FileRows


def open_rows(
    files: Sequence[tuple[Path, str, tuple[int, ...]]], most: int, check_set: Callable[[], None]
) -> list[Rows]:
    """The first ``most`` of the files (path, dtype, shape) mapped, the others to be read from."""
    mapped: list[Rows] = [map_array(*file) for file in files[:most]]
    return [*mapped, *(FileRows(*file, check_set) for file in files[most:])]


def mapped_of(rows: Sequence[Rows]) -> list[Array]:
    """Those that are mapped, which come first."""
    return [items for items in rows if not isinstance(items, FileRows)]


class MappedItems:
    """The items of contiguous ``maps`` of one dtype; map i begins at ``offsets[i]``, in items."""

    def __init__(self, maps: Sequence[Array]) -> None:
        self._maps = list(maps)  # their memory must stay as long as this does
        itemsize = maps[0].itemsize if maps else 1
        starts = np.array([items.ctypes.data for items in maps], dtype=np.int64)
        self._lowest = None
        if maps:
            lowest = maps[int(starts.argmin())]
            self._lowest = lowest.reshape(-1).view(_SAME_SIZE[itemsize])
        self.offsets: Places = (starts - starts.min(initial=1 << 62)) // itemsize
        self._num_items = int((self.offsets + [items.size for items in maps]).max(initial=0))

    def copy(self, offsets: Places, out: Array, num_items: int) -> None:
        """Copy ``num_items`` items from each offset on, one after the other, into ``out``."""
        import torch  # here, so that prepare and verify do without

        if self._lowest is None:
            raise ValueError("copy: there are no maps, they were closed")
        pieces = as_strided(
            self._lowest,
            shape=(self._num_items - num_items + 1, num_items),
            strides=(self._lowest.itemsize,) * 2,
        )
        target = out.reshape(len(offsets), num_items).view(self._lowest.dtype)
        torch.index_select(
            torch.from_numpy(pieces), 0, torch.from_numpy(offsets), out=torch.from_numpy(target)
        )


class MappedRows:
    """Rows [rows, ...] of several files, one after the other, none of which is without rows.

    ``maps`` are what ``open_rows`` gives; ``none`` is an array of their dtype and shape without
    rows.
    """

    def __init__(self, maps: Sequence[Rows], none: Array) -> None:
        self._maps, self._none = list(maps), none
        mapped = mapped_of(maps)
        self._starts = [0, *accumulate(len(rows) for rows in maps)]
        self._first_rows = np.array(self._starts)
        self._row_items = math.prod(none.shape[1:])
        self._items = MappedItems(mapped)
        self._num_mapped = len(mapped)
        self._offsets = np.zeros(len(maps), dtype=np.int64)
        self._offsets[: len(mapped)] = self._items.offsets
        self.num_rows = self._starts[-1]

    def new(self, num_rows: int) -> Array:
        """An array for ``num_rows`` rows."""
        return np.empty((num_rows, *self._none.shape[1:]), dtype=self._none.dtype)

    def maps_of(self, rows: Places) -> tuple[Places, Places]:
        """The file that each row lies in, and its number there."""
        index = np.searchsorted(self._first_rows, rows, side="right") - 1
        return index, rows - self._first_rows[index]

    def view(self, start: int, stop: int) -> Array | None:
        """Rows [start, stop) without a copy, their pages read; None where one map has not all."""
        index = bisect.bisect_right(self._starts, start) - 1
        if stop > self._starts[index + 1] or index >= self._num_mapped:
            return None
        first = self._starts[index]
        rows = self._maps[index][start - first : stop - first]
        touch(rows)
        return rows

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows [start, stop) as ranges that each lie in one file."""
        found: list[tuple[int, int]] = []
        index = bisect.bisect_right(self._starts, start)
        while start < stop:
            end = min(stop, self._starts[index])
            found.append((start, end))
            start, index = end, index + 1
        return found

    def read(self, start: int, stop: int, out: Array) -> None:
        """Copy rows [start, stop) into ``out`` [stop - start, ...]."""
        done = 0
        index = bisect.bisect_right(self._starts, start) - 1
        for first, end in self.pieces(start, stop):
            begin = self._starts[index]
            out[done : done + end - first] = self._maps[index][first - begin : end - begin]
            done, index = done + end - first, index + 1

    def gather(self, firsts: Places, lengths: Places, out: Array) -> None:
        """Copy runs of rows into ``out``: ``lengths[i]`` rows from ``firsts[i]`` on, in order."""
        if len(firsts) == 1:
            self.read(int(firsts[0]), int(firsts[0] + lengths[0]), out)
        elif len(firsts):
            self._gather(firsts, lengths, out)

    def _gather(self, firsts: Places, lengths: Places, out: Array) -> None:
        length = int(lengths.max())
        maps, local = self.maps_of(firsts)
        is_whole = (lengths == length) & (firsts + length <= self._first_rows[maps + 1])
        if self._num_mapped < len(self._maps):
            is_whole &= maps < self._num_mapped
        places = np.cumsum(lengths) - lengths
        cut = np.flatnonzero(~is_whole).tolist()  # by the batch, across two files, or not mapped
        for index in cut:
            first, rows, place = int(firsts[index]), int(lengths[index]), int(places[index])
            self.read(first, first + rows, out[place : place + rows])
        # Between two cut runs, the whole ones are equally long parts of ``out``.
        offsets = self._offsets[maps] + local * self._row_items
        for before, after in pairwise([-1, *cut, len(firsts)]):
            if after - before > 1:
                place = int(places[before + 1])
                target = out[place : place + (after - before - 1) * length]
                self._items.copy(offsets[before + 1 : after], target, length * self._row_items)

    def close(self) -> None:
        """Drop the maps; views handed out keep theirs alive."""
        self._maps, self._items = [], MappedItems([])

"""Read ranges or arbitrary runs of rows from an array that is stored in several files.

By default, Linux limits a process to 65,530 maps (``vm.max_map_count``). Therefore, if a split has
very many files, only the first files are mapped, and rows of the others are read on request. A
cache of maps would not have a higher hit rate, because an epoch visits every row once in random
order, and a miss would cost a map and an unmap instead of one read. With thousands of shards, each
batch contains about one run of 16 rows per shard, and a numpy call takes longer than copying such a
run. Therefore, a single view that starts at the lowest map covers all maps. The rows of this view
overlap: a row begins at every item, so that one torch call can copy rows from any positions in the
maps. The memory between the maps may be used for anything else, so offsets must lie inside a map.
"""

import bisect
import contextlib
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest, UnchangedSet
from sbpflow.data.format.npy import check_array, map_array, read_array, touch
from sbpflow.errors import DataError

Array = NDArray[Any]
Places = NDArray[np.int64]

Get = Callable[[Path], None]
_CACHE_TRIES = 5

_SAME_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""A type that torch can copy, by item size in bytes"""


DEFAULT_MAP_COUNT = 65_530
"""Linux's default ``vm.max_map_count``, used if the system does not report its limit"""
_LOADERS = 4
"""Number of equal parts into which the map limit is divided: one for each loader (train, val,
test), and a spare
"""


def map_count_limit() -> int:
    """Return the maximum number of memory maps per process."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return DEFAULT_MAP_COUNT


def max_maps() -> int:
    """Return the maximum number of files that the reader of one split may map."""
    return max(1, map_count_limit() // _LOADERS)


class FileRows:
    """Reads rows of an unmapped file; each slice is read on request.

    For a local set, ``check_set`` is called after each read, and raises an error if the set may
    have been replaced. If the file is in a cache, ``get`` is called before each read instead,
    because the cache may have evicted the file.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        shape: tuple[int, ...],
        check_set: Callable[[], None],
        get: Get | None = None,
    ) -> None:
        if get is None:
            check_array(path, dtype, shape)
        self._path, self._dtype, self._shape = path, dtype, shape
        self._check_set, self._get = check_set, get

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, rows: slice) -> Array:
        start, stop, _ = rows.indices(len(self))
        if self._get is not None:
            return self._read_cached(self._get, start, stop)
        try:
            return read_array(self._path, self._dtype, self._shape, start, stop)
        finally:  # checked even after an error, because replacing the set may have caused it
            self._check_set()

    def _read_cached(self, get: Get, start: int, stop: int) -> Array:
        for _ in range(_CACHE_TRIES):
            get(self._path)
            with contextlib.suppress(DataError):  # another process may have just removed the file
                return read_array(self._path, self._dtype, self._shape, start, stop)
        raise DataError(
            f"{self._path} was removed {_CACHE_TRIES} times before it could be read; use a larger "
            "data.cache.size"
        )


Rows = Array | FileRows


def open_rows(
    manifest: Manifest, files: Sequence[tuple[Path, str, tuple[int, ...]]], limit: int
) -> list[Rows]:
    """Map the first ``limit`` of some files (path, dtype, shape) of a set; other files are read on
    request. No file of a set at a URL is mapped; every read first fetches the file into the cache.
    """
    check_set = UnchangedSet(manifest).check
    if manifest.cache is not None:
        return [FileRows(*file, check_set, manifest.cache.get) for file in files]
    mapped: list[Rows] = [map_array(*file) for file in files[:limit]]
    return [*mapped, *(FileRows(*file, check_set) for file in files[limit:])]


def mapped_of(rows: Sequence[Rows]) -> list[Array]:
    """Return the mapped arrays, which come first in ``rows``."""
    return [items for items in rows if not isinstance(items, FileRows)]


class MappedItems:
    """Copies items of ``maps``, which are contiguous arrays of one dtype; map i begins at item
    ``offsets[i]``.
    """

    def __init__(self, maps: Sequence[Array]) -> None:
        self._maps = list(maps)  # keeps the mapped memory alive
        itemsize = maps[0].itemsize if maps else 1
        starts = np.array([items.ctypes.data for items in maps], dtype=np.int64)
        self._lowest = None
        if maps:
            lowest = maps[int(starts.argmin())]
            self._lowest = lowest.reshape(-1).view(_SAME_SIZE[itemsize])
        self.offsets: Places = (starts - starts.min(initial=1 << 62)) // itemsize
        self._num_items = int((self.offsets + [items.size for items in maps]).max(initial=0))

    def copy(self, offsets: Places, out: Array, num_items: int) -> None:
        """Copy ``num_items`` items from each of ``offsets`` to consecutive parts of ``out``."""
        import torch  # imported here, because prepare and verify run without torch

        if self._lowest is None:
            raise ValueError("copy: the maps are closed")
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
    """The concatenated rows [rows, ...] of several non-empty files.

    ``maps`` is the result of ``open_rows``; ``none`` is an empty array with the dtype and row shape
    of the files.
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
        """Return an uninitialized array for ``num_rows`` rows."""
        return np.empty((num_rows, *self._none.shape[1:]), dtype=self._none.dtype)

    def maps_of(self, rows: Places) -> tuple[Places, Places]:
        """Return each row's file index and row number in the file."""
        index = np.searchsorted(self._first_rows, rows, side="right") - 1
        return index, rows - self._first_rows[index]

    def view(self, start: int, stop: int) -> Array | None:
        """Return a view of rows [start, stop), paged into memory, or None if they are not all in
        one map.
        """
        index = bisect.bisect_right(self._starts, start) - 1
        if stop > self._starts[index + 1] or index >= self._num_mapped:
            return None
        first = self._starts[index]
        rows = self._maps[index][start - first : stop - first]
        touch(rows)
        return rows

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Divide rows [start, stop) into ranges at file boundaries."""
        ranges: list[tuple[int, int]] = []
        index = bisect.bisect_right(self._starts, start)
        while start < stop:
            end = min(stop, self._starts[index])
            ranges.append((start, end))
            start, index = end, index + 1
        return ranges

    def read(self, start: int, stop: int, out: Array) -> None:
        """Copy rows [start, stop) into ``out`` [stop - start, ...]."""
        index = bisect.bisect_right(self._starts, start) - 1
        for number, (first, end) in enumerate(self.pieces(start, stop), index):
            begin = self._starts[number]
            out[first - start : end - start] = self._maps[number][first - begin : end - begin]

    def rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) as a new array."""
        out = self.new(stop - start)
        self.read(start, stop, out)
        return out

    def gather(self, firsts: Places, lengths: Places, out: Array) -> None:
        """Copy the runs of ``lengths[i]`` rows that start at ``firsts[i]`` into ``out``, one after
        another.
        """
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
        # A run is copied separately if the batch cuts it off, if it crosses files, or if it is not
        # mapped.
        cut = np.flatnonzero(~is_whole).tolist()
        for index in cut:
            first, rows, place = int(firsts[index]), int(lengths[index]), int(places[index])
            self.read(first, first + rows, out[place : place + rows])
        # All other runs have the same length, so one call copies all runs between two separately
        # copied runs.
        offsets = self._offsets[maps] + local * self._row_items
        for before, after in pairwise([-1, *cut, len(firsts)]):
            if after - before > 1:
                place = int(places[before + 1])
                target = out[place : place + (after - before - 1) * length]
                self._items.copy(offsets[before + 1 : after], target, length * self._row_items)

    def close(self) -> None:
        """Release the maps. A map is unmapped when its last view is gone."""
        self._maps, self._items = [], MappedItems([])

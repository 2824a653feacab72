"""The lists of ids of a split across its shards: mapped, read by ranges or row numbers."""

import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.format.manifest import Manifest, check_unchanged
from data.format.npy import map_array, touch


class RowLists(NamedTuple):
    """Lists of some rows, row by row, list by list: the order in which the engine takes them."""

    lengths: "NDArray[Any]"
    """[rows, lists] uint8 or uint16, in the order of ``Manifest.lists``"""
    values: NDArray[np.int32]
    """[sum of lengths] ids"""
    weights: NDArray[np.float32] | None
    """like ``values``, where the set has weights"""


class _Shard(NamedTuple):
    lengths: "NDArray[Any]"
    starts: NDArray[np.int64]
    values: NDArray[np.int32]
    weights: NDArray[np.float32] | None


class SplitLists:
    """The lists of one split; row numbers count from its first row, as those of ``SplitRows``.

    Maps are copy-on-write, as there. Not for a set without ragged fields.
    """

    def __init__(self, manifest: Manifest, split: str) -> None:
        shards = [shard for shard in manifest.shards(split) if shard.rows]
        self._starts = [0, *accumulate(shard.rows for shard in shards)]
        self._shards: list[_Shard] = []
        self._weighted = manifest.weighted
        self._none = np.empty((0, len(manifest.lists)), dtype=manifest.part_types["lengths"].dtype)
        try:
            for shard in shards:
                found: dict[str, NDArray[Any]] = {}
                for name in ("lengths", "starts", "values", "value_weights"):
                    if name in manifest.part_types:
                        kind, part = manifest.part_types[name], shard.parts[name]
                        shape = kind.shape(shard.rows, part.count)
                        found[name] = map_array(manifest.path / part.file, kind.dtype, shape)
                self._shards.append(
                    _Shard(
                        found["lengths"],
                        found["starts"],
                        found["values"],
                        found.get("value_weights"),
                    )
                )
        finally:
            check_unchanged(manifest)
        self.num_rows = self._starts[-1]

    def view(self, start: int, stop: int) -> RowLists | None:
        """The lists of rows [start, stop) without a copy; None where they cross shards."""
        if stop == start:
            return self._empty()
        index = bisect.bisect_right(self._starts, start) - 1
        if stop > self._starts[index + 1]:
            return None
        shard, first = self._shards[index], self._starts[index]
        a, b = start - first, stop - first
        low, high = int(shard.starts[a]), int(shard.starts[b])
        weights = None if shard.weights is None else shard.weights[low:high]
        lists = RowLists(shard.lengths[a:b], shard.values[low:high], weights)
        for array in lists:
            if array is not None:
                touch(array)
        return lists

    def read(self, runs: Sequence[tuple[int, int]]) -> RowLists:
        """The lists of the rows of ``runs``, one run after the other, as new arrays."""
        found: list[RowLists] = [self._empty()]
        for start, stop in runs:
            while start < stop:
                index = bisect.bisect_right(self._starts, start) - 1
                end = min(stop, self._starts[index + 1])
                lists = self.view(start, end)
                if lists is not None:
                    found.append(lists)
                start = end
        weights = [lists.weights for lists in found if lists.weights is not None]
        return RowLists(
            np.concatenate([lists.lengths for lists in found]),
            np.concatenate([lists.values for lists in found]),
            np.concatenate(weights) if self._weighted else None,
        )

    def gather(self, rows: NDArray[np.int64]) -> RowLists:
        """The lists of the given rows, in the given order, as new arrays."""
        index = np.searchsorted(self._starts, rows, side="right") - 1
        local = rows - np.asarray(self._starts)[index]
        first, count = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
        lengths = np.empty((len(rows), self._none.shape[1]), dtype=self._none.dtype)
        for number in np.unique(index):
            shard, here = self._shards[number], index == number
            first[here] = shard.starts[local[here]]
            count[here] = shard.starts[local[here] + 1] - first[here]
            lengths[here] = shard.lengths[local[here]]
        ends = np.cumsum(count)
        source = np.arange(int(count.sum())) + np.repeat(first - (ends - count), count)
        owner = np.repeat(index, count)
        values = np.empty(len(source), dtype=np.int32)
        weights = np.empty(len(source), dtype=np.float32) if self._weighted else None
        for number in np.unique(index):
            shard, here = self._shards[number], owner == number
            values[here] = shard.values[source[here]]
            if weights is not None and shard.weights is not None:
                weights[here] = shard.weights[source[here]]
        return RowLists(lengths, values, weights)

    def _empty(self) -> RowLists:
        weights = np.empty(0, dtype=np.float32) if self._weighted else None
        return RowLists(self._none, np.empty(0, dtype=np.int32), weights)

    def close(self) -> None:
        """Drop the memory maps; views handed out keep theirs alive."""
        self._shards = []


class SplitPart:
    """A part with one entry per row (``weight``, ``group``, ``time``, ``labels``) of a split."""

    def __init__(self, manifest: Manifest, split: str, name: str) -> None:
        kind = manifest.part_types[name]
        shards = [shard for shard in manifest.shards(split) if shard.rows]
        self._starts = [0, *accumulate(shard.rows for shard in shards)]
        self._none = np.empty((0, *kind.tail), dtype=kind.dtype)
        self._maps = [
            map_array(
                manifest.path / shard.parts[name].file, kind.dtype, kind.shape(shard.rows, None)
            )
            for shard in shards
        ]

    def read(self, runs: Sequence[tuple[int, int]]) -> "NDArray[Any]":
        """The entries of the rows of ``runs``, one run after the other, as a new array."""
        found = [self._none]
        for start, stop in runs:
            while start < stop:
                index = bisect.bisect_right(self._starts, start) - 1
                end = min(stop, self._starts[index + 1])
                first = self._starts[index]
                found.append(self._maps[index][start - first : end - first])
                start = end
        return np.concatenate(found)

    def gather(self, rows: NDArray[np.int64]) -> "NDArray[Any]":
        """The entries of the given rows, in the given order."""
        out = np.empty((len(rows), *self._none.shape[1:]), dtype=self._none.dtype)
        index = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(index):
            here = index == number
            out[here] = self._maps[number][rows[here] - self._starts[number]]
        return out

    def close(self) -> None:
        """Drop the memory maps."""
        self._maps = []

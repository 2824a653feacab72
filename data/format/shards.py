"""Shards of a split: written whole or not at all, opened by memory map, read by ranges or rows."""

import bisect
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.format.manifest import Manifest, Part, Shard, check_unchanged
from data.format.npy import check_array, map_array, read_array, touch, write_array
from data.format.parts import COUNTED_PARTS

Words = NDArray[np.int32]
Parts = Mapping[str, "NDArray[Any]"]

_WORD = "<i4"


def write_shard(folder: Path, name: str, words: Words, parts: Parts | None = None) -> Shard:
    """Write int32 ``words`` [rows, words] as ``folder/name``, and its parts beside it.

    A reader never sees half of a file. ``parts`` are arrays by the names of ``data.format.parts``.
    """
    written: dict[str, Part] = {}
    for part, array in (parts or {}).items():
        file = f"{name.removesuffix('.npy')}.{part}.npy"
        counted = part in COUNTED_PARTS
        crc32 = write_array(folder / file, array)
        written[part] = Part(file, crc32, len(array) if counted else None)
    words = np.ascontiguousarray(words, dtype=_WORD)
    return Shard(name, len(words), write_array(folder / name, words), written)


def shard_files(manifest: Manifest, shard: Shard) -> list[tuple[str, int, str, tuple[int, ...]]]:
    """Every file of a shard: its name, checksum, dtype and shape."""
    files = [(shard.file, shard.crc32, _WORD, (shard.rows, manifest.num_words))]
    for name, kind in manifest.part_types.items():
        part = shard.parts[name]
        files.append((part.file, part.crc32, kind.dtype, kind.shape(shard.rows, part.count)))
    return files


def _as_rows(words: Words) -> "NDArray[np.void]":
    """A view [rows] whose items are whole rows; indexing it copies a row at a time."""
    return words.view(np.dtype((np.void, 4 * words.shape[1])))[:, 0]


class SplitRows:
    """The words of one split across its shards; row numbers count from the split's first row.

    The maps are copy-on-write: who writes into a view changes no file, but does change what this
    object reads afterwards. They are of the set that ``manifest`` describes: one that was put in
    its place since raises DataError.
    """

    def __init__(self, manifest: Manifest, split: str) -> None:
        shards = [shard for shard in manifest.shards(split) if shard.rows]
        shapes = [(shard.rows, manifest.num_words) for shard in shards]
        try:
            self._maps: list[Words] = [
                map_array(manifest.path / shard.file, _WORD, shape)
                for shard, shape in zip(shards, shapes, strict=True)
            ]
        finally:  # also where a shard does not fit: that the set was replaced says more
            check_unchanged(manifest)
        self._starts = [0, *accumulate(shard.rows for shard in shards)]
        self.num_rows = self._starts[-1]
        self.num_words = manifest.num_words

    def read(self, start: int, stop: int, out: Words) -> None:
        """Copy rows [start, stop) into ``out`` [stop - start, words]."""
        index = bisect.bisect_right(self._starts, start) - 1
        done = 0
        while start < stop:
            first = self._starts[index]
            piece = self._maps[index][start - first : stop - first]
            out[done : done + len(piece)] = piece
            done, start, index = done + len(piece), start + len(piece), index + 1

    def view(self, start: int, stop: int) -> Words | None:
        """Rows [start, stop) without a copy, their pages read; None where they cross shards."""
        index = bisect.bisect_right(self._starts, start) - 1
        if stop > self._starts[index + 1]:
            return None
        first = self._starts[index]
        words = self._maps[index][start - first : stop - first]
        touch(words)
        return words

    def gather(self, rows: NDArray[np.int64], out: Words) -> None:
        """Copy the given rows, in the given order, into ``out`` [len(rows), words]."""
        if not len(rows):
            return
        index = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(index, kind="stable")
        shards, firsts = np.unique(index[order], return_index=True)
        target = _as_rows(out)
        for shard, chosen in zip(shards, np.split(order, firsts[1:]), strict=True):
            target[chosen] = _as_rows(self._maps[shard])[rows[chosen] - self._starts[shard]]

    def close(self) -> None:
        """Drop the memory maps; views handed out keep theirs alive."""
        self._maps = []


class RowFiles:
    """The rows of one split for a pass from start to end: read from the files, none kept open."""

    def __init__(self, manifest: Manifest, split: str) -> None:
        self._manifest = manifest
        self._shards = [shard for shard in manifest.shards(split) if shard.rows]
        for shard in self._shards:
            for file, _, dtype, shape in shard_files(manifest, shard):
                check_array(manifest.path / file, dtype, shape)
        self._starts = [0, *accumulate(shard.rows for shard in self._shards)]
        self.num_rows = self._starts[-1]
        self.num_words = manifest.num_words

    def read(self, start: int, stop: int) -> Words:
        """Rows [start, stop) as a new array [stop - start, words]."""
        shape = (self.num_words,)
        pieces = [
            read_array(self._manifest.path / shard.file, _WORD, (shard.rows, *shape), a, b)
            for shard, a, b in self._inside(start, stop)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.empty((0, self.num_words), dtype=np.int32), *pieces])

    def lists(self, start: int, stop: int) -> tuple["NDArray[Any]", Words]:
        """Lengths [stop - start, lists] and values of the lists of rows [start, stop)."""
        types, folder = self._manifest.part_types, self._manifest.path
        none = np.empty((0, len(self._manifest.lists)), dtype=types["lengths"].dtype)
        lengths: list[NDArray[Any]] = [none]
        values: list[Words] = [np.empty(0, dtype=np.int32)]
        for shard, a, b in self._inside(start, stop):
            part, kind = shard.parts["lengths"], types["lengths"]
            shape = kind.shape(shard.rows, None)
            lengths.append(read_array(folder / part.file, kind.dtype, shape, a, b))
            starts = folder / shard.parts["starts"].file
            ends = [int(read_array(starts, "<i8", (), row, row + 1)[0]) for row in (a, b)]
            values.append(
                read_array(folder / shard.parts["values"].file, _WORD, (), ends[0], ends[1])
            )
        return np.concatenate(lengths), np.concatenate(values)

    def part(self, name: str, start: int, stop: int) -> "NDArray[Any]":
        """Rows [start, stop) of a part with one entry per row."""
        kind = self._manifest.part_types[name]
        pieces: list[NDArray[Any]] = [np.empty((0, *kind.tail), dtype=kind.dtype)]
        for shard, a, b in self._inside(start, stop):
            file = self._manifest.path / shard.parts[name].file
            pieces.append(read_array(file, kind.dtype, kind.shape(shard.rows, None), a, b))
        return np.concatenate(pieces)

    def _inside(self, start: int, stop: int) -> list[tuple[Shard, int, int]]:
        """Rows [start, stop) shard by shard: the shard, and from where to where in it."""
        found: list[tuple[Shard, int, int]] = []
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first, end = self._starts[index], min(stop, self._starts[index + 1])
            found.append((self._shards[index], start - first, end - first))
            start, index = end, index + 1
        return found

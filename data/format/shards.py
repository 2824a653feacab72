"""Shard files: written whole or not at all, opened by memory map, read by ranges or row numbers."""

import bisect
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.format.manifest import Manifest, Shard, check_unchanged
from data.format.mapped_words import MappedWords
from sbpflow.errors import DataError

Words = NDArray[np.int32]

_HEADER_BYTES = 128
_PAGE_BYTES = 4096


def _header(num_rows: int, num_words: int) -> bytes:
    """The first 128 bytes of a .npy file (format 1.0) of int32 [rows, words].

    Written here and not by numpy, whose padding differs between versions: so a shard's bytes are a
    function of its rows, and a damaged header is found by comparing.
    """
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({num_rows}, {num_words}), }}"
    head = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    return head + text.ljust(_HEADER_BYTES - 11).encode("ascii") + b"\n"


def write_shard(folder: Path, name: str, words: Words) -> Shard:
    """Write int32 ``words`` [rows, words] as ``folder/name``; a reader never sees half of it."""
    words = np.ascontiguousarray(words, dtype="<i4")
    header = _header(*words.shape)
    partial = folder / (name + ".partial")
    with partial.open("wb") as file:
        file.write(header)
        file.write(words.data)
    os.replace(partial, folder / name)
    return Shard(name, len(words), zlib.crc32(words.data, zlib.crc32(header)))


def file_crc32(path: Path) -> int:
    """zlib.crc32 of a whole file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _check_shard(path: Path, shard: Shard, num_words: int) -> None:
    header = _header(shard.rows, num_words)
    try:
        with path.open("rb") as file:
            found = file.read(_HEADER_BYTES)
            num_bytes = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the set again") from error
    wanted = _HEADER_BYTES + 4 * shard.rows * num_words
    if found != header or num_bytes != wanted:
        raise DataError(
            f"{path}: is not the .npy of {shard.rows} rows x {num_words} int32 ({wanted} bytes) "
            "that the manifest names; it was changed or cut short, prepare the set again"
        )


def _map(path: Path, shard: Shard, num_words: int) -> Words:
    """A private map of a checked shard: writing into it changes no file.

    By torch, whose maps hold no file descriptor; numpy's hold one each, and a set may have more
    shards than a process may have open files.
    """
    import torch  # here, so that prepare and verify do without

    _check_shard(path, shard, num_words)
    size = _HEADER_BYTES // 4 + shard.rows * num_words
    try:
        words = torch.from_file(str(path), shared=False, size=size, dtype=torch.int32).numpy()
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path}: cannot be mapped into memory ({error}); free some memory, or raise the limit "
            "on maps (sysctl vm.max_map_count)"
        ) from error
    return words[_HEADER_BYTES // 4 :].reshape(shard.rows, num_words)


class SplitRows:
    """The rows of one split across its shards; row numbers count from the split's first row.

    The maps are copy-on-write: who writes into a view changes no file, but does change what this
    object reads afterwards. They are of the set that ``manifest`` describes: one that was put in
    its place since raises DataError.
    """

    def __init__(self, manifest: Manifest, split: str) -> None:
        shards = [shard for shard in manifest.shards(split) if shard.rows]
        try:
            self._maps = [_map(manifest.path / s.file, s, manifest.num_words) for s in shards]
        finally:  # also where a shard does not fit: that the set was replaced says more
            check_unchanged(manifest)
        self._starts = [0, *accumulate(shard.rows for shard in shards)]
        self._first_rows = np.array(self._starts)
        self._memory = MappedWords(self._maps)
        self._offsets = self._memory.offsets
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
        words.reshape(-1)[:: _PAGE_BYTES // 4].max()
        return words

    def gather(self, firsts: NDArray[np.int64], lengths: NDArray[np.int64], out: Words) -> None:
        """Copy runs of rows into ``out``: ``lengths[i]`` rows from ``firsts[i]`` on, in order."""
        if len(firsts) == 1:
            self.read(int(firsts[0]), int(firsts[0] + lengths[0]), out)
        elif len(firsts):
            self._gather(firsts, lengths, out)

    def _gather(self, firsts: NDArray[np.int64], lengths: NDArray[np.int64], out: Words) -> None:
        length = int(lengths.max())
        shards = np.searchsorted(self._first_rows, firsts, side="right") - 1
        is_whole = (lengths == length) & (firsts + length <= self._first_rows[shards + 1])
        places = np.cumsum(lengths) - lengths
        for index in np.flatnonzero(~is_whole):  # cut by the batch, or across two shards
            first, rows, place = int(firsts[index]), int(lengths[index]), int(places[index])
            self.read(first, first + rows, out[place : place + rows])
        # Between two cut runs, the whole ones are equally long parts of ``out``.
        bounds = [-1, *np.flatnonzero(~is_whole).tolist(), len(firsts)]
        words = self._offsets[shards] + (firsts - self._first_rows[shards]) * self.num_words
        for before, after in pairwise(bounds):
            if after - before > 1:
                place = int(places[before + 1])
                target = out[place : place + (after - before - 1) * length]
                self._memory.copy(words[before + 1 : after], target, length * self.num_words)

    def close(self) -> None:
        """Drop the memory maps; views handed out keep theirs alive."""
        self._maps = []
        self._memory = MappedWords([])


class RowFiles:
    """The rows of one split for a pass from start to end: read from the files, none kept open."""

    def __init__(self, manifest: Manifest, split: str) -> None:
        self._shards = [shard for shard in manifest.shards(split) if shard.rows]
        self._folder = manifest.path
        for shard in self._shards:
            _check_shard(self._folder / shard.file, shard, manifest.num_words)
        self._starts = [0, *accumulate(shard.rows for shard in self._shards)]
        self.num_rows = self._starts[-1]
        self.num_words = manifest.num_words

    def read(self, start: int, stop: int) -> Words:
        """Rows [start, stop) as a new array [stop - start, words]."""
        out = np.empty((stop - start, self.num_words), dtype=np.int32)
        index = bisect.bisect_right(self._starts, start) - 1
        done = 0
        while done < len(out):
            first = start + done - self._starts[index]
            here = min(self._shards[index].rows - first, len(out) - done)
            self._read(self._shards[index], first, out[done : done + here])
            done, index = done + here, index + 1
        return out

    def _read(self, shard: Shard, first: int, out: Words) -> None:
        path = self._folder / shard.file
        try:
            with path.open("rb") as file:
                file.seek(_HEADER_BYTES + 4 * first * self.num_words)
                num_bytes = file.readinto(out.data)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error}); prepare the set again") from error
        if num_bytes != out.nbytes:
            raise DataError(f"{path}: was cut short while it was read; prepare the set again")


def verify_shards(manifest: Manifest, workers: int) -> None:
    """Compare every shard with its checksum; DataError names the first that differs."""

    def verify(shard: Shard) -> None:
        path = manifest.path / shard.file
        _check_shard(path, shard, manifest.num_words)
        if file_crc32(path) != shard.crc32:
            raise DataError(f"{path}: checksum differs from the manifest; prepare the set again")

    with ThreadPoolExecutor(workers) as pool:
        shards = (s for split in ("train", "val", "test") for s in manifest.shards(split))
        for _ in pool.map(verify, shards):
            pass

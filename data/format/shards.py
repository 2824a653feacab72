"""Write shards atomically, and read single rows or ranges of rows, mapped if possible."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.lists import SplitLists, SplitPart
from sbpflow.data.format.manifest import SPLITS, Manifest, Shard, check_unchanged
from sbpflow.data.format.mapped_rows import MappedRows, max_maps, open_rows
from sbpflow.data.format.npy import check_array, write_array
from sbpflow.data.format.parts import COUNTED_PARTS, Parts, chosen_parts

Words = NDArray[np.int32]

_WORD = "<i4"


def write_splits(
    folder: Path, index: int, words: Words, parts: Parts, splits: "NDArray[Any]"
) -> dict[str, Any]:
    """Write shard ``index`` of each split that has rows, given each row's split ([rows]: 0 train,
    1 val, 2 test); return the manifest entries of the shards, by split.
    """
    shards: dict[str, Any] = {}
    for number, name in enumerate(SPLITS):
        chosen = splits == number
        if chosen.any():
            own = (words, parts) if chosen.all() else (words[chosen], chosen_parts(parts, chosen))
            shards[name] = write_shard(folder, f"{name}-{index:06d}.npy", *own)
    return shards


def write_shard(
    folder: Path, name: str, words: Words, parts: Parts | None = None
) -> dict[str, Any]:
    """Write ``words`` (int32 [rows, words]) as ``folder/name``, and the parts next to this file;
    return the manifest entry of the shard.

    Readers never see an incomplete file. ``parts`` maps part names (``data.format.parts``) to
    arrays.
    """
    written: dict[str, Any] = {}
    for part, array in (parts or {}).items():
        file = f"{name.removesuffix('.npy')}.{part}.npy"
        written[part] = {"file": file, "crc32": write_array(folder / file, array)}
        if part in COUNTED_PARTS:
            written[part]["count"] = len(array)
    words = np.ascontiguousarray(words, dtype=_WORD)
    entry = {"file": name, "rows": len(words), "crc32": write_array(folder / name, words)}
    return {**entry, "parts": written} if written else entry


def shard_files(manifest: Manifest, shard: Shard) -> list[tuple[str, int, str, tuple[int, ...]]]:
    """Return the name, checksum, dtype and shape of every file of a shard."""
    files = [(shard.file, shard.crc32, _WORD, (shard.rows, manifest.num_words))]
    for name, kind in manifest.part_types.items():
        part = shard.parts[name]
        files.append((part.file, part.crc32, kind.dtype, kind.shape(shard.rows, part.count)))
    return files


class SplitRows(MappedRows):
    """Reads the words of one split across its shards. Row numbers count from the split's first row.

    Maps are copy-on-write, so writing to a view changes later reads of this object but not the
    file. Raises DataError if the set that ``manifest`` describes has been replaced. The first
    ``limit`` shards of a local set (by default, ``max_maps()``) are mapped; other shards are read
    on request.
    """

    def __init__(self, manifest: Manifest, split: str, limit: int | None = None) -> None:
        try:
            limit = max_maps() if limit is None else limit
            maps = open_rows(manifest, _word_files(manifest, split), limit)
        finally:  # checked even after an error, because replacing the set may have caused it
            check_unchanged(manifest)
        self.num_words = manifest.num_words
        super().__init__(maps, np.empty((0, self.num_words), dtype=np.int32))


def check_shards(manifest: Manifest, split: str) -> None:
    """Raise DataError if the set has changed or, in a local set, if a shard of ``split`` has the
    wrong size.
    """
    try:
        for file in _word_files(manifest, split) if manifest.cache is None else ():
            check_array(*file)
    finally:
        check_unchanged(manifest)


def _word_files(manifest: Manifest, split: str) -> list[tuple[Path, str, tuple[int, ...]]]:
    """Return the path, dtype and shape of the words of each non-empty shard."""
    return [
        (manifest.path / shard.file, _WORD, (shard.rows, manifest.num_words))
        for shard in manifest.shards(split)
        if shard.rows
    ]


class RowFiles:
    """Reads rows of one split sequentially, without keeping files open."""

    def __init__(self, manifest: Manifest, split: str) -> None:
        types = manifest.part_types
        self._words = SplitRows(manifest, split, 0)
        self._lists = SplitLists(manifest, split, 0) if manifest.lists else None
        self._parts = {
            name: SplitPart(manifest, split, name, 0)
            for name, kind in types.items()
            if not kind.counted and not kind.extra
        }
        self._value_type = types["values"].dtype if manifest.lists else ""
        self.num_rows, self.num_words = self._words.num_rows, manifest.num_words

    def read(self, start: int, stop: int) -> Words:
        """Return rows [start, stop) as a new array (int32 [stop - start, words])."""
        return self._words.rows(start, stop)

    def lists(self, start: int, stop: int) -> tuple["NDArray[Any]", "NDArray[Any]"] | None:
        """For rows [start, stop), return the list lengths ([stop - start, lists]) and the ids in
        lists ([n]), or None if no field has lists.
        """
        if self._lists is None:
            return None
        extents = self._lists.find(np.array([start]), np.array([stop - start]))
        lengths = self._lists.lengths.new(stop - start)
        values = np.empty(extents.num_values, dtype=self._value_type)
        self._lists.gather(extents, lengths, values, None)
        return lengths, values

    def keys(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the keys ([stop - start, columns]) of rows [start, stop), or None if no field has
        keys.
        """
        return self.part("keys", start, stop) if "keys" in self._parts else None

    def part(self, name: str, start: int, stop: int) -> "NDArray[Any]":
        """Return rows [start, stop) of the part ``name``, which must have one entry per row."""
        return self._parts[name].rows(start, stop)

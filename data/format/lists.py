"""The lists of ids of a split, and the columns beside its features, mapped across its shards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest, UnchangedSet, check_unchanged
from sbpflow.data.format.mapped_rows import (
    MappedItems,
    MappedRows,
    Places,
    Rows,
    mapped_of,
    most_maps,
    open_rows,
)


def _open_part(manifest: Manifest, split: str, name: str, most: int) -> list[Rows]:
    """The files of a part, one for each shard with rows; the first ``most`` are mapped."""
    kind, folder = manifest.part_types[name], manifest.path
    found = [(shard, shard.parts[name]) for shard in manifest.shards(split) if shard.rows]
    files = [
        (folder / part.file, kind.dtype, kind.shape(shard.rows, part.count))
        for shard, part in found
    ]
    return open_rows(files, most, UnchangedSet(manifest).check)


class SplitPart(MappedRows):
    """A part with an entry per row of a split, such as ``lengths``, ``weight`` or ``time``."""

    def __init__(self, manifest: Manifest, split: str, name: str, most: int | None = None) -> None:
        kind = manifest.part_types[name]
        none = np.empty((0, *kind.tail), dtype=kind.dtype)
        most = most_maps() if most is None else most
        super().__init__(_open_part(manifest, split, name, most), none)


@dataclass(frozen=True, slots=True)
class Extents:
    """Where the ids of some runs of rows lie; a run that crosses shards is several here."""

    rows: tuple[Places, Places]
    """first rows and lengths of the runs as they were asked for"""
    maps: Places
    lows: Places
    highs: Places

    @property
    def num_values(self) -> int:
        """Ids in all of them."""
        return int((self.highs - self.lows).sum())


class SplitLists:
    """The lists of one split: ids of each row end to end, field by field, row by row.

    That is the order in which the engine takes them. Row numbers count from the split's first row,
    and maps are copy-on-write, as those of ``SplitRows``. Not for a set without ragged fields.
    ``most`` files of each part are mapped.
    """

    def __init__(self, manifest: Manifest, split: str, most: int | None = None) -> None:
        if most is None:
            most = max(1, most_maps() // (3 + manifest.weighted))
        try:
            self.lengths = SplitPart(manifest, split, "lengths", most)
            self._starts = _open_part(manifest, split, "starts", most)
            self._values = _open_part(manifest, split, "values", most)
            self._weights = (
                _open_part(manifest, split, "value_weights", most) if manifest.weighted else None
            )
        finally:
            check_unchanged(manifest)
        self._mapped_starts = MappedItems(mapped_of(self._starts))

    def find(self, firsts: Places, lengths: Places) -> Extents:
        """Where the ids of the rows of these runs are."""
        pieces, counts = self._within_maps(firsts, lengths)
        maps, local = self.lengths.maps_of(pieces)
        ends = np.empty((2, len(pieces)), dtype=np.int64)
        offsets = self._mapped_starts.offsets
        mapped = np.flatnonzero(maps < len(offsets))
        if len(mapped):
            places = offsets[maps[mapped]] + local[mapped]
            found = np.empty(2 * len(mapped), dtype=np.int64)
            self._mapped_starts.copy(np.concatenate([places, places + counts[mapped]]), found, 1)
            ends[:, mapped] = found.reshape(2, -1)
        for index in np.flatnonzero(maps >= len(offsets)).tolist():
            row, count = int(local[index]), int(counts[index])
            starts = self._starts[int(maps[index])][row : row + count + 1]
            ends[:, index] = starts[0], starts[-1]
        return Extents((firsts, lengths), maps, ends[0], ends[1])

    def _within_maps(self, firsts: Places, lengths: Places) -> tuple[Places, Places]:
        """The runs, those that cross shards cut where a shard ends."""
        pieces = [
            piece
            for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
            for piece in self.lengths.pieces(first, first + length)
        ]
        found = np.array(pieces, dtype=np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1] - found[:, 0]

    def gather(
        self,
        found: Extents,
        lengths: "NDArray[Any]",
        values: NDArray[np.int32],
        weights: NDArray[np.float32] | None,
    ) -> None:
        """Copy lengths [rows, lists], ids and their weights (where the set has some)."""
        self.lengths.gather(*found.rows, lengths)
        _copy(self._values, found, values)
        if weights is not None and self._weights is not None:
            _copy(self._weights, found, weights)

    def close(self) -> None:
        """Drop the maps."""
        self.lengths.close()
        self._values, self._weights, self._starts = [], None, []
        self._mapped_starts = MappedItems([])


def _copy(maps: list[Rows], found: Extents, out: "NDArray[Any]") -> None:
    done = 0
    for index, low, high in _each(found):
        out[done : done + high - low] = maps[index][low:high]
        done += high - low


def _each(found: Extents) -> Iterator[tuple[int, int, int]]:
    return zip(found.maps.tolist(), found.lows.tolist(), found.highs.tolist(), strict=True)

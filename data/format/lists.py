"""Read the id lists and non-feature columns of a split from the files of all shards."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest, check_unchanged
from sbpflow.data.format.mapped_rows import (
    MappedItems,
    MappedRows,
    Places,
    Rows,
    mapped_of,
    open_rows,
)


def open_part(manifest: Manifest, split: str, name: str, limit: int) -> list[Rows]:
    """Open the files of a part in all non-empty shards. For a local set, the first ``limit`` files
    are mapped.
    """
    kind, folder = manifest.part_types[name], manifest.path
    parts = [(shard, shard.parts[name]) for shard in manifest.shards(split) if shard.rows]
    files = [
        (folder / part.file, kind.dtype, kind.shape(shard.rows, part.count))
        for shard, part in parts
    ]
    return open_rows(manifest, files, limit)


class SplitPart(MappedRows):
    """Reads a part of a split that has one entry per row, such as ``lengths``, ``weight`` or
    ``time``.
    """

    def __init__(self, manifest: Manifest, split: str, name: str, limit: int) -> None:
        kind = manifest.part_types[name]
        none = np.empty((0, *kind.tail), dtype=kind.dtype)
        super().__init__(open_part(manifest, split, name, limit), none)


@dataclass(frozen=True, slots=True)
class Extents:
    """Where the ids of each run of rows are stored; a run that spans several shards has one entry
    per shard.
    """

    rows: tuple[Places, Places]
    """The first rows and the lengths of the requested runs"""
    maps: Places
    lows: Places
    highs: Places

    @property
    def num_values(self) -> int:
        """Return the total number of ids."""
        return int((self.highs - self.lows).sum())


class SplitLists:
    """Reads the concatenated id lists of one split. As in the embedding engine, lists are ordered
    by row and then by field.

    As in ``SplitRows``, row numbers count from the first row of the split, and maps are
    copy-on-write. The set must contain ragged fields. The first ``limit`` files of each part of a
    local set are mapped.
    """

    def __init__(self, manifest: Manifest, split: str, limit: int) -> None:
        try:
            self.lengths = SplitPart(manifest, split, "lengths", limit)
            self._starts = open_part(manifest, split, "starts", limit)
            self._values = open_part(manifest, split, "values", limit)
            self._weights = (
                open_part(manifest, split, "value_weights", limit) if manifest.weighted else None
            )
        finally:
            check_unchanged(manifest)
        self._mapped_starts = MappedItems(mapped_of(self._starts))

    def find(self, firsts: Places, lengths: Places) -> Extents:
        """Return where the ids of the given runs of rows are stored."""
        pieces, counts = self._within_maps(firsts, lengths)
        maps, local = self.lengths.maps_of(pieces)
        ends = np.empty((2, len(pieces)), dtype=np.int64)
        offsets = self._mapped_starts.offsets
        mapped = np.flatnonzero(maps < len(offsets))
        if len(mapped):
            places = offsets[maps[mapped]] + local[mapped]
            bounds = np.empty(2 * len(mapped), dtype=np.int64)
            self._mapped_starts.copy(np.concatenate([places, places + counts[mapped]]), bounds, 1)
            ends[:, mapped] = bounds.reshape(2, -1)
        for index in np.flatnonzero(maps >= len(offsets)).tolist():
            row, count = int(local[index]), int(counts[index])
            starts = self._starts[int(maps[index])][row : row + count + 1]
            ends[:, index] = starts[0], starts[-1]
        return Extents((firsts, lengths), maps, ends[0], ends[1])

    def _within_maps(self, firsts: Places, lengths: Places) -> tuple[Places, Places]:
        """Divide the runs at shard boundaries; return the first rows and lengths of the pieces."""
        pieces = [
            piece
            for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
            for piece in self.lengths.pieces(first, first + length)
        ]
        bounds = np.array(pieces, dtype=np.int64).reshape(-1, 2)
        return bounds[:, 0], bounds[:, 1] - bounds[:, 0]

    def gather(
        self,
        extents: Extents,
        lengths: "NDArray[Any]",
        values: "NDArray[Any]",
        weights: NDArray[np.float32] | None,
    ) -> None:
        """Copy data of the requested runs to the given arrays: the lengths ([rows, lists]), the ids
        ([n]), and, if the set contains weights, the weights ([n]).

        ``values``, which receives the ids, is int32, or int64 if the set contains keys.
        """
        self.lengths.gather(*extents.rows, lengths)
        _copy(self._values, extents, values)
        if weights is not None and self._weights is not None:
            _copy(self._weights, extents, weights)

    def close(self) -> None:
        """Release the memory maps."""
        self.lengths.close()
        self._values, self._weights, self._starts = [], None, []
        self._mapped_starts = MappedItems([])


def _copy(maps: list[Rows], extents: Extents, out: "NDArray[Any]") -> None:
    done = 0
    for index, low, high in np.stack([extents.maps, extents.lows, extents.highs], axis=1).tolist():
        out[done : done + high - low] = maps[index][low:high]
        done += high - low

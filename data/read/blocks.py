"""Read the rows of batches into one block of int32, which needs only a single transfer to the
device.

A block is a concatenation of sections: 64-bit columns; the ids, if the words do not contain them in
their final form (sets with keys have int64 ids, and crosses may be computed here); ids in lists;
words or floats; list lengths; additional labels; row weights; and weights of ids in lists. 64-bit
sections come first, because they must be aligned. The number of rows and the size of the block
determine the sizes of all sections.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.data.format.lists import SplitLists, SplitPart
from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.mapped_rows import max_maps
from sbpflow.data.format.shards import SplitRows
from sbpflow.data.read.batch import Ids
from sbpflow.data.read.crosses import CrossColumns
from sbpflow.data.read.order import Runs
from sbpflow.embedding.ids.batch_ids import BatchIds, IdBounds, Lists
from sbpflow.embedding.plan.tables import ANY_ID
from sbpflow.run.model.spec import HashedColumn

Words = NDArray[np.int32]

_WIDE_COLUMNS = ("group", "time", "row_key")  # non-feature columns with 64 bits per value


BLOCK_BYTES = 16 << 20
"""Batches are read together up to this size, because the Python code and thread switches for each
block take as long as copying 1 or 2 MB.
"""


class Block(NamedTuple):
    """The ``words`` [n] of consecutive batches. ``sizes`` contains the number of rows in each
    batch.
    """

    words: Words
    sizes: tuple[int, ...]


class BatchColumns(NamedTuple):
    """The columns of a ``Batch``, as views of a block."""

    labels: Tensor
    dense: Tensor
    ids: Ids
    weights: Tensor | None
    columns: dict[str, Tensor]


class BlockReader:
    """Reads rows of a split into blocks, and divides blocks into columns."""

    def __init__(
        self,
        manifest: Manifest,
        split: str,
        crosses: Sequence[HashedColumn] = (),
        most: int | None = None,
    ) -> None:
        types = manifest.part_types
        self._manifest, self._split_name = manifest, split
        # The kinds of files share the limit on memory maps. If a set has only files of words, these
        # files count twice, because views need their own maps.
        share = max(1, max_maps() // (1 + max(1, len(types))))
        self._max_maps = share if most is None else most
        self._words = SplitRows(manifest, split, self._max_maps)
        self._crosses = CrossColumns(manifest, crosses)
        self.num_rows = self._words.num_rows

        def part(name: str) -> SplitPart:
            return SplitPart(manifest, split, name, self._max_maps)

        self._wide = {name: part(name) for name in _WIDE_COLUMNS if name in types}
        self._keys = part("keys") if "keys" in types else None
        self._lists = SplitLists(manifest, split, self._max_maps) if manifest.lists else None
        self._weighted = manifest.weighted
        self._labels = part("labels") if "labels" in types else None
        self._weight = part("weight") if "weight" in types else None
        self._num_floats = 1 + len(manifest.dense)
        self._num_lists = len(manifest.lists)
        self._num_labels = types["labels"].tail[0] if "labels" in types else 0
        keyed = np.array([f.keyed for f in manifest.fixed for _ in range(f.hot)], dtype=np.bool_)
        self._num_keys, self._num_stored = int(keyed.sum()), len(keyed)
        self._key_places, self._id_places = _columns_where(keyed), _columns_where(~keyed)
        self._num_columns = self._num_stored + len(self._crosses)
        self._id_words = 2 if manifest.keyed else 1
        self._has_own_ids = manifest.keyed or len(self._crosses) > 0
        self._row_words = (
            2 * len(self._wide)
            + self._num_floats
            + self._id_words * self._num_columns
            + self._num_lists
            + self._num_labels
            + (self._weight is not None)
        )
        self._bounds = id_bounds(manifest, self._crosses.rows)
        self._only_words = self._row_words == self._words.num_words and not manifest.keyed

    @property
    def max_rows(self) -> int:
        """Return the maximum number of rows in a block of several batches, or 0 if lists allow only
        one batch per block.
        """
        return 0 if self._lists else BLOCK_BYTES // (4 * self._row_words)

    def new_views(self) -> SplitRows | None:
        """Return new maps to pass to ``view``, or None if blocks cannot be views."""
        if not self._only_words:
            return None
        return SplitRows(self._manifest, self._split_name, self._max_maps)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Divide rows [start, stop) into ranges at shard boundaries."""
        return self._words.pieces(start, stop)

    def view(self, words: SplitRows, runs: Runs) -> Words | None:
        """Return the rows of ``runs`` as a view of ``words`` if they are a single run in one map,
        or else None.
        """
        if len(runs.firsts) != 1:
            return None
        first, length = int(runs.firsts[0]), int(runs.lengths[0])
        rows = words.view(first, first + length)
        return None if rows is None else rows.reshape(-1)

    def read(self, runs: Runs, take: Callable[[int], Words]) -> Words:
        """Read the rows of the runs, in order, into an array that ``take`` returns for a given
        size.
        """
        num_rows = int(runs.lengths.sum())
        lists = self._lists
        extents = None if lists is None else lists.find(runs.firsts, runs.lengths)
        num_values = 0 if extents is None else extents.num_values
        size = num_rows * self._row_words + num_values * (self._id_words + self._weighted)
        sections = _Sections(take(size))
        for part in self._wide.values():
            part.gather(*runs, sections.next(num_rows, words=2))
        if self._has_own_ids:
            ids = sections.next(num_rows, self._num_columns, words=self._id_words)
            values = sections.next(num_values, words=self._id_words)
            floats = sections.next(num_rows, self._num_floats)
            self._read_own_ids(runs, take, floats, ids)
        else:
            values = sections.next(num_values)
            self._words.gather(*runs, sections.next(num_rows, self._words.num_words))
        lengths = sections.next(num_rows, self._num_lists)
        if self._labels is not None:
            self._labels.gather(*runs, sections.next(num_rows, self._num_labels).view(np.float32))
        if self._weight is not None:
            self._weight.gather(*runs, sections.next(num_rows).view(np.float32))
        if lists is not None and extents is not None:
            narrow = lists.lengths.new(num_rows)
            weights = sections.next(num_values).view(np.float32) if self._weighted else None
            lists.gather(extents, narrow, values, weights)
            lengths[:] = narrow
        return sections.words

    def _read_own_ids(
        self, runs: Runs, take: Callable[[int], Words], floats: Words, ids: Words
    ) -> None:
        """Read the floats, and write ids, keys and crosses to ``ids`` in the order of a batch."""
        num_rows, num_words = len(floats), self._words.num_words
        words = take(num_rows * num_words).reshape(-1, num_words)
        self._words.gather(*runs, words)
        floats[:] = words[:, : self._num_floats]
        ids[:, self._id_places] = words[:, self._num_floats :]
        if self._keys is not None:
            keys = take(2 * num_rows * self._num_keys).view(np.int64)
            keys = keys.reshape(num_rows, self._num_keys)
            self._keys.gather(*runs, keys)
            ids[:, self._key_places] = keys
        self._crosses.fill(ids[:, : self._num_stored], ids[:, self._num_stored :])

    def split(self, words: Tensor, sizes: tuple[int, ...]) -> list[BatchColumns]:
        """Return the columns of each batch in a block (int32 [n]), as views."""
        whole = self._split(words, sum(sizes))
        return [whole] if len(sizes) == 1 else _batches(whole, sizes)

    def _split(self, words: Tensor, num_rows: int) -> BatchColumns:
        sections = _Sections(words)
        num_list_words = words.shape[0] - num_rows * self._row_words
        num_values = num_list_words // (self._id_words + self._weighted)
        columns = {name: sections.next(num_rows, words=2) for name in self._wide}
        if self._has_own_ids:
            ids = sections.next(num_rows, self._num_columns, words=self._id_words)
            values = sections.next(num_values, words=self._id_words)
            floats = sections.next(num_rows, self._num_floats)
        else:
            values = sections.next(num_values)
            rows = sections.next(num_rows, self._words.num_words)
            floats, ids = rows[:, : self._num_floats], rows[:, self._num_floats :]
        lengths = sections.next(num_rows, self._num_lists)
        if self._num_labels:
            columns["labels"] = sections.next(num_rows, self._num_labels).view(torch.float32)
        weights = None
        if self._weight is not None:
            weights = sections.next(num_rows).view(torch.float32)
        if self._lists:
            of_ids = sections.next(num_values).view(torch.float32) if self._weighted else None
            ids = BatchIds(ids, Lists(lengths, values, of_ids), self._bounds)
        floats = floats.view(torch.float32)
        return BatchColumns(floats[:, 0], floats[:, 1:], ids, weights, columns)

    def close(self) -> None:
        """Release the memory maps."""
        parts = (self._words, self._keys, self._lists, self._labels, self._weight)
        for part in (*parts, *self._wide.values()):
            if part is not None:
                part.close()


def _batches(whole: BatchColumns, sizes: tuple[int, ...]) -> list[BatchColumns]:
    if isinstance(whole.ids, BatchIds):
        raise TypeError("a block with lists must contain exactly one batch")
    weights = [None] * len(sizes) if whole.weights is None else whole.weights.split(sizes)
    columns = {name: column.split(sizes) for name, column in whole.columns.items()}
    split = zip(
        whole.labels.split(sizes), whole.dense.split(sizes), whole.ids.split(sizes), weights,
        strict=True,
    )  # fmt: skip
    return [
        BatchColumns(*parts, {name: column[k] for name, column in columns.items()})
        for k, parts in enumerate(split)
    ]


def _columns_where(chosen: NDArray[np.bool_]) -> "slice | NDArray[np.int64]":
    """Return the indices of the chosen columns, as a slice if all are chosen, because slices are
    faster.
    """
    return slice(0, len(chosen)) if chosen.all() else np.flatnonzero(chosen)


def id_bounds(manifest: Manifest, crosses: tuple[int, ...]) -> IdBounds:
    """Return the bounds of the ids in the set; ``prepare`` and the checksums guarantee these
    bounds.
    """
    limits = {field.name: ANY_ID if field.keyed else field.rows for field in manifest.fields}
    return IdBounds(
        columns=tuple(limits[f.name] for f in manifest.fixed for _ in range(f.hot)) + crosses,
        lists=tuple(limits[field.name] for field in manifest.lists),
        lengths=tuple(field.hot for field in manifest.lists),
    )


Array = TypeVar("Array", Words, Tensor)


class _Sections(Generic[Array]):
    """Cuts consecutive sections from a block, which is an array or tensor [n]."""

    def __init__(self, words: Array) -> None:
        self.words = words
        self._at = 0

    def next(self, num_rows: int, columns: int | None = None, *, words: int = 1) -> Array:
        """Return the next section with shape [num_rows] or [num_rows, columns].

        Items are int32 if ``words`` is 1, and int64 if ``words`` is 2.
        """
        size = num_rows * (1 if columns is None else columns)
        begin, self._at = self._at, self._at + size * words
        section = self.words[begin : self._at]
        if words == 2:
            # torch can view an empty section as int64 only if its shape is [0, 2].
            section = section.reshape(size, 2)
            section = section.view(torch.int64 if isinstance(section, Tensor) else np.int64)
        return section.reshape(size) if columns is None else section.reshape(num_rows, columns)

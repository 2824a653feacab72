"""Tracks the rows that training changes, so that a delta contains only these rows.

For every rectangle of a table that a rank writes, a delta contains the row numbers and the values
of the changed rows. The rectangles tile the table, so a reader notices if one is missing. Rows of
growing tables are numbered in the order of their keys' addresses (``mix`` of the keys). The row of
a new key counts as changed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sbpflow.checkpoint.format import Patch, Piece
from sbpflow.checkpoint.write import Part
from sbpflow.embedding.plan.tables import Place, Shard
from sbpflow.embedding.state import StoredRows, Values
from sbpflow.embedding.storage.base import RowListener
from sbpflow.embedding.storage.live_rows import KeyColumn, TrainedRows
from sbpflow.embedding.storage.selected_rows import NO_ROWS, SelectedRows
from sbpflow.embedding.storage.store import WEIGHTS, RowStore

Stores = Callable[[], Iterable[tuple[RowStore, Sequence[Shard]]]]
Written = Sequence[tuple[str, Piece]]


class ChangedRows(SelectedRows):
    """The changed rows of a store; ``changed`` is int64 [n], ascending, on the CPU."""

    def __init__(self, store: RowStore, changed: Tensor) -> None:
        super().__init__(store, changed.numel())
        self.changed = changed

    def numbers(self, rows: slice) -> slice | Tensor:
        return rows if rows == NO_ROWS else self.changed[rows]

    def places(self, numbers: Tensor) -> Tensor:
        return torch.searchsorted(self.changed, numbers)

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of ``changed`` that contains the rows [start, stop) of the store."""
        first, end = torch.searchsorted(self.changed, torch.tensor([start, stop])).tolist()
        return first, end

    def among(self, trained: TrainedRows) -> TrainedRows:
        """Return the rows of ``trained`` that have changed."""
        marks = np.zeros(self.store.num_rows, np.bool_)
        marks[self.changed] = True
        return trained.among(marks)


class ChangeTracker:
    """Tracks the changed rows of all ``stores`` on this rank, from construction until ``close``."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._marks: list[tuple[RowStore, Tensor, RowListener]] = []
        for store, _ in stores():
            # The additional mark is for padding, which fixed-size lookups report as a row.
            device = store.kernel.weights.device
            marks = torch.zeros(store.num_rows + 1, dtype=torch.bool, device=device)
            listener = _marker(marks)
            store.kernel.listeners.append(listener)
            self._marks.append((store, marks, listener))

    def take(self) -> "Changes":
        """Return the rows that changed since the last call, and clear the marks."""
        changes: dict[int, ChangedRows] = {}
        for store, marks, _ in self._marks:
            # NumPy finds a few marks among many rows four times as fast as torch.
            changed = torch.from_numpy(np.flatnonzero(marks[:-1].cpu().numpy()))
            changes[id(store)] = ChangedRows(store, changed)
            marks.zero_()
        return Changes(self._stores, changes)

    def close(self) -> None:
        """Stop listening to the stores."""
        for store, _, listener in self._marks:
            store.kernel.listeners.remove(listener)
        self._marks = []


def _marker(marks: Tensor) -> RowListener:
    padding = marks.numel() - 1

    def mark(rows: Tensor) -> None:
        marks.index_fill_(0, rows.to(marks.device, torch.int64).clamp(max=padding), True)

    return mark


class StoredTensor(NamedTuple):
    """The location of a table's tensor: its store, its name in the store, and its shard."""

    store: RowStore
    key: str
    shard: Shard


def stored_tensors(stores: Stores) -> dict[str, StoredTensor]:
    """Return the locations of the tensors of all tables on this rank, by name."""
    found: dict[str, StoredTensor] = {}
    for store, shards in stores():
        for shard in shards:
            name = f"tables/{shard.table.name}"
            for key in store.read(NO_ROWS):
                tensor = name if key == WEIGHTS else f"{name}/{key}"
                found[tensor] = StoredTensor(store, key, shard)
    return found


class Changes:
    """The rows on this rank that changed between two saves, for all stores."""

    def __init__(self, stores: Stores, changed: dict[int, ChangedRows]) -> None:
        self._changed = changed
        self._tables = stored_tensors(stores)
        # (tensor, rectangle, name of the part with its row numbers)
        self._patches: list[tuple[str, Place, str]] = []

    def parts_of(self, parts: Sequence[Part]) -> list[Part]:
        """Replace parts of tables with their changed rows, which ``patches_of`` later turns into
        patches.
        """
        result: list[Part] = []
        rows_names: dict[tuple[str, int, int], str] = {}
        growing: dict[int, TrainedRows] = {}  # changed rows, by the id of the ``TrainedRows``
        for part in parts:
            if part.name not in self._tables:
                result.append(part)
                continue
            store, key, shard = self._tables[part.name]
            rows, start, stop, numbers = self._select(part, growing)
            span = (shard.table.name, start, stop)
            if span not in rows_names:  # all tensors of a table share one part with row numbers
                rows_names[span] = f"rows/{len(rows_names)}"
                whole = Place(0, stop - start, 0, 1)
                result.append(Part(name=rows_names[span], place=whole, values=numbers))
            is_column = part.values.ndim > store.read(NO_ROWS)[key].ndim
            result.append(
                Part(
                    name=f"values/{len(self._patches)}",
                    place=replace(part.place, row_start=0, row_stop=stop - start),
                    values=StoredRows(rows, key, start, stop, is_column),
                )
            )
            self._patches.append((part.name, part.place, rows_names[span]))
        return result

    def _select(
        self, part: Part, growing: dict[int, TrainedRows]
    ) -> tuple[SelectedRows, int, int, Values]:
        """Return a ``SelectedRows``, the range in it of a part's changed rows, and their row
        numbers for the patch.
        """
        store, _, shard = self._tables[part.name]
        changed, table = self._changed[id(store)], shard.table.name
        trained = part.values.store if isinstance(part.values, StoredRows) else None
        if isinstance(trained, TrainedRows):
            if id(trained) not in growing:
                growing[id(trained)] = changed.among(trained)
            rows = growing[id(trained)]
            start, count = rows.starts[table], rows.count(table)
            # The writer thread computes the numbers, because it must sort the rows anyway.
            numbers = KeyColumn(partial(rows.numbers_in, trained, table), torch.int64)
            return rows, start, start + count, StoredRows(numbers, WEIGHTS, 0, count)
        shift = shard.row_start - shard.base
        start, stop = changed.between(part.place.row_start - shift, part.place.row_stop - shift)
        return changed, start, stop, changed.changed[start:stop] + shift

    def patches_of(self, written: Written) -> tuple[Written, list[tuple[str, Patch]]]:
        """Divide the pieces written for ``parts_of`` into ordinary pieces and table patches."""
        pieces = dict(written)
        patches = [
            (name, Patch(place=place, rows=pieces[rows], values=pieces[f"values/{number}"]))
            for number, (name, place, rows) in enumerate(self._patches)
        ]
        own = {rows for _, _, rows in self._patches}
        own |= {f"values/{number}" for number in range(len(self._patches))}
        return [(name, piece) for name, piece in written if name not in own], patches

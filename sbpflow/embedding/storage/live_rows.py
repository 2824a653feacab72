"""Tracks which rows of growing tables have keys, and defines how checkpoints represent keys.

During training, rows are assigned to keys and later freed. This module does not need numba; the
decisions are made in ``sbpflow.embedding.vocabulary``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.storage.selected_rows import NO_ROWS, SelectedRows
from sbpflow.embedding.storage.store import WEIGHTS, Array, RowStore
from sbpflow.errors import ConfigError

NO_TIME = -(2**63)  # stands for the event time of batches that have none


@dataclass(frozen=True, slots=True)
class Changes:
    """What a batch changed: rows assigned to new keys, the keys' addresses, and freed rows."""

    rows: Array
    addresses: Array
    freed: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The keys of a vocabulary, or of a range of its buckets, in the order of their addresses.

    ``lasts`` are the numbers of the batches that last used the keys. For each of the most recent
    batches, up to batch ``now``, ``clock`` contains the number of samples so far, and ``times`` the
    latest event time so far.
    """

    addresses: Array
    lasts: Array
    counts: Array
    pending_addresses: Array
    pending_lasts: Array
    pending_counts: Array
    now: int
    clock: Array
    times: Array


def check_numba(field: str) -> None:
    """Raise ConfigError unless numba is installed, which the vocabulary of a growing field
    needs.
    """
    if find_spec("numba") is None:
        raise ConfigError(
            f"field {field}: vocabulary: dynamic needs numba, which is not installed; install "
            "numba, or train with vocabulary: fitted"
        )


class LiveRows:
    """Tracks which of the rows [start, stop) have keys, and which keys, as of the last batch that
    was passed to ``apply``.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.addresses = np.zeros(stop - start, np.int64)
        self.is_live = np.zeros(stop - start, np.bool_)

    def apply(self, changes: Changes) -> tuple[Tensor, Tensor]:
        """Apply the changes of a batch; return the rows in this range that were assigned to new
        keys, and the keys' addresses.
        """
        mine = (changes.rows >= self.start) & (changes.rows < self.stop)
        rows, addresses = changes.rows[mine], changes.addresses[mine]
        freed = changes.freed[(changes.freed >= self.start) & (changes.freed < self.stop)]
        self.is_live[freed - self.start] = False
        self.is_live[rows - self.start] = True
        self.addresses[rows - self.start] = addresses
        return torch.from_numpy(rows), torch.from_numpy(addresses)

    def load(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Replace all keys; each of ``parts`` is (first row, addresses of the keys of consecutive
        rows).
        """
        self.is_live[:] = False
        for first, addresses in parts:
            part = slice(first - self.start, first - self.start + addresses.numel())
            self.is_live[part] = True
            self.addresses[part] = addresses.numpy()


class _TableRows(NamedTuple):
    """The rows of a table in a store: their ``numbers``, counted from ``base``, and their keys'
    ``addresses``.
    """

    base: int
    has_shared: bool
    numbers: Array
    addresses: Array

    @property
    def num_rows(self) -> int:
        return self.numbers.size + self.has_shared

    def in_store(self, numbers: Array) -> Array:
        """Return the numbers in the store of the shared row, if it is here, and of ``numbers``."""
        return np.concatenate([np.zeros(int(self.has_shared), np.int64), numbers]) + self.base


class TrainedRows(SelectedRows):
    """A snapshot of which rows of a store have keys; the rows are numbered table by table.

    Within a table, the shared row comes first, if this rank stores it, followed by the live rows in
    the order of their addresses. Sorting ten million rows takes a second or two, so the rows are
    sorted only on first use; in a save, the writer thread sorts them.
    """

    def __init__(self, store: RowStore, tables: Mapping[str, _TableRows]) -> None:
        super().__init__(store, sum(table.num_rows for table in tables.values()))
        self._tables = tables
        ends = accumulate((table.num_rows for table in tables.values()), initial=0)
        self.starts = dict(zip(tables, ends, strict=False))  # each table's first row number

    @classmethod
    def now(
        cls, store: RowStore, shards: Sequence[Shard], live: Sequence[LiveRows]
    ) -> "TrainedRows":
        """Return the rows that have keys now."""
        tables: dict[str, _TableRows] = {}
        for shard, rows in zip(shards, live, strict=True):
            inside = slice(shard.row_start - rows.start, shard.row_stop - rows.start)
            numbers = np.flatnonzero(rows.is_live[inside])
            addresses = rows.addresses[inside][numbers]
            has_shared = shard.row_start == 0
            tables[shard.table.name] = _TableRows(shard.base, has_shared, numbers, addresses)
        return cls(store, tables)

    def among(self, marks: Array) -> "TrainedRows":
        """Return the rows of this snapshot that are marked in ``marks`` (bool [store.num_rows])."""
        tables: dict[str, _TableRows] = {}
        for name, (base, has_shared, numbers, addresses) in self._tables.items():
            chosen = marks[base:][numbers]
            has_shared = has_shared and bool(marks[base])
            tables[name] = _TableRows(base, has_shared, numbers[chosen], addresses[chosen])
        return TrainedRows(self.store, tables)

    def count(self, table: str) -> int:
        """Return the number of rows of ``table`` in this snapshot."""
        return self._tables[table].num_rows

    def numbers_in(self, whole: "TrainedRows", table: str) -> Array:
        """Return the index of each row of a table among the rows of that table in ``whole``.

        ``whole`` must contain all of these rows.
        """
        own, other = self._tables[table], whole._tables[table]
        places = np.searchsorted(np.sort(other.addresses), np.sort(own.addresses))
        return np.concatenate([np.zeros(int(own.has_shared), np.int64), places + other.has_shared])

    def unsorted(self) -> Tensor:
        """Return the numbers that the rows of this snapshot have in the store, in any order."""
        parts = [table.in_store(table.numbers) for table in self._tables.values()]
        return torch.from_numpy(np.concatenate(parts))

    @cached_property
    def _sorted(self) -> Tensor:
        parts = [t.in_store(t.numbers[np.argsort(t.addresses)]) for t in self._tables.values()]
        return torch.from_numpy(np.concatenate(parts))

    @cached_property
    def _places(self) -> Tensor:
        places = torch.empty(self.store.num_rows, dtype=torch.int64)
        places[self._sorted] = torch.arange(self.num_rows)
        return places

    def numbers(self, rows: slice) -> slice | Tensor:
        return rows if rows == NO_ROWS else self._sorted[rows]

    def places(self, numbers: Tensor) -> Tensor:
        return self._places[numbers]


class KeyColumn:
    """Presents one array of a saved vocabulary as a store; the array is computed on the first
    read.
    """

    is_in_place = False

    def __init__(self, read: Callable[[], Array], dtype: torch.dtype) -> None:
        self._read, self._dtype = read, dtype

    @cached_property
    def _values(self) -> Tensor:
        return torch.from_numpy(self._read()).to(self._dtype)

    def read(self, rows: slice, into: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Read values as ``RowStore.read`` does; the only name is ``WEIGHTS``."""
        values = torch.empty(0, dtype=self._dtype) if rows == NO_ROWS else self._values[rows]
        if into is None:
            return {WEIGHTS: values}
        into[WEIGHTS].copy_(values)
        return into

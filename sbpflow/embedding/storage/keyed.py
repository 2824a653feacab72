"""Defines the stores of ``by_key`` tables, which assign rows to keys.

A key gets a row when the first training batch with the key is announced, before the batch is
trained. Saves and evaluations must see only the rows of trained batches. Rows of announced batches
come last, so that readers can skip them and a run that ends early can discard them.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.embedding.plan.numbering import NUMBERINGS, keys_of
from sbpflow.embedding.storage.base import RowListener
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import WEIGHTS, RowStore, StoreRequest
from sbpflow.errors import CheckpointError, ConfigError, DataError

KEYS = "keys"  # the name of the keys in a table's state
NO_ROWS = slice(0, 0)  # for reading names, shapes, and dtypes without triggering a sort


class RowMap(Protocol):
    """Maps addresses to rows, both int64 on CPU. Only the training thread may use the map."""

    def find(self, addresses: Tensor) -> Tensor:
        """Return the row [n] of each address, or -1 if it has none; addresses can repeat."""
        ...

    def add(self, addresses: Tensor, rows: Tensor) -> None:
        """Assign rows to new addresses, which must be unique."""

    def remove(self, addresses: Tensor) -> None:
        """Remove existing addresses."""


class KeyedStore:
    """A ``RowStore`` of one ``by_key`` table, with its rows in another store.

    ``row_map`` finds the row of a key. Batches are announced and looked up by address. All other
    operations use the row numbers, slots, and listeners of the inner store. A trained key never
    loses its row. If a batch has more new keys than there are free rows, the step of that batch
    raises DataError.
    """

    is_in_place = False
    starts_initial = True

    def __init__(self, request: StoreRequest, rows: RowStore, row_map: RowMap) -> None:
        (self._shard,) = request.shards
        self._name = f"table {self._shard.table.name}"
        if KEYS in request.optimizer.state:
            raise ConfigError(
                f"{self._name}: by_key: the optimizer {request.optimizer.name} has a state "
                f"{KEYS!r}, which checkpoints use for the keys; rename the state"
            )
        self._rows, self._map, self._initial = rows, row_map, request.initial
        self.kernel, self.num_rows, self.width = rows.kernel, rows.num_rows, rows.width
        self._addresses = torch.empty(self.num_rows, dtype=torch.int64)  # address of each row
        self.num_live = 0  # number of rows with keys; rows of trained batches come first
        self.num_trained = 0
        self._live_after: dict[int, int] = {}  # announced batch -> ``num_live`` after it
        self._admitted: set[int] = set()
        self._faults: dict[int, str] = {}  # announced batch -> error message

    @property
    def span(self) -> tuple[int, int]:
        """Return the first and last address of the keys that belong to this rank."""
        return self._shard.span

    @property
    def memory_bytes(self) -> int:
        return self._rows.memory_bytes + self._addresses.numel() * self._addresses.itemsize

    @property
    def listeners(self) -> list[RowListener]:
        return self._rows.listeners

    def announce(self, number: int, addresses: Tensor) -> Tensor:
        rows = self._map.find(addresses)
        new = torch.unique(addresses[rows < 0])
        if new.numel():
            self._add(number, new)
            rows = self._map.find(addresses).clamp(min=0)  # keys without a row fail in ``admit``
        self._live_after[number] = self.num_live
        self._rows.announce(number, rows)
        return rows

    def admit(self, number: int) -> Tensor | None:
        if number in self._faults:
            raise DataError(self._faults[number])
        self._admitted.add(number)
        return self._rows.admit(number)

    def release(self, number: int) -> None:
        self._rows.release(number)
        live = self._live_after.pop(number)
        self._faults.pop(number, None)
        if number in self._admitted:
            self._admitted.remove(number)
            self.num_trained = max(self.num_trained, live)
        if not self._live_after:
            self._forget(self.num_trained)

    def peek(self, lookup: Lookup) -> Tensor:
        """Look up rows without a lease; keys without a row read their initial values."""
        unique, inverse = torch.unique(lookup.addresses, return_inverse=True)
        rows = self._map.find(unique)
        known, unknown = (rows >= 0).nonzero().squeeze(1), (rows < 0).nonzero().squeeze(1)
        values = self._rows.read(rows[known])[WEIGHTS]
        block = values.new_empty(unique.numel(), self.width)
        block[known] = values
        block[unknown] = self._initial(unique[unknown])[WEIGHTS]
        again = Lookup(lookup.addresses, lookup.offsets, lookup.weights)
        return self.kernel.pool(block, again.place(inverse))

    def read(
        self, rows: slice | Tensor, into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        return self._rows.read(rows, into)

    def write(self, rows: slice | Tensor, values: Mapping[str, Tensor]) -> None:
        self._rows.write(rows, values)

    def trained(self) -> "TrainedRows":
        """Return a snapshot of the rows of all trained batches."""
        return TrainedRows(self._rows, self._addresses[: self.num_trained])

    def load(self, keys: Tensor) -> None:
        """Replace all keys; the new keys get rows 0, 1, ..., which the caller must then write."""
        if self._live_after:
            raise RuntimeError(f"{self._name}: cannot load keys while batches are in flight")
        if keys.numel() > self.num_rows:
            raise CheckpointError(
                f"{self._name}: rank {self._shard.rank} has {self.num_rows:,} rows for "
                f"{keys.numel():,} saved keys; use num_rows of {self._rows_for(keys.numel()):,} "
                "or more, or more ranks"
            )
        self._forget(0)
        self._take(NUMBERINGS[True].addresses(keys))
        self.num_trained = self.num_live

    def _add(self, number: int, new: Tensor) -> None:
        """Assign rows to new addresses, in ascending order."""
        room = self.num_rows - self.num_live
        if new.numel() > room:
            key = int(keys_of(new[room : room + 1]))
            self._faults[number] = (
                f"{self._name}: no row is free for key {key}: all {self.num_rows:,} rows of rank "
                f"{self._shard.rank} have keys; use num_rows of "
                f"{self._rows_for(self.num_live + new.numel()):,} or more"
            )
        first = self.num_live
        self._take(new[:room])
        self._rows.write(torch.arange(first, self.num_live), self._initial(new[:room]))

    def _take(self, addresses: Tensor) -> None:
        first, self.num_live = self.num_live, self.num_live + addresses.numel()
        self._addresses[first : self.num_live] = addresses
        self._map.add(addresses, torch.arange(first, self.num_live))

    def _forget(self, rows: int) -> None:
        """Remove all keys with row numbers ``rows`` and above."""
        if self.num_live > rows:
            self._map.remove(self._addresses[rows : self.num_live])
            self.num_live = self.num_trained = rows

    def _rows_for(self, count: int) -> int:
        """Return a ``num_rows`` that gives this rank room for ``count`` rows, with a margin."""
        return -(-count * self._shard.table.num_rows // self.num_rows) * 5 // 4


class SelectedRows:
    """A read-only selection of ``num_rows`` rows of ``store``, in an order of its own."""

    is_in_place = False

    def __init__(self, store: RowStore, num_rows: int) -> None:
        self.store, self.num_rows, self.width = store, num_rows, store.width

    def numbers(self, rows: slice) -> slice | Tensor:
        """Return the store's numbers of these rows."""
        raise NotImplementedError

    def places(self, numbers: Tensor) -> Tensor:
        """Return the inverse of ``numbers``."""
        raise NotImplementedError

    def read(self, rows: slice, into: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Read rows as ``RowStore.read`` does."""
        return self.store.read(self.numbers(rows), into)


class TrainedRows(SelectedRows):
    """A snapshot of the first rows of ``store``, numbered by ascending address.

    ``addresses`` [n] are the addresses of the store's rows from row 0 on. Sorting the addresses
    takes a second or two for ten million rows, so the first use sorts them; in a save, the writer
    thread does this.
    """

    def __init__(self, store: RowStore, addresses: Tensor) -> None:
        super().__init__(store, addresses.numel())
        self._addresses = addresses.clone()

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        return torch.sort(self._addresses)

    @cached_property
    def _places(self) -> Tensor:
        _, order = self._sorted
        return torch.empty_like(order).scatter_(0, order, torch.arange(self.num_rows))

    def numbers(self, rows: slice) -> slice | Tensor:
        return rows if rows == NO_ROWS else self._sorted[1][rows]

    def places(self, numbers: Tensor) -> Tensor:
        return self._places[numbers]

    def keys(self, rows: slice) -> Tensor:
        """Return the keys of these rows."""
        return self._addresses[rows] if rows == NO_ROWS else keys_of(self._sorted[0][rows])


class TrainedKeys:
    """Gives access to the keys of trained rows through the read interface of a store."""

    is_in_place = False

    def __init__(self, rows: TrainedRows) -> None:
        self._rows = rows

    def read(self, rows: slice, into: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Read keys as ``RowStore.read`` does; the only name is ``KEYS``."""
        keys = self._rows.keys(rows)
        if into is None:
            return {KEYS: keys}
        into[KEYS].copy_(keys)
        return into

"""Stores of tables with rows by key: which row of a rank a key has, and as of which batch.

A key gets a row when a training batch that names it is announced, before it is trained. What saves,
evaluations and a run that ends early see is of the batches trained: the rows of the others come
behind all rows of these, so that they can be left out, and forgotten.
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

KEYS = "keys"  # their name behind that of a table
NO_ROWS = slice(0, 0)  # read for names, shapes and dtypes, by a thread that must not sort


class RowMap(Protocol):
    """Rows by address, both int64 on the CPU. Used by the thread that trains alone."""

    def find(self, addresses: Tensor) -> Tensor:
        """[n]: the row of each, -1 for an address that has none; addresses may come repeatedly."""
        ...

    def add(self, addresses: Tensor, rows: Tensor) -> None:
        """Give rows to addresses that have none, each of which comes once."""
        ...

    def remove(self, addresses: Tensor) -> None:
        """Take the rows of addresses away that have one."""
        ...


class KeyedStore:
    """A ``RowStore`` of one keyed table: ``rows`` are in another store, ``row_map`` finds them.

    What is announced and looked up are addresses of keys; everything else goes by row, as in the
    store within, whose slots and listeners are this one's. Rows are never taken from a key that was
    trained. A batch with more new keys than there are rows fails in its own step, with DataError.
    """

    is_in_place = False

    def __init__(self, request: StoreRequest, rows: RowStore, row_map: RowMap) -> None:
        (self._shard,) = request.shards
        if KEYS in request.optimizer.state:
            raise ConfigError(
                f"table {self._shard.table.name}: has its rows by key, and its optimizer "
                f"{request.optimizer.name} a state {KEYS}, as checkpoints call the keys; give the "
                "state another name"
            )
        self._rows, self._map, self._initial = rows, row_map, request.initial
        self.kernel, self.num_rows, self.width = rows.kernel, rows.num_rows, rows.width
        self._addresses = torch.empty(self.num_rows, dtype=torch.int64)  # by row
        self.num_live = 0  # rows that keys have: of batches trained, then of announced ones
        self.num_trained = 0
        self._live_after: dict[int, int] = {}  # by announced batch
        self._admitted: set[int] = set()
        self._faults: dict[int, str] = {}

    @property
    def span(self) -> tuple[int, int]:
        """First and last address of the keys that this rank has rows for."""
        return self._shard.span

    @property
    def memory_bytes(self) -> int:
        return self._rows.memory_bytes + self._addresses.numel() * self._addresses.itemsize

    @property
    def listeners(self) -> list[RowListener]:
        return self._rows.listeners

    def announce(self, number: int, addresses: Tensor) -> Tensor:
        found = self._map.find(addresses)
        new = torch.unique(addresses[found < 0])
        if new.numel():
            self._add(number, new)
            found = self._map.find(addresses).clamp(min=0)  # without a row: fails in its step
        self._live_after[number] = self.num_live
        self._rows.announce(number, found)
        return found

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
        """A key without a row reads what it would start with."""
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
        """The rows of all batches trained, as they are numbered now."""
        return TrainedRows(self._rows, self._addresses[: self.num_trained])

    def load(self, keys: Tensor) -> None:
        """Forget all keys, and give these, in turn, the rows from 0 on, which are to be written."""
        if self._live_after:
            raise RuntimeError(f"table {self._shard.table.name}: keys are loaded amid batches")
        if keys.numel() > self.num_rows:
            raise CheckpointError(
                f"table {self._shard.table.name}: has room for {self.num_rows:,} rows on rank "
                f"{self._shard.rank}, where {keys.numel():,} of the saved keys belong; give it "
                f"num_rows of {self._rows_for(keys.numel()):,} or more, or more ranks"
            )
        self._forget(0)
        self._take(NUMBERINGS[True].addresses(keys))
        self.num_trained = self.num_live

    def _add(self, number: int, new: Tensor) -> None:
        """Rows for new addresses, in ascending order."""
        room = self.num_rows - self.num_live
        if new.numel() > room:
            key = int(keys_of(new[room : room + 1]))
            self._faults[number] = (
                f"table {self._shard.table.name}: no row is free for key {key}: all "
                f"{self.num_rows:,} rows of rank {self._shard.rank} have keys; give it num_rows of "
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
        """All keys behind the first ``rows``."""
        if self.num_live > rows:
            self._map.remove(self._addresses[rows : self.num_live])
            self.num_live = self.num_trained = rows

    def _rows_for(self, count: int) -> int:
        """``num_rows`` of a table of which this rank has room for ``count`` rows, and some more."""
        return -(-count * self._shard.table.num_rows // self.num_rows) * 5 // 4


class TrainedRows:
    """The first rows of ``store`` at one moment, numbered from 0 in the order of their addresses.

    ``addresses`` [n] are those of the store's rows from 0 on. They are sorted on first use, which
    takes a second or two for ten million: saves leave that to the thread that writes.
    """

    is_in_place = False

    def __init__(self, store: RowStore, addresses: Tensor) -> None:
        self.store, self.num_rows, self.width = store, addresses.numel(), store.width
        self._addresses = addresses.clone()

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        return torch.sort(self._addresses)

    @cached_property
    def _places(self) -> Tensor:
        _, order = self._sorted
        return torch.empty_like(order).scatter_(0, order, torch.arange(self.num_rows))

    def numbers(self, rows: slice) -> slice | Tensor:
        """What these rows are in the store."""
        return rows if rows == NO_ROWS else self._sorted[1][rows]

    def places(self, numbers: Tensor) -> Tensor:
        """The reverse of ``numbers``."""
        return self._places[numbers]

    def keys(self, rows: slice) -> Tensor:
        """The keys that have these rows."""
        return self._addresses[rows] if rows == NO_ROWS else keys_of(self._sorted[0][rows])

    def read(self, rows: slice, into: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """As ``RowStore.read``."""
        return self.store.read(self.numbers(rows), into)


class TrainedKeys:
    """The keys of trained rows, read as if they were rows of a store."""

    is_in_place = False

    def __init__(self, rows: TrainedRows) -> None:
        self._rows = rows

    def read(self, rows: slice, into: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """As ``RowStore.read``, under the name ``KEYS``."""
        found = {KEYS: self._rows.keys(rows)}
        if into is None:
            return found
        into[KEYS].copy_(found[KEYS])
        return into

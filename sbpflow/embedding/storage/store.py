"""Row stores: where the rows of a rank live, and which slot of a kernel's block a row is in.

A rank has a store for each stack: shards of equal width, whose rows are numbered from 0 one shard
after the other. ``DeviceStore`` has a slot for every row. A store of more rows than slots learns
from ``announce`` which rows the coming batches need, so that it can bring them before ``admit``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.storage.base import RowKernel, RowListener
from sbpflow.embedding.storage.lookup import Lookup

WEIGHTS = ""  # the key of the rows themselves, among the names of the optimizer's state


class RowStore(Protocol):
    """``num_rows`` rows with their optimizer state; a training batch leases those that it uses.

    A lease of batch n begins with ``announce(n, ..)``, is firm from ``admit(n)`` on, when each row
    has its slot, and ends with ``release(n)``. Every training batch is announced once, in the order
    of n, at any distance before it is admitted; several may be announced, and admitted, at a time:
    they may name the same rows. ``listeners`` are those of the kernel.

    ``read`` may be called by another thread at any time, and must give the newest values: where a
    row moves between slots and other memory, ``read`` must see it in one of them, so a store that
    moves rows locks both; listeners call ``read``, with locks of their own held. A row that an
    ``update`` is changing may come half changed; whoever needs it whole listens, as the undo log of
    checkpoints does.
    """

    kernel: RowKernel
    num_rows: int

    @property
    def width(self) -> int:
        """Columns of a row."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Of rows and optimizer state, in all memories of this rank."""
        ...

    @property
    def is_in_place(self) -> bool:
        """Whether ``read`` of a slice gives views, so that writing to them changes the rows."""
        ...

    @property
    def listeners(self) -> list[RowListener]: ...

    def announce(self, number: int, addresses: Tensor) -> Tensor | None:
        """Training batch ``number`` will look up ``addresses`` [n], row numbers with repetitions;
        the kernel's ``absent`` among them is not a row.

        Of a table with rows by key (``keyed.py``) they are addresses of keys, and the row numbers
        are returned, which stand for them from here on.
        """
        ...

    def admit(self, number: int) -> Tensor | None:
        """[n], in the dtype of the addresses: the slot of each address of an announced batch, which
        is final until its release. ``None``: slots are rows.
        """
        ...

    def release(self, number: int) -> None:
        """After the update of an announced batch, or instead of it."""
        ...

    def peek(self, lookup: Lookup) -> Tensor:
        """[bags, width]: a lookup for a batch that is not trained, which leases nothing."""
        ...

    def read(
        self, rows: slice | Tensor, into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """These rows, and the optimizer's state of them, by name: ``WEIGHTS`` and names of state.

        A slice may give views. With ``into``, the names that it has are copied there instead.
        """
        ...

    def write(self, rows: slice | Tensor, values: Mapping[str, Tensor]) -> None:
        """Set what ``values`` names of these rows. No row of them may be in an update meanwhile."""
        ...


class DeviceStore:
    """All rows in the kernel's block, row r in slot r."""

    is_in_place = True

    def __init__(self, kernel: RowKernel) -> None:
        self.kernel = kernel
        self.num_rows, self.width = kernel.weights.shape

    @property
    def memory_bytes(self) -> int:
        return sum(one.numel() * one.itemsize for one in self._tensors().values())

    @property
    def listeners(self) -> list[RowListener]:
        return self.kernel.listeners

    def announce(self, number: int, addresses: Tensor) -> None:
        """Nothing to do: every row has its slot."""

    def admit(self, number: int) -> None:
        """Slots are rows."""

    def release(self, number: int) -> None:
        """Nothing to do: every row keeps its slot."""

    def peek(self, lookup: Lookup) -> Tensor:
        return self.kernel.lookup(lookup)

    def read(
        self, rows: slice | Tensor, into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        tensors = self._tensors()
        if isinstance(rows, slice):
            found = {name: tensor[rows] for name, tensor in tensors.items()}
            if into is None:
                return found
            sources = [found[name] for name in into]
            # One call: Python's lock changes hands for each.
            torch._foreach_copy_(list(into.values()), sources)  # pyright: ignore[reportPrivateUsage]
            return into
        if into is None:
            return {name: _rows_of(tensor, rows) for name, tensor in tensors.items()}
        for name, target in into.items():
            if tensors[name].is_cuda:
                target.copy_(_rows_of(tensors[name], rows))
            else:
                torch.index_select(tensors[name], 0, rows, out=target)
        return into

    def write(self, rows: slice | Tensor, values: Mapping[str, Tensor]) -> None:
        tensors = self._tensors()
        for name, given in values.items():
            target = tensors[name]
            if isinstance(rows, slice):
                target[rows].copy_(given)
            else:
                at = rows.to(target.device, torch.int64)
                target.index_copy_(0, at, given.to(target.device, target.dtype))

    def _tensors(self) -> dict[str, Tensor]:
        return {WEIGHTS: self.kernel.weights, **self.kernel.state}


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_select(0, rows.to(tensor.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """What a store is made for: the rows of a stack that a rank holds, as ``shards`` number them.

    ``make_kernel`` allocates a kernel's block of so many slots, which holds the optimizer's initial
    state in every slot; a store has one. ``initial`` gives the values that rows [n] start with, and
    their state, by name: a row that was never written need not be stored. Rows by key are named by
    address there.
    """

    shards: tuple[Shard, ...]
    num_rows: int
    width: int
    optimizer: SparseOptimizer
    make_kernel: Callable[[int], RowKernel]
    initial: Callable[[Tensor], Mapping[str, Tensor]]


StoreFactory = Callable[[StoreRequest], RowStore]


def device_store(request: StoreRequest) -> DeviceStore:
    """What a run has by default."""
    return DeviceStore(request.make_kernel(request.num_rows))


def peek_through(store: RowStore, lookup: Lookup) -> Tensor:
    """``RowStore.peek`` for any store, from a ``read`` of the unique rows."""
    kernel = store.kernel
    found = kernel.make_lookup(lookup.addresses, lookup.offsets, lookup.weights)
    rows, none = found.rows(), slice(0, 0)
    like = store.read(none)[WEIGHTS]
    block = like.new_zeros(rows.numel(), *like.shape[1:])
    stored = rows[rows < store.num_rows]  # an absent one is the last, and stays zeros
    store.read(stored, {WEIGHTS: block[: stored.numel()]})
    return kernel.pool(block, found.place(found.inverse()))

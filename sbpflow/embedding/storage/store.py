"""Row stores, which decide where the rows of a rank live, and in which slot of a kernel's block.

A rank has one store per stack. Its rows are those of the stack's shards on this rank, numbered
consecutively from 0. ``DeviceStore`` has a slot for every row. A store with fewer slots than rows
learns from ``announce`` which rows the next batches need, and can load them before ``admit``.
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

WEIGHTS = ""  # the name of the rows themselves, next to the names of optimizer state


class RowStore(Protocol):
    """``num_rows`` rows with their optimizer state; training batches lease the rows they use.

    The lease of batch n begins with ``announce(n, ..)`` and ends with ``release(n)``; from
    ``admit(n)`` on, each row has a fixed slot. Every training batch is announced once, in order and
    any number of batches before it is admitted. Several batches can be announced or admitted at a
    time, and can share rows. ``listeners`` are those of the kernel.

    Other threads can call ``read`` at any time, and it must return the newest values. A store that
    moves rows between slots and other memory must therefore lock both; listeners call ``read``
    while holding locks of their own. A row can be read in the middle of its ``update``; code that
    needs consistent rows must listen, like the undo log of checkpoints.
    """

    kernel: RowKernel
    num_rows: int

    @property
    def width(self) -> int:
        """Columns of a row."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Size of the rows and their optimizer state in all memories of this rank."""
        ...

    @property
    def is_in_place(self) -> bool:
        """True if ``read`` of a slice returns views, so that writing to them changes the rows."""
        ...

    @property
    def starts_initial(self) -> bool:
        """True if rows that were never written read as their initial values."""
        ...

    @property
    def listeners(self) -> list[RowListener]: ...

    def announce(self, number: int, addresses: Tensor) -> Tensor | None:
        """Training batch ``number`` will look up ``addresses`` [n], with duplicates.

        The kernel's ``absent`` address can be among them. For a ``by_key`` table these are
        addresses of keys; returns the row numbers that replace them from then on.
        """
        ...

    def admit(self, number: int) -> Tensor | None:
        """[n]: the slot of each address of an announced batch, fixed until its release.

        In the dtype of the addresses; ``None`` if slots equal rows.
        """
        ...

    def release(self, number: int) -> None:
        """End the lease of an announced batch, after its update or without one."""

    def peek(self, lookup: Lookup) -> Tensor:
        """[bags, width]: a lookup for a batch that is not trained, without a lease."""
        ...

    def read(
        self, rows: slice | Tensor, into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """Rows and their optimizer state by name: ``WEIGHTS`` and the names of state.

        A slice can return views. With ``into``, only its names are read, and copied into it.
        """
        ...

    def write(self, rows: slice | Tensor, values: Mapping[str, Tensor]) -> None:
        """Set ``values`` of these rows by name. The rows must not be in an update meanwhile."""


class DeviceStore:
    """All rows in the kernel's block, with row r in slot r."""

    is_in_place = True
    starts_initial = False

    def __init__(self, kernel: RowKernel) -> None:
        self.kernel = kernel
        self.num_rows, self.width = kernel.weights.shape

    @property
    def memory_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self._tensors().values())

    @property
    def listeners(self) -> list[RowListener]:
        return self.kernel.listeners

    def announce(self, number: int, addresses: Tensor) -> None:
        """Do nothing: every row has a slot."""

    def admit(self, number: int) -> None:
        """Slots equal rows."""

    def release(self, number: int) -> None:
        """Do nothing: every row keeps its slot."""

    def peek(self, lookup: Lookup) -> Tensor:
        return self.kernel.lookup(lookup)

    def read(
        self, rows: slice | Tensor, into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        tensors = self._tensors()
        if isinstance(rows, slice):
            views = {name: tensor[rows] for name, tensor in tensors.items()}
            if into is None:
                return views
            sources = [views[name] for name in into]
            # One call for all tensors, because each call releases and reacquires Python's lock.
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
        for name, new in values.items():
            target = tensors[name]
            if isinstance(rows, slice):
                target[rows].copy_(new)
            else:
                indices = rows.to(target.device, torch.int64)
                target.index_copy_(0, indices, new.to(target.device, target.dtype))

    def _tensors(self) -> dict[str, Tensor]:
        return {WEIGHTS: self.kernel.weights, **self.kernel.state}


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_select(0, rows.to(tensor.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """The arguments for creating a store: the rows of a stack on this rank, in order of ``shards``.

    ``make_kernel`` allocates a kernel's block with a number of slots, all in the optimizer's
    initial state; a store calls it once. ``initial`` returns the initial values and state of rows
    [n] by name, so that a store need not store rows that were never written; in a ``by_key`` table
    its argument is addresses.
    """

    shards: tuple[Shard, ...]
    num_rows: int
    width: int
    optimizer: SparseOptimizer
    make_kernel: Callable[[int], RowKernel]
    initial: Callable[[Tensor], Mapping[str, Tensor]]


StoreFactory = Callable[[StoreRequest], RowStore]


def device_store(request: StoreRequest) -> DeviceStore:
    """The default store factory."""
    return DeviceStore(request.make_kernel(request.num_rows))

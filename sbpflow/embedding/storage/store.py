"""Row stores decide where the rows of a rank are kept, and which slot of a kernel's block each row
uses.

A rank has one store per stack, which numbers the rows of the stack's shards on that rank
consecutively from 0. ``DeviceStore`` has a slot for every row. A store with fewer slots than rows
learns from ``announce`` which rows the next batches need, and can load them before ``admit``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.runtime.compute.devices import upload

if TYPE_CHECKING:
    from sbpflow.embedding.storage.initial import RowInitializer

Array = np.ndarray[Any, Any]
WEIGHTS = ""  # the name of the rows themselves in dicts of rows and optimizer state


class RowStore(Protocol):
    """Stores ``num_rows`` rows with optimizer state; training batches lease the rows they use.

    The lease of batch n begins with ``announce(n, ..)`` and ends with ``release(n)``. From
    ``admit(n)`` on, the slots of the batch's rows are fixed. Every training batch is announced
    exactly once and in order, possibly several batches before it is admitted. Several batches can
    be announced or admitted at the same time, and they can share rows.

    Other threads can call ``read`` at any time, and ``read`` must return the newest values. A store
    must therefore hold a lock while it moves rows between slots and other memory. The kernel's
    listeners call ``read`` while they hold locks of their own. ``read`` may see a row in the middle
    of an ``update``; code that needs consistent rows must be a listener, as the undo log of
    checkpoints is.
    """

    kernel: RowKernel
    num_rows: int

    @property
    def width(self) -> int:
        """Return the number of columns of a row."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Return the size in bytes of the rows and their optimizer state on this rank, in all kinds
        of memory.
        """
        ...

    @property
    def is_in_place(self) -> bool:
        """Return True if ``read`` of a slice returns views, through which the rows can be
        changed.
        """
        ...

    @property
    def starts_initial(self) -> bool:
        """Return True if reading a row that was never written returns its initial values."""
        ...

    def announce(self, number: int, addresses: Tensor) -> None:
        """Announce that training batch ``number`` will look up ``addresses`` [n].

        The addresses may contain duplicates, and the kernel's ``absent`` address.
        """

    def admit(self, number: int) -> Tensor | None:
        """Return the slots [n] for the addresses of an announced batch; they stay fixed until its
        release.

        Slots have the dtype of the addresses. ``None`` means that the slot of each row is its
        number.
        """
        ...

    def release(self, number: int) -> None:
        """End the lease of an announced batch, whether or not it led to an update."""

    def peek(self, lookup: Lookup) -> Tensor:
        """Look up the rows of an evaluation batch without a lease; return [bags, width]."""
        ...

    def read(
        self, rows: slice | Tensor, into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """Return rows under the name ``WEIGHTS``, and each optimizer state under its own name.

        For a slice, the results may be views. If ``into`` is given, read only its names, and copy
        the values into its tensors.
        """
        ...

    def write(self, rows: slice | Tensor, values: Mapping[str, Tensor]) -> None:
        """Set these rows to ``values``, which are keyed by name. No update may touch the rows at
        the same time.
        """


class DeviceStore:
    """Keeps all rows in the kernel's block, with row r in slot r."""

    is_in_place = True
    starts_initial = False

    def __init__(self, kernel: RowKernel) -> None:
        self.kernel = kernel
        self.num_rows, self.width = kernel.weights.shape

    @property
    def memory_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self._tensors().values())

    def announce(self, number: int, addresses: Tensor) -> None:
        """Do nothing, because every row has a slot."""

    def admit(self, number: int) -> None:
        """Return ``None``, because the slot of each row is its number."""

    def release(self, number: int) -> None:
        """Do nothing, because every row keeps its slot."""

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
            # Copy all tensors in a single call, because each call releases and reacquires the GIL.
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
                indices = upload(rows, target.device).to(torch.int64)
                target.index_copy_(0, indices, upload(new, target.device).to(target.dtype))

    def _tensors(self) -> dict[str, Tensor]:
        return {WEIGHTS: self.kernel.weights, **self.kernel.state}


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_select(0, rows.to(tensor.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """The arguments for creating a store for the rows of a stack on this rank; rows are numbered in
    the order of ``shards``.

    ``make_kernel`` allocates a kernel's block with the given number of slots, all in the
    optimizer's initial state; a store calls ``make_kernel`` exactly once. ``initial`` computes
    initial values, so that a store need not keep rows that were never written.
    """

    shards: tuple[Shard, ...]
    num_rows: int
    width: int
    optimizer: SparseOptimizer
    make_kernel: Callable[[int], RowKernel]
    initial: "RowInitializer"


StoreFactory = Callable[[StoreRequest], RowStore]


def device_store(request: StoreRequest) -> DeviceStore:
    """Create a ``DeviceStore``; this is the default store factory."""
    return DeviceStore(request.make_kernel(request.num_rows))

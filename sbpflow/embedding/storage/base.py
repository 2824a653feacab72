"""Row kernels, each of which allocates, reads, and updates a block of slots.

The row store (``store.py``) decides which row is in which slot. Reading (``lookup``) and writing
(``update``) are separate, so an update need not happen in the backward pass. There are four kernels
with equal results: plain torch, FBGEMM's table-batched embedding (TBE), CPU loops compiled by
numba, and Triton for GPUs.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.embedding.storage.lookup import Lookup

RowListener = Callable[[Tensor], None]  # receives row numbers, possibly with duplicates


class RowKernel(Protocol):
    """A block [slots, width] of rows with their optimizer state.

    A ``Lookup`` has the row numbers, which determine the sorting order and the rounding noise, and
    the slots of these rows in the block. ``listeners`` are called with the row numbers right before
    an ``update`` changes the rows; other threads may remove a listener at any time.
    """

    listeners: list[RowListener]

    @property
    def name(self) -> str:
        """The name of the kernel."""
        ...

    @property
    def weights(self) -> Tensor:
        """[slots, width]; writes are visible to the next lookup."""
        ...

    @property
    def state(self) -> dict[str, Tensor]:
        """Optimizer state by name, [slots] or [slots, width], writable like ``weights``."""
        ...

    @property
    def absent(self) -> int | None:
        """The address of a row that is stored elsewhere: its slot, behind all others, reads as
        zeros and is never trained. ``None`` if such addresses must be left out of lookups.
        """
        ...

    def sort_ahead(self, lookup: Lookup) -> None:
        """Sort the lookup for a later ``update``, if this does not make the host wait."""

    def lookup(self, lookup: Lookup, lr: float | None = None) -> Tensor:
        """[bags, width]: the weighted sum of each bag's rows, zeros if empty; no autograd.

        ``lr`` is the learning rate of an ``update`` that will follow for this lookup.
        """
        ...

    def pool(self, block: Tensor, lookup: Lookup) -> Tensor:
        """Like ``lookup`` without an update, for rows in ``block`` [.., width].

        The slots of ``lookup`` are positions in ``block``, whose dtype is that of ``weights``.
        """
        ...

    def row_gradients(self, lookup: Lookup, grads: Tensor) -> tuple[Tensor, Tensor]:
        """(unique rows, the bags' ``grads`` summed per row [unique, width]).

        If the kernel has an ``absent`` address, both have the length of the batch, and the last row
        is repeated.
        """
        ...

    def update(self, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        """Take one optimizer step on the rows of ``lookup`` with the gradients [bags, width].

        Duplicates are summed first, so each row takes one step. ``step`` counts from 1 over the
        job.
        """


def notify(listeners: Sequence[RowListener], rows: Tensor) -> None:
    """Call all current listeners."""
    for listener in tuple(listeners):
        listener(rows)


def sum_of_squares(kernel: RowKernel, lookup: Lookup, grads: Tensor) -> Tensor:
    """The sum of squared gradients of the rows stored here: 0-d float64.

    Duplicates of a row are summed before squaring, as in an update.
    """
    rows, sums = kernel.row_gradients(lookup, grads)
    squares = sums.to(torch.float64).square().sum(1)
    if kernel.absent is None or rows.numel() == 0:
        return squares.sum()
    is_first = torch.arange(rows.numel(), device=rows.device) <= lookup.runs().number[-1]
    return torch.where(is_first & (rows != kernel.absent), squares, 0.0).sum()

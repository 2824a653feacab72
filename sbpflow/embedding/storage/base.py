"""Row kernels: each allocates a block of slots with its optimizer state, reads it and updates it.

Which row is in which slot is up to the row store (``store.py``). Reading (``lookup``) and writing
(``update``) are apart, so an update need not happen inside the backward. Four kernels, equal
results: plain torch, FBGEMM's table-batched embedding (TBE), loops that numba compiles for the CPU,
and Triton for GPUs.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.embedding.storage.lookup import Lookup

RowListener = Callable[[Tensor], None]  # of row numbers, which may come several times


class RowKernel(Protocol):
    """A block [slots, width] of rows with their optimizer state.

    A ``Lookup`` has the row numbers, by which rows are sorted and their noise is drawn, and the
    slots, where the block has them. ``listeners`` are called with the rows right before each
    ``update`` changes them; another thread may take one away.
    """

    listeners: list[RowListener]

    @property
    def name(self) -> str:
        """Which of the kernels this is."""
        ...

    @property
    def weights(self) -> Tensor:
        """[slots, width]; writing to it changes what the next lookup reads."""
        ...

    @property
    def state(self) -> dict[str, Tensor]:
        """Optimizer state by name, [slots] or [slots, width], writable like ``weights``."""
        ...

    @property
    def absent(self) -> int | None:
        """An address that reads as zeros and is never stored, for rows that are elsewhere; its slot
        is behind all others. ``None`` if such addresses must be left out.
        """
        ...

    def make_lookup(
        self, addresses: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Lookup:
        """A lookup to these rows that deduplicates in this kernel's way."""
        ...

    def sort_ahead(self, lookup: Lookup) -> None:
        """Sort what an ``update`` of this lookup will want sorted, if no host waits for that."""
        ...

    def lookup(self, lookup: Lookup, lr: float | None = None) -> Tensor:
        """[bags, width]: each bag's weighted sum of rows, zeros for an empty bag; no autograd.

        ``lr`` announces an ``update`` of the same lookup, at that learning rate.
        """
        ...

    def pool(self, block: Tensor, lookup: Lookup) -> Tensor:
        """As ``lookup`` without an update, of rows that are not the kernel's: the slots of
        ``lookup`` are places in ``block`` [.., width], which has the dtype of ``weights``.
        """
        ...

    def row_gradients(self, lookup: Lookup, grads: Tensor) -> tuple[Tensor, Tensor]:
        """(unique rows, the bags' ``grads`` summed per row [unique, width]).

        Where addresses may be ``absent`` the two are of the batch's length, and the last row comes
        again and again.
        """
        ...

    def update(self, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        """One optimizer step on the rows of ``lookup`` from the gradients [bags, width].

        Duplicates are summed before the rule is applied, so a row takes one step. ``step`` is the
        job's, counted from 1.
        """
        ...


def notify(listeners: Sequence[RowListener], rows: Tensor) -> None:
    """Call each of the listeners that there are now."""
    for listener in tuple(listeners):
        listener(rows)


def sum_of_squares(kernel: RowKernel, lookup: Lookup, grads: Tensor) -> Tensor:
    """Over the rows stored here, of the gradients that an update with these would sum: 0-d float64.

    Each row's columns first, so that duplicates count as the one gradient that they make.
    """
    rows, sums = kernel.row_gradients(lookup, grads)
    squares = sums.to(torch.float64).square().sum(1)
    if kernel.absent is None or rows.numel() == 0:
        return squares.sum()
    first_time = torch.arange(rows.numel(), device=rows.device) <= lookup.runs().number[-1]
    return torch.where(first_time & (rows != kernel.absent), squares, 0.0).sum()

"""Where the rows of a rank's shards live, and the kernels that look them up and update them.

A storage holds one [rows, width] block: shards of equal width stacked, addressed by local row
number. Reading (``lookup``) and writing (``update``) are apart, so an update need not happen inside
the backward. Three kernels, equal results: plain torch, FBGEMM's table-batched embedding (TBE), and
loops that numba compiles for the CPU.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.embedding.storage.access import Access

BeforeUpdate = Callable[[Tensor], None]  # of addresses that change


class Storage(Protocol):
    """Rows of one rank's shards; a host tier fetches in ``prefetch``, may evict in ``release``.

    Every address that is looked up or updated was prefetched, and each prefetch is released once.
    ``before_update``, where it is set, is told of rows right before each ``update`` changes them.
    """

    before_update: BeforeUpdate | None

    @property
    def kernel(self) -> str:
        """Which of the kernels this is."""
        ...

    @property
    def weights(self) -> Tensor:
        """[rows, width]; writing to it changes what the next lookup reads."""
        ...

    @property
    def state(self) -> dict[str, Tensor]:
        """Optimizer state by name, [rows] or [rows, width], writable like ``weights``."""
        ...

    @property
    def absent(self) -> int | None:
        """An address that reads as zeros and is never stored, for rows that are elsewhere; ``None``
        if such must be left out.
        """
        ...

    def prefetch(self, addresses: Tensor) -> None:
        """Rows that will be looked up soon."""
        ...

    def access(
        self, addresses: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Access:
        """An access to these rows that deduplicates in this kernel's way."""
        ...

    def sort_ahead(self, access: Access) -> None:
        """Sort what an ``update`` of this access will want sorted, if no host waits for that."""
        ...

    def lookup(self, access: Access, lr: float | None = None) -> Tensor:
        """[bags, width]: each bag's weighted sum of rows, zeros for an empty bag; no autograd.

        ``lr`` announces an ``update`` of the same access, at that learning rate.
        """
        ...

    def row_gradients(self, access: Access, grads: Tensor) -> tuple[Tensor, Tensor]:
        """(unique rows, the bags' ``grads`` summed per row [unique, width]).

        Where addresses may be ``absent`` the two are of the batch's length, and the last row comes
        again and again.
        """
        ...

    def update(self, access: Access, grads: Tensor, lr: float, step: int) -> None:
        """One optimizer step on the rows of ``access`` from the gradients [bags, width].

        Duplicates are summed before the rule is applied, so a row takes one step. ``step`` is the
        job's, counted from 1.
        """
        ...

    def release(self, addresses: Tensor) -> None:
        """Rows that are not needed until the next prefetch."""
        ...


def sum_of_squares(storage: Storage, access: Access, grads: Tensor) -> Tensor:
    """Over the rows stored here, of the gradients that an update with these would sum: 0-d float64.

    Each row's columns first, so that duplicates count as the one gradient that they make.
    """
    rows, sums = storage.row_gradients(access, grads)
    squares = sums.to(torch.float64).square().sum(1)
    if storage.absent is None or rows.numel() == 0:
        return squares.sum()
    first_time = torch.arange(rows.numel(), device=rows.device) <= access.runs().number[-1]
    return torch.where(first_time & (rows != storage.absent), squares, 0.0).sum()

"""Where the rows of a rank's shards live, and the kernels that look them up and update them.

A storage holds one [rows, width] block: shards of equal width stacked, addressed by local row
number. Reading (``lookup``) and writing (``update``) are apart, so an update need not happen inside
the backward. Three kernels, equal results: plain torch, FBGEMM's table-batched embedding (TBE), and
loops that numba compiles for the CPU.
"""

from typing import Protocol

from torch import Tensor

from sbpflow.embedding.storage.access import Access


class Storage(Protocol):
    """Rows of one rank's shards; a host tier fetches in ``prefetch``, may evict in ``release``.

    Every address that is looked up or updated was prefetched, and each prefetch is released once.
    """

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

    def lookup(self, access: Access, lr: float | None = None) -> Tensor:
        """[bags, width]: each bag's weighted sum of rows, zeros for an empty bag; no autograd.

        ``lr`` announces an ``update`` of the same access, at that learning rate.
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

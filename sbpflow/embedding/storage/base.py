"""Row kernels allocate, read, and update a block of slots.

The row store (``store.py``) assigns rows to slots. Reading (``lookup``) and writing (``update``)
are separate, so an update need not be part of the backward pass. The results of all kernels
(``rules.kernels``) are equal up to rounding.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.embedding.storage.lookup import Lookup

RowListener = Callable[[Tensor], None]  # receives row numbers, possibly with duplicates


class RowKernel(Protocol):
    """A block [slots, width] of rows with their optimizer state.

    A ``Lookup`` contains row numbers, which determine the sorting order and the rounding noise, and
    the slots of these rows in the block. Each of the ``listeners`` is called with the row numbers
    right before an ``update`` changes the rows. Other threads may remove a listener at any time.
    """

    listeners: list[RowListener]

    @property
    def name(self) -> str:
        """Return the name of the kernel."""
        ...

    @property
    def weights(self) -> Tensor:
        """Return the rows [slots, width]; writes to them are visible to the next lookup."""
        ...

    @property
    def state(self) -> dict[str, Tensor]:
        """Return optimizer state by name, [slots] or [slots, width]; writes change the state."""
        ...

    @property
    def absent(self) -> int | None:
        """Return the address that stands for rows stored elsewhere, or ``None`` if there is none.

        The slot of this address comes after all others, reads as zeros, and is never updated.
        Without such an address, lookups must leave out rows that are stored elsewhere.
        """
        ...

    def sort_ahead(self, lookup: Lookup) -> None:
        """Sort the lookup for a later ``update``, unless sorting would make the host wait."""

    def lookup(self, lookup: Lookup, lr: float | None = None) -> Tensor:
        """Return the weighted sum of the rows in each bag ([bags, width]), detached.

        Empty bags give zeros. If an ``update`` will follow this lookup, ``lr`` is the learning rate
        of that update.
        """
        ...

    def pool(self, block: Tensor, lookup: Lookup) -> Tensor:
        """Do the same as ``lookup``, but with rows of ``block`` ([.., width]), which are not
        updated.

        The slots of ``lookup`` are positions in ``block``, which has the dtype of ``weights``.
        """
        ...

    def row_gradients(self, lookup: Lookup, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unique rows and, for each row, the sum of its bags' ``grads`` ([unique,
        width]).

        If the kernel has an ``absent`` address, both results are padded to the number of addresses
        by repeating the last row.
        """
        ...

    def update(self, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        """Take one optimizer step on the rows of ``lookup`` with gradients ``grads`` [bags, width].

        Gradients of duplicates are summed first, so each row takes a single step. ``step`` is the
        step number within the job, starting at 1.
        """


def notify(listeners: Sequence[RowListener], rows: Tensor) -> None:
    """Call all current listeners."""
    for listener in tuple(listeners):
        listener(rows)


def sum_of_squares(
    kernel: RowKernel, lookup: Lookup, grads: Tensor, *, in_order: bool = False
) -> Tensor:
    """Return the sum of squared gradients over the rows stored here (0-d float64).

    Gradients of duplicate rows are summed before squaring, as in an update. With ``in_order``, the
    result does not depend on the row numbers.
    """
    rows, sums = kernel.row_gradients(lookup, grads)
    squares = sums.to(torch.float64).square().sum(1)
    if kernel.absent is None or rows.numel() == 0:
        return (torch.sort(squares).values if in_order else squares).sum()
    is_first = torch.arange(rows.numel(), device=rows.device) <= lookup.runs().number[-1]
    return torch.where(is_first & (rows != kernel.absent), squares, 0.0).sum()

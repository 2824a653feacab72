"""Finds the rows and gradients of a batch that can be sent during another step.

A row is early if no batch with a pending update uses it: its value cannot change before the lookup,
so the row is sent one batch ahead. A gradient is late if the next batch does not use its row: the
gradient is sent and applied during the next step. Only the rank that stores a row knows which
batches use the row, so that rank first sends one bit per requested row (``flags``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sbpflow.boxing.executor import Pending
from sbpflow.embedding.storage.lookup import Lookup


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Divides rows [n], which form one block per rank, into chosen rows and others.

    ``chosen`` and ``others`` (int64) are the positions of these rows; ``num_chosen`` and
    ``num_others`` are the numbers of these rows in each block.
    """

    chosen: Tensor
    others: Tensor
    num_chosen: list[int]
    num_others: list[int]

    @staticmethod
    def of(flags: Tensor, sizes: Sequence[int]) -> "RowSplit":
        """Return the split that ``flags`` (bool [n]) define for blocks of ``sizes`` rows."""
        num_chosen = [int(block.sum()) for block in flags.split(list(sizes))]
        return RowSplit(
            flags.nonzero().squeeze(1),
            flags.logical_not().nonzero().squeeze(1),
            num_chosen,
            [size - chosen for size, chosen in zip(sizes, num_chosen, strict=True)],
        )

    def join(self, chosen: Tensor, others: Tensor, dtype: torch.dtype) -> Tensor:
        """Return all rows [n, width], in the order of the blocks."""
        size = self.chosen.numel() + self.others.numel()
        rows = torch.empty(size, chosen.shape[1], dtype=dtype)
        rows.index_copy_(0, self.chosen, chosen.to(dtype))
        return rows.index_copy_(0, self.others, others.to(dtype))


@dataclass(slots=True)
class EarlyInFlight:
    """The early rows of a batch.

    ``owned`` splits the rows that other ranks request from this rank, and ``wanted`` the rows that
    this rank requests. The other fields are transfers in flight.
    """

    owned: RowSplit
    flags: Pending | None
    wanted: RowSplit | None = None
    vectors: Pending | None = None

    def wait(self) -> None:
        """Wait for the transfers of a batch that will not be looked up."""
        for pending in (self.flags, self.vectors):
            if pending is not None:
                pending.wait()


@dataclass(slots=True)
class LateInFlight:
    """The late gradients of a batch.

    ``owned`` splits the rows that other ranks request from this rank, and ``wanted`` the rows that
    this rank requests. ``sums`` are the gradients that this rank has yet to send. When the other
    gradients are applied, ``step`` is set to the number of that update, and ``lookup`` is set to
    the late rows on this rank. ``flags`` and ``gradients`` are transfers in flight.
    """

    owned: RowSplit
    flags: Pending | None
    wanted: RowSplit | None = None
    sums: Tensor | None = None
    step: int = 0
    lookup: Lookup | None = None
    gradients: Pending | None = None


class UsedRows:
    """Finds the rows of a batch that other batches do not use. Keeps one byte per row of a
    store.
    """

    def __init__(self, num_rows: int) -> None:
        self._used = torch.zeros(num_rows, dtype=torch.bool)

    def unused(self, addresses: Tensor, others: Iterable[Tensor]) -> Tensor:
        """Return which of ``addresses`` [n] are not in ``others``, as bool [n]."""
        indices = [other.to(torch.int64) for other in others]
        for index in indices:
            self._used.index_fill_(0, index, True)
        unused = self._used.index_select(0, addresses).logical_not_()
        for index in indices:
            self._used.index_fill_(0, index, False)
        return unused


def flag_bytes(sizes: Sequence[int]) -> list[int]:
    """Return the size in bytes of the packed flags of each block."""
    return [-(-size // 8) for size in sizes]


def pack(flags: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pack ``flags`` (bool [n]) into uint8, 8 per byte; every block starts a new byte."""
    blocks = [np.packbits(block.numpy()) for block in flags.split(list(sizes))]
    return torch.from_numpy(np.concatenate(blocks))


def unpack(packed: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the flags (bool [n]) that ``pack`` packed."""
    parts = packed.split(flag_bytes(sizes))
    blocks = [
        np.unpackbits(part.numpy(), count=size) for part, size in zip(parts, sizes, strict=True)
    ]
    return torch.from_numpy(np.concatenate(blocks)).view(torch.bool)


def part_of(lookup: Lookup, positions: Tensor) -> Lookup:
    """Return a lookup of the rows at ``positions``, without bags."""
    placed = lookup.placed
    rows = Lookup(lookup.addresses.index_select(0, positions))
    return rows.place(None if placed is None else placed.index_select(0, positions))

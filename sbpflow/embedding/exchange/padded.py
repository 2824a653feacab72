"""Provides fixed-size buffers for rows, so that the host need not know the number of rows.

The size of the buffer between two ranks depends only on the batch size. Unused positions contain
the address of a row of zeros, which follows the stored rows. The device detects batches that do not
fit: each rank sends the number of rows that it needs, and all ranks compute the maximum.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.storage.lookup import Lookup


@dataclass(frozen=True, slots=True)
class Slots:
    """The positions of a batch's unique rows in the buffers.

    ``of_ids`` (int64 [n]) contains the position of each address. ``of_rows`` (int64 [n]) contains
    the position of each unique row, padded by repeating the last position. ``size`` is the total
    number of positions.
    """

    of_ids: Tensor
    of_rows: Tensor
    size: int

    def spread(self, lookup: Lookup, grads: Tensor) -> Tensor:
        """Return a tensor [size, width] with the sum of each row's gradients at the row's position,
        and zeros elsewhere.
        """
        _, sums = lookup.spread_gradients(grads)
        out = sums.new_zeros(self.size, sums.shape[1])
        return out.index_copy_(0, self.of_rows, sums)


class Capacity:
    """Computes the sizes of buffers that hold the fraction ``share`` of the maximum number of rows
    that a rank can request; ``share`` is in (0, 1].
    """

    def __init__(self, share: float, plan: GroupPlan) -> None:
        (stack,) = plan.stacks
        self.share = share
        self._size, self._lookups = plan.world.size, stack.lookups()
        self._stored = max(stack.num_rows(rank) for rank in plan.world.ranks)

    def most(self, batch_size: int) -> int:
        """Return the maximum number of rows that a rank can request from another in a batch of
        ``batch_size``.
        """
        return max(1, min(-(-batch_size // self._size) * self._lookups, self._stored))

    def rows(self, batch_size: int) -> int:
        """Return the number of rows in a buffer."""
        return ceil(self.share * self.most(batch_size))

    def is_enough(self, batch_size: int) -> bool:
        """Return True if the buffers are large enough for any batch."""
        return self.rows(batch_size) >= self.most(batch_size)

    def share_of(self, rows: int, batch_size: int) -> float:
        """Return the smallest share, to three digits, whose buffers have room for ``rows`` rows."""
        return min(1.0, ceil(1000 * rows / self.most(batch_size)) / 1000)


class BufferLayout:
    """Places the unique rows of a batch in one buffer per part of the address space.

    Part p contains the addresses from ``bases[p]`` to ``lasts[p]``.
    """

    def __init__(self, bases: Tensor, lasts: Tensor) -> None:
        self._bases, self._lasts, self._before = bases, lasts, bases - 1
        self._absent = lasts + 1 - bases  # the address after each part's rows, relative to its base

    def lay_out(self, wanted: Lookup, room: int) -> tuple[Slots, Tensor]:
        """Return the ``Slots`` of the rows, and the buffers to send ([parts, 1 + room]).

        The first element of a buffer is the largest number of rows in any part. The row addresses
        follow, relative to the base of the part. Rows that do not fit share the last position.
        """
        parts, count = self._absent.numel(), wanted.addresses.numel()
        send = self._absent.unsqueeze(1).repeat(1, room + 1)
        send[:, 0] = 0
        if not count:  # this rank has no samples
            empty = torch.empty(0, dtype=torch.int64, device=send.device)
            return Slots(empty, empty, parts * room), send
        # The position of a row is its index among the unique rows minus the number of rows in
        # preceding parts. All rows that do not fit are written to the last position. Which of these
        # rows is written last does not matter, because all ranks detect the overflow and repeat the
        # exchange.
        runs = wanted.runs()
        before = wanted.unique_up_to(self._before)
        part = torch.searchsorted(self._lasts, runs.keys)
        place = (runs.number - before.index_select(0, part)).clamp(max=room - 1)
        slot = part * room + place
        rows = runs.keys - self._bases.index_select(0, part)
        send.view(-1).scatter_(0, slot + part + 1, rows)
        send[:, 0] = (wanted.unique_up_to(self._lasts) - before).max()
        of_ids = torch.empty_like(slot).scatter_(0, runs.order, slot)
        of_rows = slot.index_select(0, runs.starts.index_select(0, runs.slots))
        return Slots(of_ids, of_rows, parts * room), send

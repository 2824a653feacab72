"""Rows that travel in buffers of a fixed size, so that the host need not know how many there are.

Between two ranks there is room for a number of rows that follows from the batch's size. What is
left of it names an address of zeros behind the stored rows. A batch that names more is told apart
on the device: each rank sends with its ids how many it would have named, and all learn the most.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.storage.lookup import Lookup


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the unique rows of a batch stand in buffers of rows.

    ``of_ids`` [n] int64 for each address; ``of_rows`` [n] int64 for the unique rows in turn, then
    the last one's again and again. ``size`` counts all buffers' rows.
    """

    of_ids: Tensor
    of_rows: Tensor
    size: int

    def spread(self, lookup: Lookup, grads: Tensor) -> Tensor:
        """[size, width]: the bags' ``grads`` summed per row, in its slot; zeros in others."""
        _, sums = lookup.spread_gradients(grads)
        out = sums.new_zeros(self.size, sums.shape[1])
        return out.index_copy_(0, self.of_rows, sums)


class Capacity:
    """``share`` of the rows that a rank can name to another at most, in (0, 1]."""

    def __init__(self, share: float, plan: GroupPlan) -> None:
        (stack,) = plan.stacks
        self.share = share
        self._size, self._lookups = plan.world.size, stack.lookups()
        self._stored = max(stack.num_rows(rank) for rank in plan.world.ranks)

    def most(self, batch_size: int) -> int:
        """Rows that one rank may name to another, in a batch of ``batch_size`` samples."""
        return max(1, min(-(-batch_size // self._size) * self._lookups, self._stored))

    def rows(self, batch_size: int) -> int:
        """For how many there is room."""
        return ceil(self.share * self.most(batch_size))

    def is_enough(self, batch_size: int) -> bool:
        """Whether no batch can name more."""
        return self.rows(batch_size) >= self.most(batch_size)

    def share_of(self, rows: int, batch_size: int) -> float:
        """A share with room for ``rows``, of three digits."""
        return min(1.0, ceil(1000 * rows / self.most(batch_size)) / 1000)


class Layout:
    """Lays the unique rows of a batch out in buffers, one for each part of the addresses.

    Part p has addresses from ``bases[p]`` to ``lasts[p]``.
    """

    def __init__(self, bases: Tensor, lasts: Tensor) -> None:
        self._bases, self._lasts, self._before = bases, lasts, bases - 1
        self._absent = lasts + 1 - bases  # the address behind a part's rows

    def lay_out(self, wanted: Lookup, room: int) -> tuple[Slots, Tensor]:
        """Slots in buffers of ``room`` rows, and what to send: [parts, 1 + room], the most rows of
        a part and then the part's rows, counted from its base. Rows beyond the room are left out.
        """
        parts, count = self._absent.numel(), wanted.addresses.numel()
        send = self._absent.unsqueeze(1).repeat(1, room + 1)
        send[:, 0] = 0
        if not count:  # a rank without samples
            none = torch.empty(0, dtype=torch.int64, device=send.device)
            return Slots(none, none, parts * room), send
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

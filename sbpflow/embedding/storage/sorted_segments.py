"""Sorts a batch's addresses and finds runs of equal addresses, in tensors of the batch's length.

No size depends on the values of the addresses, so the host never waits for the device.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class SortedSegments:
    """The sorted addresses ``keys`` [n >= 1], their original positions, and their runs.

    ``order`` (int64 [n]) contains the original positions; the sort is stable. ``number`` (int64
    [n]) is the index of the run that contains each position, and ``start`` and ``stop`` (int32 [n])
    are the bounds of this run.
    """

    keys: Tensor
    order: Tensor
    number: Tensor
    start: Tensor
    stop: Tensor

    @staticmethod
    def of(addresses: Tensor) -> "SortedSegments":
        """Sort ``addresses`` [n >= 1]."""
        keys, order = torch.sort(addresses, stable=True)
        count = keys.numel()
        at = torch.arange(count, dtype=torch.int32, device=keys.device)
        begins = torch.ones_like(keys, dtype=torch.bool)
        torch.ne(keys[1:], keys[:-1], out=begins[1:])
        number = torch.cumsum(begins, 0) - 1
        # Write the first position of run k to bounds[k]; every other position is written to the
        # last element, which is never read. ``unique_consecutive`` would make the host wait for
        # the number of runs. torch's cummax, which needs fewer ops, takes 0.6 ms on a GPU.
        bounds = at.new_full((count + 2,), count)
        bounds.scatter_(0, torch.where(begins, number, count + 1), at)
        start, stop = bounds.index_select(0, number), bounds.index_select(0, number + 1)
        return SortedSegments(keys, order, number, start, stop)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the constructor's arguments."""
        return self.keys, self.order, self.number, self.start, self.stop

    @cached_property
    def starts(self) -> Tensor:
        """Return the first position of each run (int64 [n], padded with n)."""
        count = self.keys.numel()
        none = self.order.new_full((count,), count)
        return none.scatter_(0, self.number, self.start.to(torch.int64))

    @cached_property
    def slots(self) -> Tensor:
        """Return the index of each run (int64 [n], padded by repeating the last index)."""
        return torch.minimum(
            torch.arange(self.keys.numel(), device=self.keys.device), self.number[-1:]
        )

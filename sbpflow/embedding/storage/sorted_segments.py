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

    ``order`` (int64 [n]) contains the original positions; the sort is stable. ``start`` and
    ``stop`` (int32 [n]) are the bounds of the run that contains each position.
    """

    keys: Tensor
    order: Tensor
    start: Tensor
    stop: Tensor

    @staticmethod
    def of(addresses: Tensor) -> "SortedSegments":
        """Sort ``addresses`` [n >= 1]."""
        keys, order = torch.sort(addresses, stable=True)
        count = keys.numel()
        at = torch.arange(count, dtype=torch.int32, device=keys.device)
        changes = keys[1:] != keys[:-1]
        # ``start`` is the running maximum of the run starts; ``stop`` is the running minimum, from
        # the end, of the run ends. ``unique_consecutive`` would make the host wait for the number
        # of runs.
        begins = torch.where(changes, at[1:], 0)
        ends = torch.where(changes, at[1:], count)
        start = torch.cummax(torch.cat([begins.new_zeros(1), begins]), 0).values
        stop = torch.cummin(torch.cat([ends, ends.new_full((1,), count)]).flip(0), 0).values.flip(0)
        return SortedSegments(keys, order, start, stop)

    @cached_property
    def number(self) -> Tensor:
        """Return the index (int64 [n]) of the run that contains each position."""
        changes = (self.keys[1:] != self.keys[:-1]).to(torch.int64)
        return torch.cumsum(torch.cat([changes.new_zeros(1), changes]), 0)

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

"""Addresses of a batch in order, and the runs of equal ones, all of the batch's own length.

Nothing here has a size that the addresses decide, so a device computes it and no host waits.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class SortedSegments:
    """``keys`` [n >= 1], sorted, were at ``order`` [n] int64; equal ones keep the batch's order.

    ``start`` and ``stop`` [n] int32 are the bounds of the run that a position is in.
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
        begins = torch.where(changes, at[1:], 0)
        ends = torch.where(changes, at[1:], count)
        start = torch.cummax(torch.cat([begins.new_zeros(1), begins]), 0).values
        stop = torch.cummin(torch.cat([ends, ends.new_full((1,), count)]).flip(0), 0).values.flip(0)
        return SortedSegments(keys, order, start, stop)

    @cached_property
    def number(self) -> Tensor:
        """[n] int64: which run, counted from 0, a position is in."""
        changes = (self.keys[1:] != self.keys[:-1]).to(torch.int64)
        return torch.cumsum(torch.cat([changes.new_zeros(1), changes]), 0)

    @cached_property
    def starts(self) -> Tensor:
        """[n] int64: where each run begins; n for numbers that no run has."""
        count = self.keys.numel()
        none = self.order.new_full((count,), count)
        return none.scatter_(0, self.number, self.start.to(torch.int64))

    @cached_property
    def slots(self) -> Tensor:
        """[n] int64: numbers of runs, all of them, then the last one again and again."""
        return torch.minimum(
            torch.arange(self.keys.numel(), device=self.keys.device), self.number[-1:]
        )

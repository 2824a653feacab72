"""A batch's addresses in order, with the runs of equal ones, all of the batch's own length.

Unlike ``Access.unique`` nothing here has a size that the addresses decide, so a device computes it
without the host waiting.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sbpflow.embedding.storage.access import Access


@dataclass(frozen=True, slots=True)
class Runs:
    """``n`` addresses, sorted; equal ones, a run, stand in the order of the batch.

    ``source`` [n] is the bag that each belongs to, ``scale`` [n] its weight there (``None``: 1);
    ``start`` and ``stop`` [n] int32 are the bounds of the run that a position is in.
    """

    keys: Tensor
    source: Tensor
    scale: Tensor | None
    start: Tensor
    stop: Tensor

    @staticmethod
    def of(access: Access) -> "Runs":
        """Sort the addresses of ``access`` (at least one)."""
        keys, order = torch.sort(access.addresses, stable=True)
        count = keys.numel()
        at = torch.arange(count, dtype=torch.int32, device=keys.device)
        changes = keys[1:] != keys[:-1]
        begins = torch.where(changes, at[1:], 0)
        ends = torch.where(changes, at[1:], count)
        start = torch.cummax(torch.cat([begins.new_zeros(1), begins]), 0).values
        stop = torch.cummin(torch.cat([ends, ends.new_full((1,), count)]).flip(0), 0).values.flip(0)
        scale = None if access.weights is None else access.weights.index_select(0, order)
        source = order
        if access.offsets is not None:
            bag = torch.arange(access.num_bags, device=keys.device)
            bag = bag.repeat_interleave(access.offsets.diff(), output_size=count)
            source = bag.index_select(0, order)
        return Runs(keys, source, scale, start, stop)

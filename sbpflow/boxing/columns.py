"""Reorders the columns of parts."""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from sbpflow.boxing.copies import LocalFn


def gatherer(places: Sequence[int]) -> LocalFn:
    """Return a function that returns a part's columns in the order of ``places``."""
    return _reorderer(places)


def scatterer(places: Sequence[int]) -> LocalFn:
    """Return a function that moves the columns of a part to ``places``."""
    return _reorderer(torch.tensor(places).argsort().tolist())


def _reorderer(places: Sequence[int]) -> LocalFn:
    # Move columns in blocks (usually a table's vector), because copying single columns takes
    # longer.
    width = block_width(places)
    blocks = torch.tensor([place // width for place in places[::width]], dtype=torch.int64)
    on_device = {blocks.device: blocks}

    def reorder(part: Tensor) -> Tensor:
        if part.device not in on_device:
            on_device[part.device] = blocks.to(part.device)
        split = part.reshape(part.shape[0], blocks.numel(), width)
        return split.index_select(1, on_device[part.device]).view(part.shape)

    return reorder


def block_width(order: Sequence[int]) -> int:
    """Return the largest block width for which permutation ``order`` moves only whole blocks."""
    breaks = [place for place in range(1, len(order)) if order[place] != order[place - 1] + 1]
    # Blocks must start at multiples of the width, both before and after the permutation.
    starts = [*breaks, *(order[place] for place in (0, *breaks) if order), len(order)]
    return gcd(*starts) or 1

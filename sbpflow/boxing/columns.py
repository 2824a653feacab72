"""Reorders the columns of parts."""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from sbpflow.boxing.copies import LocalFn


def gatherer(places: Sequence[int], device: torch.device | None) -> LocalFn:
    """Return a function that returns a part's columns in the order of ``places``."""
    # Move columns in blocks (usually a table's vector), because copying single columns takes
    # longer.
    width = block_width(places)
    blocks = torch.tensor([place // width for place in places[::width]], device=device)

    def reorder(part: Tensor) -> Tensor:
        split = part.reshape(part.shape[0], len(places) // width, width)
        return split.index_select(1, blocks).view(part.shape)

    return reorder


def scatterer(places: Sequence[int], device: torch.device | None) -> LocalFn:
    """Return a function that moves the columns of a part to ``places``."""
    return gatherer(torch.tensor(places).argsort().tolist(), device)


def block_width(order: Sequence[int]) -> int:
    """Return the largest block width for which permutation ``order`` moves only whole blocks."""
    breaks = [place for place in range(1, len(order)) if order[place] != order[place - 1] + 1]
    # Blocks must start at multiples of the width, both before and after the permutation.
    starts = [*breaks, *(order[place] for place in (0, *breaks) if order), len(order)]
    return gcd(*starts) or 1

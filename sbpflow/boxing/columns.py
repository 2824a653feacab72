"""Reorders the columns of parts."""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from sbpflow.boxing.copies import LocalFn


def gatherer(places: tuple[int, ...], device: torch.device | None) -> LocalFn:
    """Return a function that returns a part's columns in the order of ``places``."""
    # Move columns in blocks (usually a table's vector), because copying single columns takes
    # longer.
    width = block_width(places)
    blocks = _index(tuple(place // width for place in places[::width]), device)

    def reorder(part: Tensor) -> Tensor:
        split = part.reshape(part.shape[0], len(places) // width, width)
        return split.index_select(1, blocks).view(part.shape)

    return reorder


def scatterer(places: tuple[int, ...], device: torch.device | None) -> LocalFn:
    """Return a function that moves the columns of a part to ``places``."""
    return gatherer(tuple(sorted(range(len(places)), key=lambda n: places[n])), device)


@lru_cache(maxsize=256)
def _index(numbers: tuple[int, ...], device: torch.device | None) -> Tensor:
    """Return ``numbers`` on a device; copying them there for each batch size would wait for it."""
    return torch.tensor(numbers, device=device)


def block_width(order: Sequence[int]) -> int:
    """Return the largest block width for which permutation ``order`` moves only whole blocks."""
    breaks = [place for place in range(1, len(order)) if order[place] != order[place - 1] + 1]
    # Blocks must start at multiples of the width, both before and after the permutation.
    starts = [*breaks, *(order[place] for place in (0, *breaks) if order), len(order)]
    return gcd(*starts) or 1

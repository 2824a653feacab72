"""A batch's ids as values: a matrix, lists of all features or of one, and what is known of them.

Fixed numbers of ids per sample form a matrix, the fast path. Ids of any number, or with weights,
form lists, sample by sample, so that parts of a batch are joined by laying them end to end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids of one feature: sample i has ``values[offsets[i] : offsets[i + 1]]``.

    ``values`` [n] int32 or int64, ``offsets`` [samples + 1], ``weights`` [n] floats or ``None``.
    Weights are data: they get no gradient, and are refused if they require one.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lists:
    """Ids of several features, list by list, sample by sample.

    ``lengths`` [samples, lists] int32, ``values`` [sum of lengths], ``weights`` like values.
    """

    lengths: Tensor
    values: Tensor
    weights: Tensor | None

    def starts(self) -> Tensor:
        """[samples, lists] int64: where each list begins."""
        flat = self.lengths.reshape(-1).to(torch.int64)
        return (torch.cumsum(flat, 0) - flat).view(self.lengths.shape)

    def take(self, places: Tensor, total: int | None = None) -> "Lists":
        """The lists of these places, in this order, of every sample.

        ``total`` is how many ids they hold; without it the host asks the device.
        """
        lengths = self.lengths.index_select(1, places)
        source = positions(self.starts().index_select(1, places), lengths, total)
        weights = None if self.weights is None else self.weights.index_select(0, source)
        return Lists(lengths, self.values.index_select(0, source), weights)


def positions(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Positions of all elements of runs that begin at ``starts``, run by run; ``total`` of them."""
    flat = lengths.reshape(-1).to(torch.int64)
    ends = torch.cumsum(flat, 0)
    shift = starts.reshape(-1) - (ends - flat)
    if total is None:
        total = int(ends[-1]) if flat.numel() else 0
    within = torch.arange(total, device=flat.device)
    return within + torch.repeat_interleave(shift, flat, output_size=total)


@dataclass(frozen=True, slots=True)
class IdBounds:
    """What whoever made some ids vouches for, so that nobody looks at each of them again.

    Ids of column c of the matrix are in range(columns[c]), those of list p in range(lists[p]), and
    list p has at most lengths[p] of them.
    """

    columns: tuple[int, ...]
    lists: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchIds:
    """Ids of some samples: a matrix [samples, columns] and lists, if there are any.

    From a caller they have the columns of all features that come as a matrix and the lists of all
    others, both in the plan's order; checked ones have the lists that the plan looks up.
    """

    matrix: Tensor
    lists: Lists | None
    bounds: IdBounds | None = None

    @property
    def num_samples(self) -> int:
        return self.matrix.shape[0]


Ids = Tensor | Mapping[str, "Tensor | Bags"] | BatchIds

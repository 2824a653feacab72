"""Defines value types for the ids of a batch: a matrix and lists.

Features with a fixed number of ids per sample form a matrix, which is the fast path. Ragged or
weighted ids form lists, stored sample by sample, so that the parts of a batch can be concatenated.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids of one feature: sample i has ``values[offsets[i] : offsets[i + 1]]``.

    ``values`` is int32 or int64 [n], ``offsets`` is [samples + 1], and ``weights`` is floating
    point [n] or ``None``. Weights are data: they have no gradient and must not require one.
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lists:
    """Ids of several features: the lists of the first sample, then those of the second, and so on.

    ``lengths`` is int32 [samples, lists], and ``values`` is [sum of lengths]; ``weights`` has the
    shape of ``values``.
    """

    lengths: Tensor
    values: Tensor
    weights: Tensor | None

    def starts(self) -> Tensor:
        """Return where each list starts in ``values``, as int64 [samples, lists]."""
        flat = self.lengths.reshape(-1).to(torch.int64)
        return (torch.cumsum(flat, 0) - flat).view(self.lengths.shape)

    def places(self) -> Tensor:
        """Return the index of each id's list among the lists of its sample, as int64 [ids]."""
        samples, lists = self.lengths.shape
        places = torch.arange(lists, device=self.lengths.device).repeat(samples)
        lengths = self.lengths.reshape(-1)
        return torch.repeat_interleave(places, lengths, output_size=self.values.numel())

    def take(self, places: Tensor, total: int | None = None) -> "Lists":
        """Return the lists at ``places``, in this order, for every sample.

        ``total`` is the number of ids in these lists. If ``total`` is not passed, the host waits
        for the device.
        """
        lengths = self.lengths.index_select(1, places)
        source = positions(self.starts().index_select(1, places), lengths, total)
        weights = None if self.weights is None else self.weights.index_select(0, source)
        return Lists(lengths, self.values.index_select(0, source), weights)


def positions(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Return the positions ([total]) of all elements in the segments given by ``starts`` and
    ``lengths``.
    """
    flat = lengths.reshape(-1).to(torch.int64)
    ends = torch.cumsum(flat, 0)
    shift = starts.reshape(-1) - (ends - flat)
    if total is None:
        total = int(ends[-1]) if flat.numel() else 0
    within = torch.arange(total, device=flat.device)
    return within + torch.repeat_interleave(shift, flat, output_size=total)


@dataclass(frozen=True, slots=True)
class IdBounds:
    """Bounds that the creator of ids guarantees, so that the ids need not be checked one by one.

    Ids in column c of the matrix are in range(columns[c]), and ids in list p are in
    range(lists[p]). List p has at most lengths[p] ids.
    """

    columns: tuple[int, ...]
    lists: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchIds:
    """The ids of some samples: a matrix [samples, columns], and lists if any feature has them.

    In ``BatchIds`` passed by a caller, the matrix has the columns of all fixed-length features, and
    the lists are those of all other features, both in the plan's order. Checked ``BatchIds``
    contain only the lists that the plan looks up.
    """

    matrix: Tensor
    lists: Lists | None
    bounds: IdBounds | None = None

    @property
    def num_samples(self) -> int:
        return self.matrix.shape[0]


Ids = Tensor | Mapping[str, "Tensor | Bags"] | BatchIds

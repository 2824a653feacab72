"""Computes metrics of groups (``metrics.GROUPED``) and slices for any number of rows by sending all
rows of a group to one rank. The results are bitwise equal to those computed on rank 0 from all
rows, because each group is evaluated on one rank and the sum over the groups is exact.
"""

from dataclasses import asdict
from fractions import Fraction
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.boxing.agreement import combine_parts, gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.exchange.all_to_all import RowTransfer, received
from sbpflow.embedding.plan.group_plan import ExchangeStep
from sbpflow.sbp.sbp import Partial
from sbpflow.training.metrics import GROUPED, GroupTerms, Slice, group_terms, slice_of

_CHANNEL = "control"
# 2^64 / golden ratio as int64; multiplying keys by this number spreads nearby keys
_GOLDEN = -7046029254386353131
_MANTISSA_BITS, _HALF_BITS = 53, 26
_MIN_EXPONENT, _NUM_EXPONENTS = -80, 160
_CHUNK = 1 << 26


class GroupSums:
    """All rows of the groups that this rank owns; each value of a column is a group."""

    def __init__(self, boxing: Boxing, column: str, keys: Tensor, rows: Tensor) -> None:
        """Send this rank's ``keys`` (int64 [n]) and ``rows`` ([n, 2], logits and labels) to the
        owners.
        """
        self._boxing, self._column = boxing, column
        packed = torch.stack([keys, *rows.to(torch.float64).view(torch.int64).unbind(1)], 1)
        packed = exchange(boxing, f"evaluate/{column}", packed, owners(keys, boxing.world.size))
        self._keys = packed[:, 0].numpy()
        values = packed[:, 1:].contiguous().view(torch.float64)
        self._logits, self._labels = values[:, 0].numpy(), values[:, 1].numpy()

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics that need groups, on all ranks."""
        return {name: self._mean(terms_of)[0] for name, terms_of in GROUPED.items()}

    def _mean(self, terms_of: GroupTerms) -> tuple[float | None, int]:
        """Return, on all ranks, the sum of the terms per row, and the number of rows."""
        terms, num_rows = terms_of(self._logits, self._labels, self._keys)
        parts = exponent_sums(terms)
        parts = np.concatenate([parts.reshape(-1), [num_rows]])
        device = self._boxing.world.device
        id = f"evaluate/{self._column}/sums"
        total = combine_parts(self._boxing, torch.from_numpy(parts).to(device), Partial(), id)
        *sums, num_rows = total.tolist()
        if not num_rows:
            return None, 0
        whole = Fraction(0)
        for place, value in enumerate(sums):
            half, exponent = divmod(place, _NUM_EXPONENTS)
            power = exponent + _MIN_EXPONENT - _MANTISSA_BITS + (0 if half else _HALF_BITS)
            whole += value * Fraction(2) ** power
        return float(whole) / num_rows, num_rows

    def slices(self, most: int = 10) -> tuple[Slice, ...]:
        """Return the column's summary, followed by the slices of its most frequent values, at most
        ``most`` of them.
        """
        area, num_rows = self._mean(group_terms)
        values, counts = np.unique(self._keys, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:most]
        mine = [(-int(counts[place]), int(values[place])) for place in order]
        chosen = sorted(chain(*gather_values(self._boxing, mine)))[:most]
        own = [value for _, value in chosen if value in {value for _, value in mine}]
        own_slices = [asdict(self._slice(value)) for value in own]
        every_slice = chain(*gather_values(self._boxing, own_slices))
        by_value = {each["value"]: Slice(**each) for each in every_slice}
        summary = Slice(self._column, num_rows, area)
        return (summary, *(by_value[value] for _, value in chosen))

    def _slice(self, value: int) -> Slice:
        rows = self._keys == value
        return slice_of(self._column, value, self._logits[rows], self._labels[rows])


def owners(keys: Tensor, num_ranks: int) -> Tensor:
    """Return the rank that evaluates each key ([n])."""
    return ((keys * _GOLDEN) >> 33).remainder(num_ranks)


def exchange(boxing: Boxing, id: str, rows: Tensor, owner: Tensor) -> Tensor:
    """Send each row of ``rows`` (int64 [n, columns]) to the rank in ``owner`` ([n]); return the
    rows that this rank owns, in host memory.
    """
    world = boxing.world
    if world.size == 1:
        return rows
    counts = torch.bincount(owner, minlength=world.size)
    rows = rows[torch.argsort(owner, stable=True)]
    groups, sizes = (tuple(range(world.size)),), (rows.numel(), rows.numel() * world.size)
    step = ExchangeStep(groups, id, "all_to_all", torch.int64, *sizes, "rows of groups")
    transfer = RowTransfer(world, _CHANNEL)
    into = received(step, transfer.start_counts(step, counts.to(world.device)), world.size).tolist()
    pending = transfer.start(step, rows.to(world.device), counts.tolist(), into)
    return received(step, pending, sum(into)).cpu()


def exponent_sums(terms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the exact sum of ``terms`` [n] as integers [2, exponents]: for each exponent, the sums
    of the upper and of the lower halves of the 53-bit mantissas. A half has at most 27 bits, so the
    float64 sum of 2^26 halves is exact.
    """
    sums = np.zeros((2, _NUM_EXPONENTS), dtype=np.int64)
    for start in range(0, len(terms), _CHUNK):
        mantissas, exponents = np.frexp(terms[start : start + _CHUNK])
        whole = np.ldexp(mantissas, _MANTISSA_BITS).astype(np.int64)
        place = exponents.astype(np.int64) - _MIN_EXPONENT
        for half, part in enumerate((whole >> _HALF_BITS, whole & ((1 << _HALF_BITS) - 1))):
            weights = part.astype(np.float64)
            sums[half] += np.bincount(place, weights, _NUM_EXPONENTS).astype(np.int64)
    return sums

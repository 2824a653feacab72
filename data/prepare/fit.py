"""Constants that the train part decides: means, deviations, quantiles, the scale of weights.

Sums are exact, quantiles are values that occur, so that a constant depends on the rows and on
nothing else: not on how they were cut into pieces, nor on which was counted first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.schema import Number

Values = NDArray[np.float32]

_MANTISSA_BITS = 23
_HALF = 12
_BINS = 1 << 16
_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, mean and standard deviation of values; 0, 0 and 1 without any."""

    count: int
    mean: float
    std: float
    """1 where all values are equal: the column then is 0 everywhere when standardised."""


class ExactSum:
    """The sums of float32 values and of their squares, without rounding."""

    def __init__(self) -> None:
        self._count = 0
        self._first, self._second = Fraction(0), Fraction(0)

    def add(self, values: Values) -> None:
        """Count finite ``values`` in: integers of each exponent are added, which is exact."""
        mantissas, exponents = np.frexp(values)
        whole = np.ldexp(mantissas, _MANTISSA_BITS + 1).astype(np.int64)
        place = exponents.astype(np.int64) + 200
        high, low = whole >> _HALF, whole & ((1 << _HALF) - 1)
        sums = [
            np.bincount(place, weights=part.astype(np.float64))
            for part in (whole, high * high, high * low, low * low)
        ]
        for index in np.flatnonzero(np.bincount(place)).tolist():
            unit = Fraction(2) ** (index - 200 - _MANTISSA_BITS - 1)
            one, hh, hl, ll = (int(part[index]) for part in sums)
            self._first += one * unit
            self._second += ((hh << 2 * _HALF) + (hl << _HALF + 1) + ll) * unit * unit
        self._count += len(values)

    def moments(self) -> Moments:
        """What has been added."""
        if not self._count:
            return Moments(0, 0.0, 1.0)
        mean = self._first / self._count
        variance = self._second / self._count - mean * mean
        return Moments(self._count, float(mean), sqrt(float(variance)) or 1.0)


class Quantiles:
    """The values at given places among all values, in two passes over them.

    A float32 becomes 32 bits of the same order; the first pass counts the upper halves, the second
    the lower halves of those that a quantile falls on.
    """

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._upper = np.zeros(_BINS, dtype=np.int64)
        self._lower: dict[int, NDArray[np.int64]] = {}
        self._places: list[tuple[int, int]] = []

    def add(self, values: Values) -> None:
        """The first pass."""
        self._upper += np.bincount(_ordered(values) >> 16, minlength=_BINS)

    def seek(self) -> None:
        """Between the passes: where the quantiles are."""
        total = int(self._upper.sum())
        ends = np.cumsum(self._upper)
        for number in range(1, self._buckets):
            rank = total * number // self._buckets
            if rank < total:
                upper = int(np.searchsorted(ends, rank, side="right"))
                self._places.append((upper, rank - int(ends[upper] - self._upper[upper])))
                self._lower.setdefault(upper, np.zeros(_BINS, dtype=np.int64))

    def add_again(self, values: Values) -> None:
        """The second pass, over the same values."""
        keys = _ordered(values)
        upper = keys >> 16
        for bin_, counts in self._lower.items():
            counts += np.bincount(keys[upper == bin_] & 0xFFFF, minlength=_BINS)

    def bounds(self) -> list[float]:
        """The distinct values at which a new bucket begins, rising; none for no values."""
        found: list[int] = []
        for upper, rank in self._places:
            ends = np.cumsum(self._lower[upper])
            found.append((upper << 16) | int(np.searchsorted(ends, rank, side="right")))
        values = _values(np.array(found, dtype=np.uint32))
        # Infinite values are in the outermost buckets then; JSON has no word for them.
        return [float(value) for value in np.unique(np.clip(values, -_LARGEST, _LARGEST))]


def _ordered(values: Values) -> NDArray[np.int64]:
    """32 bits of the order of the values; -0 counts as 0."""
    bits = (values + np.float32(0)).view(np.uint32)
    negative = bits >> np.uint32(31) != 0
    return np.where(negative, ~bits, bits | np.uint32(1 << 31)).astype(np.int64)


def _values(keys: NDArray[np.uint32]) -> Values:
    negative = keys >> np.uint32(31) == 0
    return (
        np.where(negative, ~keys, keys & np.uint32(0x7FFF_FFFF)).astype(np.uint32).view(np.float32)
    )


def clipped(values: Values, number: Number) -> Values:
    """The values within the ends of the column, infinite ones too."""
    if number.clip is None:
        return values
    return np.clip(values, np.float32(number.clip[0]), np.float32(number.clip[1]))


def fit(
    pieces: Iterable["dict[str, Values]"],
    again: Iterable["dict[str, Values]"],
    numbers: Sequence[Number],
    weight: str | None,
) -> dict[str, Any]:
    """Constants of the columns that need some, by name.

    ``pieces`` are the present values of the train part, piece by piece; ``again`` are the same.
    """
    sums = {n.name: ExactSum() for n in numbers if n.transform == "standardise"}
    if weight is not None:
        sums[weight] = ExactSum()
    quantiles = {n.name: Quantiles(n.buckets) for n in numbers if n.buckets}
    by_name = {number.name: number for number in numbers}
    for columns in pieces:
        for name, total in sums.items():
            values = columns[name]
            total.add(clipped(values, by_name[name]) if name in by_name else values)
        for name, places in quantiles.items():
            places.add(clipped(columns[name], by_name[name]))
    for places in quantiles.values():
        places.seek()
    if quantiles:
        for columns in again:
            for name, places in quantiles.items():
                places.add_again(clipped(columns[name], by_name[name]))
    fitted: dict[str, Any] = {}
    for name, total in sums.items():
        moments = total.moments()
        fitted[name] = {"mean": moments.mean}
        if name in by_name:
            fitted[name]["std"] = moments.std
    return {**fitted, **{name: {"bounds": found.bounds()} for name, found in quantiles.items()}}

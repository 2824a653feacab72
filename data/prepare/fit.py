"""Fit constants on train: means, standard deviations, quantiles, and the scale of weights.

Sums are exact, and every quantile is one of the values. Constants therefore depend only on the
rows, not on their division into pieces or on the order of counting.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.schema import DenseColumn
from sbpflow.serving.cells import FLOAT32_MAX, clipped

Values = NDArray[np.float32]

_MANTISSA_BITS = 23
_HALF = 12
_BINS = 1 << 16


class ExactSum:
    """Computes exact sums of float32 values and their squares.

    A float32 is a 24-bit integer times a power of two; the integers are summed by exponent. To sum
    squares, each integer is split into halves, because float64 sums products of halves exactly.
    """

    def __init__(self) -> None:
        self._count = 0
        self._first, self._second = Fraction(0), Fraction(0)

    def add(self, values: Values) -> None:
        """Add ``values`` [n], which must be finite."""
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
            first, hh, hl, ll = (int(part[index]) for part in sums)
            self._first += first * unit
            self._second += ((hh << 2 * _HALF) + (hl << _HALF + 1) + ll) * unit * unit
        self._count += len(values)

    def merge(self, other: "ExactSum") -> None:
        """Add the values of another sum to this one."""
        self._count += other._count
        self._first += other._first
        self._second += other._second

    def moments(self) -> tuple[float, float]:
        """Return the mean and the standard deviation of all values added so far, or 0 and 1.

        If all values are equal, the deviation is 1, so that a standardized column is 0 everywhere.
        """
        if not self._count:
            return 0.0, 1.0
        mean = self._first / self._count
        variance = self._second / self._count - mean * mean
        return float(mean), sqrt(float(variance)) or 1.0


class Quantiles:
    """Finds the quantiles that divide values into ``buckets``, in two passes over the values. Each
    float32 is mapped to a 32-bit integer, in a way that preserves the order. The first pass counts
    the upper halves of the integers. The second pass counts the lower halves, but only in bins that
    contain a quantile.
    """

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._upper = np.zeros(_BINS, dtype=np.int64)
        self._lower: dict[int, NDArray[np.int64]] = {}
        self._places: list[tuple[int, int]] = []

    def seek(self) -> None:
        """Find the bins that contain quantiles. Call this method between the two passes."""
        total = int(self._upper.sum())
        ends = np.cumsum(self._upper)
        for number in range(1, self._buckets):
            rank = total * number // self._buckets
            if rank < total:
                upper = int(np.searchsorted(ends, rank, side="right"))
                self._places.append((upper, rank - int(ends[upper] - self._upper[upper])))
                self._lower.setdefault(upper, np.zeros(_BINS, dtype=np.int64))

    def empty(self) -> "Quantiles":
        """Return a copy without counts, for the same pass."""
        copy = Quantiles(self._buckets)
        copy._places = self._places
        copy._lower = {bin_: np.zeros_like(counts) for bin_, counts in self._lower.items()}
        return copy

    def merge(self, other: "Quantiles") -> None:
        """Add the counts that ``other`` has collected in the same pass."""
        self._upper += other._upper
        for bin_, counts in other._lower.items():
            self._lower[bin_] += counts

    def add(self, values: Values) -> None:
        """Count ``values``. The second pass must count the same values, in any order."""
        keys = ordered(values)
        upper = keys >> 16
        if not self._places:
            self._upper += np.bincount(upper, minlength=_BINS)
            return
        for bin_, counts in self._lower.items():
            counts += np.bincount(keys[upper == bin_] & 0xFFFF, minlength=_BINS)

    def bounds(self) -> list[float]:
        """Return the distinct lower bounds of the buckets in ascending order."""
        keys: list[int] = []
        for upper, rank in self._places:
            ends = np.cumsum(self._lower[upper])
            keys.append((upper << 16) | int(np.searchsorted(ends, rank, side="right")))
        values = values_of_order(np.array(keys, dtype=np.uint32))
        # Bounds are clipped, because JSON cannot represent infinity. Infinite values still fall
        # into the outermost buckets.
        return [float(value) for value in np.unique(np.clip(values, -FLOAT32_MAX, FLOAT32_MAX))]


def ordered(values: Values) -> NDArray[np.int64]:
    """Map values to 32-bit integers that sort in the same order, with -0 equal to 0. If all bits of
    negative floats and the sign bits of other floats are flipped, the bit patterns sort like the
    numbers.
    """
    bits = (values + np.float32(0)).view(np.uint32)
    negative = bits >> np.uint32(31) != 0
    return np.where(negative, ~bits, bits | np.uint32(1 << 31)).astype(np.int64)


def values_of_order(keys: NDArray[np.uint32]) -> Values:
    """Return the values that ``ordered`` maps to ``keys``."""
    flipped = np.where(keys >> np.uint32(31) == 0, ~keys, keys & np.uint32(0x7FFF_FFFF))
    return flipped.astype(np.uint32).view(np.float32)


class Fit:
    """Fits the constants of all columns. Separate objects can each process a part of the rows; the
    objects are then merged. If a column needs quantiles, all values must be added twice, with a
    call to ``seek`` in between.
    """

    def __init__(self, columns: Sequence[DenseColumn], weight: str | None) -> None:
        self._columns, self._weight = tuple(columns), weight
        self._by_name = {column.name: column for column in columns}
        self._sums = {c.name: ExactSum() for c in columns if c.transform == "standardise"}
        if weight is not None:
            self._sums[weight] = ExactSum()
        self._quantiles = {c.name: Quantiles(c.buckets) for c in columns if c.buckets}
        self._is_second = False
        self.names = list(dict.fromkeys([*self._by_name, *self._sums]))
        """The names of the columns whose values must be added"""

    def empty(self) -> "Fit":
        """Return a copy without values, for the same pass."""
        copy = Fit(self._columns, self._weight)
        copy._quantiles = {name: places.empty() for name, places in self._quantiles.items()}
        copy._is_second = self._is_second
        return copy

    def add(self, values: "dict[str, Values]") -> None:
        """Add train values that are not missing, by column name."""
        for name, total in () if self._is_second else self._sums.items():
            column = self._by_name.get(name)
            total.add(clipped(values[name], None if column is None else column.clip))
        for name, places in self._quantiles.items():
            places.add(clipped(values[name], self._by_name[name].clip))

    def merge(self, other: "Fit") -> None:
        """Add the values that ``other`` has counted in the same pass."""
        for name, total in self._sums.items():
            total.merge(other._sums[name])
        for name, places in self._quantiles.items():
            places.merge(other._quantiles[name])

    def seek(self) -> bool:
        """End the first pass; return True if a second pass is needed."""
        for places in self._quantiles.values():
            places.seek()
        self._is_second = True
        return bool(self._quantiles)

    def constants(self) -> dict[str, Any]:
        """Return the fitted constants by column name."""
        fitted: dict[str, Any] = {}
        for name, total in self._sums.items():
            mean, std = total.moments()
            fitted[name] = {"mean": mean}
            if name in self._by_name:
                fitted[name]["std"] = std
        for name, places in self._quantiles.items():
            fitted[name] = {"bounds": places.bounds()}
            # Sets from before buckets were clipped, and sets that reuse their values, lack this.
            if self._by_name[name].clip is not None:
                fitted[name]["clips"] = True
        return fitted

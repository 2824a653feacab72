"""How many distinct rows of a table a number of lookups touches: one curve, however it is known.

Costs depend on how often ids repeat. Statistics of a prepared set, a law, a sample or nothing at
all: each becomes an ``IdCurve``, whose ``touched`` is what every count and price uses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sbpflow.errors import ConfigError

Floats = NDArray[np.float64]
CLICKS = 3.0
"""Exponent of ids that nothing is known of: the smallest id of n has a share of n ** (-2/3)."""
_SLICES = 40
_MOST = 16.0
# Half octaves: a line in logarithms between two of them is within 0.65 % of the curve.
_DRAWS = tuple(2.0 ** (n / 2) for n in range(1, 69))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdCurve:
    """``unique[i]`` distinct rows are touched by ``draws[i]`` lookups, both rising.

    ``distinct`` is how many rows are ever looked up. Raises ConfigError for curves that cannot be.
    """

    draws: tuple[float, ...]
    unique: tuple[float, ...]
    distinct: float

    def __post_init__(self) -> None:
        if len(self.draws) != len(self.unique) or not self.draws:
            raise ConfigError(
                f"ids: {len(self.draws)} draws and {len(self.unique)} unique counts; give as many "
                "of one as of the other, for example draws [1000], unique [400]"
            )
        for name, values in (("draws", self.draws), ("unique", self.unique)):
            if min(values) <= 0 or any(b < a for a, b in pairwise(values)):
                raise ConfigError(
                    f"ids: {name} {list(values)} do not rise from above 0; for example "
                    f"{name} [100, 200]"
                )

    def touched(self, draws: float) -> float:
        """Distinct rows among ``draws`` lookups, on average: log-log between what is known."""
        if draws <= 0:
            return 0.0
        x = math.log(draws)
        xs, ys = _logarithms(self.draws), _logarithms(self.unique)
        if x > xs[-1]:
            slope = (ys[-1] - ys[-2]) / max(float(xs[-1] - xs[-2]), 1e-9)
            y = float(ys[-1] + slope * (x - xs[-1]))
        else:
            y = float(np.interp(x, xs, ys))
        return min(math.exp(y), draws, self.distinct)


@lru_cache(4096)  # a planner asks for the same curves in shape after shape
def _logarithms(values: tuple[float, ...]) -> Floats:
    return np.log(np.array([1.0, *values]))


def curve_of(
    rows: Sequence[float] | Floats, mass: Sequence[float] | Floats, draws: Sequence[float] = _DRAWS
) -> IdCurve:
    """From groups of rows that are looked up alike: ``rows[i]`` of them share ``mass[i]``.

    Draws are independent, so a row with share p of n lookups is touched with probability
    1 - exp(-n p).
    """
    count, share = np.asarray(rows, dtype=np.float64), np.asarray(mass, dtype=np.float64)
    kept = (count > 0) & (share > 0)
    if not kept.any():
        return IdCurve(draws=(1.0,), unique=(1.0,), distinct=0.0)
    count, share = count[kept], share[kept] / share[kept].sum()
    each = share / count
    unique = [float((count * -np.expm1(-n * each)).sum()) for n in draws]
    return IdCurve(
        draws=tuple(draws),
        unique=tuple(np.maximum.accumulate(unique).tolist()),
        distinct=float(count.sum()),
    )


@lru_cache(1024)
def click_curve(num_rows: int, exponent: float = CLICKS) -> IdCurve:
    """Of a table of ``num_rows`` where an id is a uniform number from 0 to 1 to the power of
    ``exponent``, times the rows: 1 for equally frequent ones.
    """
    edges = (np.arange(_SLICES + 1) / _SLICES) ** exponent  # finer where ids are frequent
    return curve_of(np.diff(edges) * num_rows, np.full(_SLICES, 1.0 / _SLICES))


@dataclass(frozen=True, slots=True)
class IdFrequencies:
    """Of one field: (rows, lookups) of each bin, and the mean number of ids of a sample.

    Within a bin all rows are taken for equally frequent.
    """

    bins: tuple[tuple[int, int], ...]
    per_sample: float

    @property
    def curve(self) -> IdCurve:
        return _curve_of_bins(tuple(self.bins))


@lru_cache(1024)
def _curve_of_bins(bins: tuple[tuple[int, int], ...]) -> IdCurve:
    return curve_of([rows for rows, _ in bins], [lookups for _, lookups in bins])


def exponent_of(curve: IdCurve, num_rows: int, draws: float) -> float:
    """The exponent of ``click_curve``, in halves, under which ``draws`` ids of a table of
    ``num_rows`` name as many rows.
    """
    wanted = curve.touched(draws)
    low, high = 1.0, _MOST
    while high - low > 0.05:
        middle = (low + high) / 2
        more = click_curve(num_rows, middle).touched(draws) > wanted
        low, high = (middle, high) if more else (low, middle)
    return round(2 * low) / 2

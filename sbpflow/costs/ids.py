"""Estimates how many distinct rows a given number of lookups touches.

Costs depend on how often ids repeat. An ``IdCurve`` comes from the statistics of a data set, from a
distribution, or from a sample; the default is ``click_curve``. All counts and prices use
``IdCurve.touched``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CLICKS = 3.0
"""The default exponent of ``click_curve``: with it, the most frequent of n ids accounts for n **
(-1/3) of the lookups.
"""
_SLICES = 40
_MOST = 16.0
# Two points per octave make log-log interpolation accurate to 0.65 %.
_DRAWS = tuple(2.0 ** (n / 2) for n in range(1, 69))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdCurve:
    """The number of distinct rows as a function of the number of lookups. According to the curve,
    ``draws[i]`` lookups touch ``unique[i]`` rows. Both sequences are ascending.

    ``distinct`` is the number of rows that are ever looked up.
    """

    draws: tuple[float, ...]
    unique: tuple[float, ...]
    distinct: float

    def touched(self, draws: float) -> float:
        """Return the mean number of distinct rows in ``draws`` lookups (log-log interpolation, or
        extrapolation beyond the last point).
        """
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

    def step_share(self, draws: float, batches: int) -> float:
        """Return the distinct rows of ``batches`` batches with ``draws`` lookups each, divided by
        the sum of the distinct rows of each batch.
        """
        if batches == 1 or draws <= 0:
            return 1.0
        return self.touched(batches * draws) / (batches * self.touched(draws))


@lru_cache(4096)  # cached, because a planner evaluates the same curve for many shapes
def _logarithms(values: tuple[float, ...]) -> Floats:
    return np.log(np.array([1.0, *values]))


def curve_of(
    rows: Sequence[float] | Floats, mass: Sequence[float] | Floats, draws: Sequence[float] = _DRAWS
) -> IdCurve:
    """Return the curve of a table whose rows form groups; the rows in a group are equally frequent.

    Group i contains ``rows[i]`` rows, whose total frequency is proportional to ``mass[i]``. Lookups
    are assumed to be independent, so n lookups touch a row of frequency p with probability 1 -
    exp(-n p).
    """
    count, share = np.asarray(rows, dtype=np.float64), np.asarray(mass, dtype=np.float64)
    valid = (count > 0) & (share > 0)
    if not valid.any():
        return IdCurve(draws=(1.0,), unique=(1.0,), distinct=0.0)
    count, share = count[valid], share[valid] / share[valid].sum()
    each = share / count
    unique = (count * -np.expm1(-np.multiply.outer(np.array(draws), each))).sum(axis=1)
    return IdCurve(
        draws=tuple(draws),
        unique=tuple(np.maximum.accumulate(unique).tolist()),
        distinct=float(count.sum()),
    )


@lru_cache(1024)
def click_curve(num_rows: int, exponent: float = CLICKS) -> IdCurve:
    """Return the curve of random ids floor(num_rows * u ** exponent), with u uniform in [0, 1).

    With exponent 1, all rows are equally frequent.
    """
    # Slices of frequent ids are narrower, because frequencies differ most among frequent ids.
    edges = (np.arange(_SLICES + 1) / _SLICES) ** exponent
    return curve_of(np.diff(edges) * num_rows, np.full(_SLICES, 1.0 / _SLICES))


def exponent_of(curve: IdCurve, num_rows: int, draws: float) -> float:
    """Return the exponent between 1 and 16, to the nearest 0.5, for which ``click_curve`` touches
    as many rows in ``draws`` lookups as ``curve`` does.
    """
    wanted = curve.touched(draws)
    low, high = 1.0, _MOST
    while high - low > 0.05:
        middle = (low + high) / 2
        more = click_curve(num_rows, middle).touched(draws) > wanted
        low, high = (middle, high) if more else (low, middle)
    return round(2 * low) / 2

"""Compute the best possible AUC and logloss for rows with known click probabilities.

To avoid the noise of random labels, a row with probability p counts as p clicks and 1 - p
non-clicks. Rows are counted in narrow bins of the logit, so that the memory is constant and the
order of rows affects only the rounding of sums.
"""

import numpy as np
from numpy.typing import NDArray

_BINS = 1 << 15
_LIMIT = 16.0


class BayesTally:
    """Counts clicks and non-clicks by bin of the logit; computes AUC and logloss from the
    counts.
    """

    def __init__(self) -> None:
        self._clicks = np.zeros(_BINS)
        self._others = np.zeros(_BINS)
        self._entropy = 0.0

    def add(self, probability: NDArray[np.float64], times: NDArray[np.int64] | None = None) -> None:
        """Add rows with click probabilities [n]. Row i counts ``times[i]`` times (by default,
        once).
        """
        p = np.clip(probability, 1e-7, 1 - 1e-7)
        weight = np.ones(len(p)) if times is None else times
        logit = np.log(p) - np.log1p(-p)
        place = ((logit + _LIMIT) * (_BINS / (2 * _LIMIT))).astype(np.int64).clip(0, _BINS - 1)
        self._clicks += np.bincount(place, weights=p * weight, minlength=_BINS)
        self._others += np.bincount(place, weights=(1 - p) * weight, minlength=_BINS)
        self._entropy -= float((weight * (p * np.log(p) + (1 - p) * np.log1p(-p))).sum())

    def merge(self, other: "BayesTally") -> None:
        """Add the counts of another tally."""
        self._clicks += other._clicks
        self._others += other._others
        self._entropy += other._entropy

    @property
    def rows(self) -> float:
        """Return the number of rows added so far."""
        return float(self._clicks.sum() + self._others.sum())

    def auc(self) -> float:
        """Return the probability that p is higher for a click than for a non-click (a tie counts
        half)."""
        below = np.cumsum(self._others) - self._others
        wins = float((self._clicks * (below + self._others / 2)).sum())
        return wins / float(self._clicks.sum() * self._others.sum())

    def logloss(self) -> float:
        """Return the mean entropy of the rows."""
        return self._entropy / self.rows

    def ctr(self) -> float:
        """Return the mean click probability of the rows."""
        return float(self._clicks.sum()) / self.rows

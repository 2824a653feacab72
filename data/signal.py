"""The planted signal: a logit from ids, a cross, dense values and missing cells, scaled to a known AUC.

Only values frequent enough to be learned carry weight, so the ceiling can be reached. Weights are normal
draws; every term has a stated share of the logit's variance; one scale and one offset are then found
that give the wanted AUC and click rate.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.bayes import BayesTally
from data.columns import Columns, Rows
from data.schema import MISSING_ID
from data.tails import Floats, Ranks
from sbpflow.errors import ConfigError

ID_TERMS = ("C2", "C5", "C7", "C10", "C13", "C14", "C17", "C18", "C24", "C26")
CROSS_TERMS = (("C1", "C2"),)
DENSE_TERMS = {"I5": -1.0, "I6": -1.0, "I7": 1.0, "I11": 1.0, "I13": -1.0}
MISSING_TERMS = {"I1": -1.0, "I5": -1.0, "I6": -1.0, "C3": 1.0}
SHARES = {"ids": 0.55, "crosses": 0.15, "dense": 0.25, "missing": 0.05}
"""Of the variance of the logit; equal parts within a kind."""

_STREAM = 1
_CALIBRATION_BLOCKS = 4


@dataclass
class Term:
    """One summand of the logit: a table over ranks, pairs, integers or the missing flag."""

    name: str
    columns: tuple[str, ...]
    weights: NDArray[np.float64]
    scale: float = 1.0


class Signal:
    """The calibrated logit; ``probability`` is a function of the rows alone."""

    def __init__(
        self, columns: Columns, seed: int, *, ctr: float, auc: float, min_mass: float
    ) -> None:
        blocks = [columns.block(i, _STREAM) for i in range(_CALIBRATION_BLOCKS)]
        self._rng = np.random.PCG64(np.random.SeedSequence([seed, 2]))
        self._pairs: dict[tuple[str, str], tuple[Ranks, Floats]] = {}
        self._tables: dict[str, Floats] = {}
        for name in ID_TERMS:
            self._tables[name] = self._id_table(name, blocks, min_mass)
        for pair in CROSS_TERMS:
            self._pairs[pair] = self._pair_table(pair, blocks, min_mass)
        self._center: dict[str, tuple[float, float]] = {}
        for name in DENSE_TERMS:
            values = np.concatenate([_dense(rows, name) for rows in blocks])
            self._center[name] = float(values.mean()), float(values.std())
        self._scales = self._shares(blocks)
        logits = np.concatenate([self.terms(rows).sum(axis=0) for rows in blocks])
        self.offset, self.scale = _calibrate(logits, ctr, auc)

    def _normal(self, size: int) -> Floats:
        u = (self._rng.random_raw(2 * size) >> np.uint64(11)) * 2.0**-53
        return np.sqrt(-2 * np.log1p(-u[:size])) * np.cos(2 * np.pi * u[size:])

    def _id_table(self, name: str, blocks: list[Rows], min_mass: float) -> Floats:
        ranks = np.concatenate([rows.ranks[name] for rows in blocks])
        counts = np.bincount(ranks[ranks >= 0])
        weights = self._normal(len(counts))
        weights[counts < min_mass * len(ranks)] = 0.0
        return np.append(weights, 0.0)

    def _pair_table(
        self, pair: tuple[str, str], blocks: list[Rows], min_mass: float
    ) -> tuple[Ranks, Floats]:
        keys, counts = np.unique(
            np.concatenate([pair_rank(rows, pair) for rows in blocks]), return_counts=True
        )
        frequent = (counts >= min_mass * counts.sum()) & (keys >= 0)
        return keys[frequent], self._normal(int(frequent.sum()))

    def terms(self, rows: Rows) -> Floats:
        """Every summand [terms, rows], before the common scale and offset."""
        out = [self._of_ids(rows.ranks[name], self._tables[name]) for name in ID_TERMS]
        out += [self._of_pairs(pair_rank(rows, pair), *self._pairs[pair]) for pair in CROSS_TERMS]
        for name, sign in DENSE_TERMS.items():
            mean, std = self._center[name]
            out.append(sign * (_dense(rows, name) - mean) / std)
        out += [sign * rows.missing[name] for name, sign in MISSING_TERMS.items()]
        scales = getattr(self, "_scales", None)
        return np.stack(out) if scales is None else np.stack(out) * scales[:, None]

    @staticmethod
    def _of_ids(ranks: Ranks, table: Floats) -> Floats:
        return table[np.where(ranks < 0, len(table) - 1, np.minimum(ranks, len(table) - 1))]

    @staticmethod
    def _of_pairs(keys: Ranks, known: Ranks, weights: Floats) -> Floats:
        place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        return np.where(known[place] == keys, weights[place], 0.0)

    def _shares(self, blocks: list[Rows]) -> Floats:
        std = np.concatenate([self.terms(rows) for rows in blocks], axis=1).std(axis=1)
        kinds = (
            ["ids"] * len(ID_TERMS)
            + ["crosses"] * len(CROSS_TERMS)
            + ["dense"] * len(DENSE_TERMS)
            + ["missing"] * len(MISSING_TERMS)
        )
        shares = np.array([SHARES[kind] / kinds.count(kind) for kind in kinds])
        return np.sqrt(shares) / np.maximum(std, 1e-9) * (std > 0)

    def probability(self, rows: Rows) -> Floats:
        """Click probability of each row."""
        logit = self.offset + self.scale * self.terms(rows).sum(axis=0)
        return 1.0 / (1.0 + np.exp(-logit))


def pair_rank(rows: Rows, pair: tuple[str, str]) -> Ranks:
    """One number per pair of ranks; -1 where either is missing."""
    a, b = (rows.ranks[name] for name in pair)
    return np.where((a < 0) | (b < 0), -1, (a << 32) | b)


def _dense(rows: Rows, name: str) -> Floats:
    values = np.log(np.maximum(rows.integers[name], -2) + 3.0)
    return np.where(rows.missing[name], float(MISSING_ID), values)


def _calibrate(logits: Floats, ctr: float, auc: float) -> tuple[float, float]:
    """Offset and scale that give the wanted click rate and Bayes AUC on ``logits``."""
    if not (0.5 < auc < 0.99 and 0 < ctr < 1):
        raise ConfigError(f"--auc {auc} must be above 0.5 and below 0.99, --ctr {ctr} inside 0..1")
    low, high = 0.0, 20.0
    offset = 0.0
    for _ in range(30):
        scale = (low + high) / 2
        offset = _offset(logits * scale, ctr)
        tally = BayesTally()
        tally.add(1.0 / (1.0 + np.exp(-(logits * scale + offset))))
        low, high = (scale, high) if tally.auc() < auc else (low, scale)
    return offset, (low + high) / 2


def _offset(logits: Floats, ctr: float) -> float:
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        below = float((1.0 / (1.0 + np.exp(-(logits + middle)))).mean()) < ctr
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2

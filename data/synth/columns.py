"""Generate Criteo-like ranks, integers, and missing masks for any range of rows.

Rows are sampled in fixed blocks with separate random streams, so that a row depends only on the
seed and its number. The structure (columns that determine other columns, shared masks, tails,
correlated integers) was measured on the Kaggle data; ``criteo_profile.json`` contains the
measurements.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.schema import CRITEO
from sbpflow.data.synth.tails import Bits, Coarsening, Floats, Ranks, Segment, Tail, uniform
from sbpflow.errors import DataError
from sbpflow.runtime.files.json_file import JsonError, object_of, read_json
from sbpflow.runtime.random.splitmix import GAMMA, MIX_1

BLOCK_ROWS = 1 << 16
CHAINS = (("C3", "C12", "C21", "C16", "C4", "C24"), ("C15", "C18", "C2"), ("C11", "C13"))
MASKS = (
    ("I1", "I10"),
    ("I4", "I13"),
    ("I7", "I9", "I11"),
    ("C3", "C4", "C12", "C16", "C21", "C24"),
    ("C19", "C20", "C25", "C26"),
    ("I3",), ("I5",), ("I6",), ("I8",), ("I12",), ("C6",), ("C22",),
)  # fmt: skip
FOLLOWS = {"I1": ("I5", -0.72), "I10": ("I1", 0.83), "I11": ("I7", 0.89), "I13": ("I4", 0.71)}
"""For each pair of integer columns, the share of rows in which one column copies the quantile of
the other (or, if negative, mirrors it)
"""

_DERIVED = {name for chain in CHAINS for name in chain[1:]} | {"C7"}
_INTEGERS_IN_ORDER = ("I5", *(name for name in CRITEO.dense if name != "I5"))
_TABLE_BITS = 16
_DRIFT_ROWS = 1_000_000
_MOST_SEGMENTS = 2
"""Columns with at most this many tail segments (in full Criteo, those with at most 105 values) do
not drift
"""


@cache
def profile() -> dict[str, Any]:
    """Return the measurements in ``criteo_profile.json``."""
    file = Path(__file__).with_name("criteo_profile.json")
    try:
        return object_of(read_json(file), str(file))
    except (FileNotFoundError, JsonError) as error:
        raise DataError(f"{error}; install the package again") from error


@dataclass(frozen=True)
class Rows:
    """Consecutive rows: ranks (-1 for missing), integers, and missing masks by column name.

    A rank determines the frequency of a value and its effect on clicks. ``values`` [rows]
    distinguishes the values that have the same rank at different times; without drift, values equal
    ranks.
    """

    ranks: dict[str, Ranks]
    values: dict[str, Ranks]
    integers: dict[str, NDArray[np.int32]]
    missing: dict[str, NDArray[np.bool_]]
    label_draw: Floats
    """Uniform random numbers that turn click probabilities into labels"""


class Columns:
    """Samples rows, which depend only on seed, vocabulary scale, skew per column, and drift."""

    def __init__(
        self, seed: int, vocab_scale: float, skew: Mapping[str, float], drift: float
    ) -> None:
        self._seed, self._drift = seed, drift
        self.tails = {
            name: _tail(name).scaled(vocab_scale).sharpened(skew.get(name, 1.0))
            for name in CRITEO.sparse
        }
        self._maps = {
            pair: Coarsening(self.tails[pair[0]], self.tails[pair[1]])
            for chain in CHAINS
            for pair in pairwise(chain)
        }
        self._children = _Refinement(self._maps["C11", "C13"], self.tails["C7"])
        self._own = [name for name in CRITEO.sparse if name not in _DERIVED]
        self._integers = {name: _integer_table(name) for name in CRITEO.dense}
        num_integers = len(CRITEO.dense) + len(FOLLOWS)
        self._num_draws = len(MASKS) + len(self._own) + 1 + num_integers + 1

    def block(self, index: int, stream: int = 0) -> Rows:
        """Return the BLOCK_ROWS rows of block ``index``. Rows of different streams are
        independent.
        """
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, stream, index]))
        draws = iter(bits.random_raw((self._num_draws, BLOCK_ROWS)))
        missing = _missing(draws)
        ranks = {name: self.tails[name].draw(next(draws)) for name in self._own}
        ranks["C7"] = self._children(ranks["C11"], uniform(next(draws)))
        for chain in CHAINS:
            for fine, coarse in pairwise(chain):
                ranks[coarse] = self._maps[fine, coarse](ranks[fine])
        for name, mask in missing.items():
            if name in ranks:
                ranks[name][mask] = -1
        values = {name: self._values(name, each, index) for name, each in ranks.items()}
        return Rows(ranks, values, self._integer_values(draws), missing, uniform(next(draws)))

    def _values(self, name: str, ranks: Ranks, block: int) -> Ranks:
        """Return the values of these ranks: rank + size * generation, or -1 for missing.

        During a generation, the rows of a rank gradually move from one value to the next, so that
        the frequency of a value rises and then falls. Each rank starts its generations at a
        different row.
        """
        tail = self.tails[name]
        if not self._drift or len(tail.segments) <= _MOST_SEGMENTS:
            return ranks
        numbers = np.arange(BLOCK_ROWS, dtype=np.uint64) + np.uint64(block * BLOCK_ROWS)
        phase = uniform(ranks.astype(np.uint64) * np.uint64(GAMMA))
        age = phase + self._drift * numbers / _DRIFT_ROWS
        draw = (numbers + np.uint64(1)) * np.uint64(GAMMA) ^ np.uint64(
            int(name[1:]) * MIX_1 % 2**64
        )
        draw = (draw ^ (draw >> np.uint64(30))) * np.uint64(MIX_1)
        generation = np.floor(age + uniform(draw ^ (draw >> np.uint64(27)))).astype(np.int64)
        return np.where(ranks < 0, -1, ranks + generation * tail.size)

    def _integer_values(self, draws: Iterator[Bits]) -> dict[str, NDArray[np.int32]]:
        places: dict[str, Bits] = {}
        for name in _INTEGERS_IN_ORDER:
            places[name] = next(draws) >> np.uint64(64 - _TABLE_BITS)
            if name in FOLLOWS:
                other, share = FOLLOWS[name]
                quantile = places[other]
                if share < 0:
                    quantile = np.uint64((1 << _TABLE_BITS) - 1) - quantile
                places[name] = np.where(uniform(next(draws)) < abs(share), quantile, places[name])
        return {name: self._integers[name][places[name]] for name in CRITEO.dense}


def _missing(draws: Iterator[Bits]) -> dict[str, NDArray[np.bool_]]:
    missing: dict[str, NDArray[np.bool_]] = {}
    for group in MASKS:
        kind = "int" if group[0][0] == "I" else "cat"
        rate = profile()[kind][group[0]]["missing"]
        missing.update(dict.fromkeys(group, uniform(next(draws)) < rate))
    return missing


def _tail(name: str) -> Tail:
    column = profile()["cat"][name]
    segments = tuple(Segment(*values) for values in column["segments"])
    return Tail(int(column["size"]), tuple(column["head"]), segments)


def _integer_table(name: str) -> NDArray[np.int32]:
    """Return the integers at evenly spaced quantiles, interpolated from the quantiles and the share
    of zeros in the profile.
    """
    column = profile()["int"][name]
    at = [percent / 100 for percent in column["quantile_pct"]]
    values = list(column["quantile"])
    if column["zero"] > 0:
        at.append(column["neg"] + column["zero"])
        values.append(0.0)
    order = np.lexsort((values, at))
    grid = np.maximum.accumulate(np.array(values)[order])
    middles = (np.arange(1 << _TABLE_BITS) + 0.5) / (1 << _TABLE_BITS)
    return np.ceil(np.interp(middles, np.array(at)[order], grid) - 1e-9).astype(np.int32)


class _Refinement:
    """Generates a column that determines C13, as C11 does, but is not itself determined by C11.

    Each value of C13 owns ranks of the column; the masses of these ranks add up to the mass of the
    value.
    """

    def __init__(self, parent: Coarsening, child: Tail) -> None:
        self._parent = parent
        owners = parent(np.arange(parent.fine.size))
        mass = np.bincount(owners, weights=parent.fine.masses(), minlength=parent.coarse.size)
        self._order, self._edges, self._before = _deal(mass, child.masses())

    def __call__(self, ranks: Ranks, draw: Floats) -> Ranks:
        """Return ranks of the generated column for rows whose C11 ranks are ``ranks``, given random
        numbers ``draw``.
        """
        owner = self._parent(ranks)
        low, high = self._before[owner], self._before[owner + 1]
        place = np.searchsorted(self._edges, low + draw * (high - low), side="right")
        return self._order[np.minimum(place, len(self._order) - 1)]


def _deal(owner_mass: Floats, mass: Floats) -> tuple[Ranks, Floats, Floats]:
    """Assign each rank to the owner that lacks the most mass. Return the ranks sorted by owner,
    their cumulative masses, and the cumulative mass at which each owner starts.
    """
    lacking = [(-value, owner) for owner, value in enumerate(owner_mass)]
    heapq.heapify(lacking)
    descending = np.argsort(-mass, kind="stable")
    frequent, rarest = np.split(descending, [len(mass) - len(owner_mass)])
    owner_of = np.empty(len(mass), dtype=np.int64)
    owner_of[rarest] = np.arange(len(owner_mass))  # every owner gets at least one rank
    for rank in frequent:
        wanted, owner = lacking[0]
        owner_of[rank] = owner
        heapq.heapreplace(lacking, (wanted + float(mass[rank]), owner))
    order = np.argsort(owner_of, kind="stable")
    edges = np.cumsum(mass[order])
    last = np.searchsorted(owner_of[order], np.arange(len(owner_mass)), side="right")
    return order, edges, np.concatenate([[0.0], edges])[np.concatenate([[0], last])]

"""Criteo-like columns of any row range, as a function of (seed, row): ranks, integers, missing masks.

Rows are drawn in fixed blocks, each from its own random stream, so a row does not depend on which range
was asked for. The column structure (chains, shared masks, tails) is that measured on the Kaggle rows.
"""

import heapq
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.schema import CRITEO
from data.tails import Coarsening, Floats, Ranks, Segment, Tail

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
_DERIVED = {name for chain in CHAINS for name in chain[1:]} | {"C7"}


@cache
def profile() -> dict[str, Any]:
    """The measured aggregates shipped with the package."""
    return json.loads(Path(__file__).with_name("criteo_profile.json").read_text(encoding="ascii"))


@dataclass(frozen=True)
class Rows:
    """Columns of consecutive rows: ranks (-1 missing) by sparse, integers by dense, two free uniforms."""

    ranks: dict[str, Ranks]
    integers: dict[str, Ranks]
    missing: dict[str, NDArray[np.bool_]]
    label_draw: Floats


class Columns:
    """Draws rows; built once per (seed, vocabulary scale)."""

    def __init__(self, seed: int, vocab_scale: float) -> None:
        self._seed = seed
        cats = profile()["cat"]
        self.tails = {name: _tail(cats[name]).scaled(vocab_scale) for name in CRITEO.sparse}
        self._maps = {
            (a, b): Coarsening(self.tails[a], self.tails[b])
            for chain in CHAINS
            for a, b in zip(chain, chain[1:], strict=False)
        }
        self._children = _Refinement(self._maps["C11", "C13"], self.tails["C7"])
        self._own = [name for name in CRITEO.sparse if name not in _DERIVED]
        self._num_draws = len(MASKS) + len(self._own) + 1 + len(CRITEO.dense) + 1

    def block(self, index: int, stream: int = 0) -> Rows:
        """The BLOCK_ROWS rows of block ``index``; another ``stream`` gives other rows alike."""
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, stream, index]))
        raw = bits.random_raw(self._num_draws * BLOCK_ROWS).reshape(self._num_draws, BLOCK_ROWS)
        draws = iter((raw >> np.uint64(11)) * 2.0**-53)
        missing = self._missing(draws)
        ranks = {name: self.tails[name].quantile(next(draws)) for name in self._own}
        ranks["C7"] = self._children(ranks["C11"], next(draws))
        for chain in CHAINS:
            for a, b in zip(chain, chain[1:], strict=False):
                ranks[b] = self._maps[a, b](ranks[a])
        for name, mask in missing.items():
            if name in ranks:
                ranks[name][mask] = -1
        integers = {name: _integers(name, next(draws)) for name in CRITEO.dense}
        return Rows(ranks, integers, missing, next(draws))

    def _missing(self, draws: "Any") -> dict[str, NDArray[np.bool_]]:
        missing: dict[str, NDArray[np.bool_]] = {}
        for group in MASKS:
            kind = "int" if group[0][0] == "I" else "cat"
            mask = next(draws) < profile()[kind][group[0]]["missing"]
            missing.update(dict.fromkeys(group, mask))
        return missing


def _tail(column: dict[str, Any]) -> Tail:
    segments = tuple(Segment(*values) for values in column["segments"])
    return Tail(int(column["size"]), tuple(column["head"]), segments)


def _integers(name: str, draw: Floats) -> Ranks:
    """Integers whose distribution function passes through the measured quantiles and the share of zeros."""
    column = profile()["int"][name]
    at = [*(percent / 100 for percent in column["quantile_pct"])]
    values = list(column["quantile"])
    if column["zero"] > 0:
        at.append(column["neg"] + column["zero"])
        values.append(0.0)
    order = np.lexsort((values, at))
    grid = np.maximum.accumulate(np.array(values)[order])
    return np.ceil(np.interp(draw, np.array(at)[order], grid) - 1e-9).astype(np.int64)


class _Refinement:
    """A column that determines C13, as C11 does, without being a function of C11.

    Each C13 value owns some ranks of the column, dealt out so that their masses add up to its own.
    """

    def __init__(self, parent: Coarsening, child: Tail) -> None:
        self._parent = parent
        fine = np.arange(parent.fine.size)
        owners = parent(fine)
        mass = np.zeros(parent.coarse.size)
        np.add.at(mass, owners, _masses(parent.fine))
        self._order, self._edges, self._before = _deal(mass, _masses(child))

    def __call__(self, ranks: Ranks, draw: Floats) -> Ranks:
        """Child ranks for rows with the given fine ranks of the parent."""
        owner = self._parent(ranks)
        low, high = self._before[owner], self._before[owner + 1]
        place = np.searchsorted(self._edges, low + draw * (high - low), side="right")
        return self._order[np.minimum(place, len(self._order) - 1)]


def _masses(tail: Tail) -> Floats:
    """The mass of every rank of a small column."""
    edges = [
        segment.cdf(np.arange(np.ceil(segment.start), segment.stop)) for segment in tail.segments
    ]
    masses = np.zeros(tail.size)
    masses[: len(tail.head)] = tail.head
    for segment, cdf in zip(tail.segments, edges, strict=True):
        first = int(np.ceil(segment.start))
        masses[first : first + len(cdf)] += np.diff(np.append(cdf, segment.mass))
    return masses


def _deal(owner_mass: Floats, mass: Floats) -> tuple[Ranks, Floats, Floats]:
    """Deal ranks (falling mass) to owners by what each still lacks; ranks grouped by owner, with edges."""
    lacking = [(-value, owner) for owner, value in enumerate(owner_mass)]
    heapq.heapify(lacking)
    owner_of = np.empty(len(mass), dtype=np.int64)
    for rank in np.argsort(-mass, kind="stable"):
        wanted, owner = heapq.heappop(lacking)
        owner_of[rank] = owner
        heapq.heappush(lacking, (wanted + float(mass[rank]), owner))
    order = np.argsort(owner_of, kind="stable")
    edges = np.cumsum(mass[order])
    last = np.searchsorted(owner_of[order], np.arange(len(owner_mass)), side="right")
    before = np.concatenate([[0.0], edges])[np.concatenate([[0], last])]
    return order, edges, before

"""Defines small problems that can be enumerated, with a known cost: sums, with a bend for fused
work.
"""

from dataclasses import dataclass

import numpy as np

from sbpflow.planner.search.problem import Floats, Key, Option, Problem

FEATURES = 6  # table bytes, buffer bytes, lookups, updates, sent, groups
LINEAR = np.array(
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.1] * 3]
)


@dataclass(frozen=True)
class PhaseMaxima:
    """Computes the ms of three phases, each as long as its slowest rank.

    ``bend`` makes the work of many tables together grow faster than their sum.
    """

    bend: float = 0.0

    def rank_ms(self, totals: Floats) -> Floats:
        linear = totals @ LINEAR
        return linear * (1.0 + self.bend * linear / (1.0 + linear))

    def rough_ms(self, totals: Floats) -> Floats:
        return self.rank_ms(totals)

    def combine(self, phases: Floats) -> Floats:
        return phases.max(axis=-2).sum(axis=-1)

    def memory(self, totals: Floats) -> Floats:
        return totals[..., 0] + totals[..., 1]


def keys_of(*keys: Key):
    return lambda _ranks: keys


def make_problem(
    num_tables: int,
    num_ranks: int,
    *,
    seed: int = 0,
    slack: float = 2.0,
    bend: float = 0.0,
    splits: bool = True,
) -> Problem:
    """Return random tables with whole, row-split (over 2 and all ranks) and copied options."""
    random = np.random.default_rng(seed)
    work = random.lognormal(0.0, 1.0, (num_tables, 3))
    held = random.lognormal(0.0, 1.5, num_tables) * 1e9
    options = []
    for number in range(num_tables):
        row = np.concatenate([[held[number], 0.0], work[number, :2], work[number, 2:] * 0.5, [0.0]])
        mine = [
            Option(("whole",), row[None], np.zeros(FEATURES), keys_of((5, "columns"))),
        ]
        for parts in sorted({2, num_ranks}) if splits else ():
            shard = np.tile(row / parts * np.array([1, 1, 1.1, 1.1, 1.5, 1]), (parts, 1))
            home = np.array([0.0, 0.0, 0.05 * row[2] / parts, 0.0, 0.0, 0.0])
            mine.append(Option(("rows", parts), shard, home, keys_of((5, "unique"))))
        if splits:
            copied = row * np.array([1, 1, 1 / num_ranks, 1.0, 2.0, 0.0])
            mine.append(Option(("copied",), np.zeros((0, FEATURES)), copied, keys_of((5, "local"))))
        options.append(tuple(mine))
    limit = np.full(num_ranks, max(slack * held.sum() / num_ranks, held.max() * 1.01))
    return Problem(
        names=tuple(f"t{n}" for n in range(num_tables)),
        options=tuple(options),
        limit_bytes=limit,
        pricing=PhaseMaxima(bend),
        base=np.zeros((num_ranks, FEATURES)),
    )

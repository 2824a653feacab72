"""Finds the best way to add one table to a plan, over all options and suitable ranks.

Greedy construction, reinsertion, and the alternatives in a report use this module. Shards are
placed on the best-scored ranks or on a block of neighboring ranks. A few array operations then
compute the new loads of all ranks for all options with the same number of shards.
"""

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sbpflow.planner.search.problem import (
    BYTES,
    NO_LIMIT,
    Floats,
    Ints,
    Key,
    Move,
    Option,
    Problem,
    State,
    step_ms,
)

# The search minimizes the step time plus this share of the root mean square of the loads. The step
# time is a maximum over ranks, so most moves do not change it; the root mean square rewards moves
# that reduce the load of any rank.
EVENNESS = 0.05
FEW = 4  # maximum number of shards for which ranks are also chosen individually
NO_ROOM = 1e6  # penalty in ms if the total excess equals the mean memory limit of the ranks


class Insertion(NamedTuple):
    """A move, and the resulting search ``goal`` and step time in ms."""

    goal: float
    ms: float
    move: Move


def goal(problem: Problem, loads: Floats, penalty: Floats) -> Floats:
    """Return the values [..] that the search minimizes for plans with these loads [.., ranks, 5].
    ``penalty`` [ranks] contains the ms per byte of excess.
    """
    even = np.sqrt(np.square(loads[..., :BYTES]).mean(axis=-2)).sum(axis=-1)
    excess = np.maximum(loads[..., BYTES] - problem.limit_bytes, 0.0) @ penalty
    return step_ms(loads) + EVENNESS * even + excess


@dataclass(frozen=True, slots=True)
class _Tried:
    """A table's options that have the same number of shards, as arrays: the load of each shard [n,
    count, 5], and the load on every rank [n, 5].
    """

    count: int
    numbers: tuple[int, ...]
    shards: Floats
    homes: Floats


class Inserter:
    """Prices insertions of tables into states of one problem.

    ``allowed`` [table] contains the numbers of the options to try (by default, all options).
    ``penalty`` [ranks] contains the ms per byte of excess; by default, it is so high that plans
    fit if possible.
    """

    def __init__(
        self, problem: Problem, allowed: tuple[tuple[int, ...], ...] | None = None
    ) -> None:
        self.problem = problem
        self._factors = problem.slowness * problem.own_share
        self._limited = bool(problem.limit_bytes.min() < NO_LIMIT)
        self.penalty = np.full(problem.num_ranks, NO_ROOM / problem.limit_bytes.mean())
        self._tried = [
            _by_count(problem, options, range(len(options)) if allowed is None else allowed[table])
            for table, options in enumerate(problem.options)
        ]

    def with_penalty(self, penalty: Floats) -> "Inserter":
        """Return an inserter with another penalty."""
        other = copy(self)
        other.penalty = penalty
        return other

    def ranked(self, state: State, table: int, avoid: Key | None = None) -> list[Insertion]:
        """Return the insertions of ``table`` into ``state``, up to two for each option, best first.

        Options with the key ``avoid`` are omitted unless no other option remains.
        """
        options = self.problem.options[table]
        insertions: list[Insertion] = []
        for tried in self._tried[table]:
            insertions += self._priced(state, options, tried)
        if avoid is not None:
            free = [i for i in insertions if avoid not in options[i.move.option].keys(i.move.ranks)]
            insertions = free or insertions
        insertions.sort(key=lambda insertion: insertion.goal)
        return insertions

    def best(self, state: State, table: int) -> Insertion:
        return self.ranked(state, table)[0]

    def _ranks(self, loads: Floats, tried: _Tried) -> tuple[Ints, Ints]:
        """Return option places [m] and their ranks [m, count]: for each option, the best block of
        ``count`` neighboring ranks if blocks divide the world, and the best ranks unless there are
        many. Blocks are tried because tables on the same block share keys that depend on ranks, and
        individually chosen ranks rarely coincide. If ranks share links, the best ranks that are
        spread evenly over the links are tried, too. Unequal ranks cannot replace each other, so if
        ranks differ in speed, up to ``FEW`` sets of good ranks are tried.
        """
        size, count, which = len(loads), tried.count, np.arange(len(tried.numbers))
        if count in (0, size):
            return which, np.tile(np.arange(count), (len(which), 1))
        largest = tried.shards.max(axis=1)[:, None] * self._factors  # [n, ranks, 5]
        above = np.maximum(loads + largest - loads.max(axis=0), 0.0)
        scores = above[..., :BYTES].sum(axis=-1) + EVENNESS * loads[:, :BYTES].sum(axis=1)
        if not self.problem.has_equal_ranks:
            scores += EVENNESS * largest[..., :BYTES].sum(axis=-1)
        if self._limited:
            room = self.problem.limit_bytes - loads[:, BYTES]
            lacking = np.maximum((tried.homes[:, None] + largest)[..., BYTES] - room, 0.0)
            scores += self.penalty * lacking
        picked: list[Ints] = []
        if not self.problem.has_equal_ranks:
            order = np.argsort(scores, axis=1, kind="stable")
            sets = range(min(FEW, size - count + 1))
            picked += [np.sort(order[:, first : first + count], axis=1) for first in sets]
        elif count == 1:
            picked.append(scores.argmin(axis=1)[:, None])
        elif count <= FEW or size % count:
            best = np.argpartition(scores, count - 1, axis=1)[:, :count]
            picked.append(np.sort(best, axis=1))
        per_link = self.problem.ranks_per_link
        if per_link > 1 and count > 1:
            # first the best rank of each link, then the second best of each, and so on
            by_link = scores.reshape(len(which), -1, per_link)
            place = by_link.argsort(axis=2, kind="stable").argsort(axis=2, kind="stable")
            order = np.lexsort((scores, place.reshape(scores.shape)), axis=1)
            picked.append(np.sort(order[:, :count], axis=1))
        if not size % count and count > 1:
            block = scores.reshape(len(which), -1, count).max(axis=-1).argmin(axis=1)
            picked.append(count * block[:, None] + np.arange(count))
        return np.tile(which, len(picked)), np.concatenate(picked)

    def _priced(self, state: State, options: tuple[Option, ...], tried: _Tried) -> list[Insertion]:
        """Return the insertions of options with the same number of shards on the chosen ranks."""
        which, ranks = self._ranks(state.loads, tried)
        numbers = [tried.numbers[n] for n in which.tolist()]
        moves = [Move(n, tuple(r)) for n, r in zip(numbers, ranks.tolist(), strict=True)]
        keys = np.array([state.new_keys(options[m.option], m.ranks) for m in moves])
        homes = tried.homes[which] + keys
        after = state.loads + homes[:, None] * self.problem.slowness
        after += self.problem.placed(tried.shards[which], ranks)
        goals = goal(self.problem, after, self.penalty).tolist()
        return list(map(Insertion, goals, step_ms(after).tolist(), moves))


def _by_count(
    problem: Problem, options: tuple[Option, ...], numbers: Collection[int]
) -> list[_Tried]:
    """Return the options by their number of shards."""
    counts: dict[int, list[int]] = {}
    for number in numbers:
        counts.setdefault(options[number].num_shards, []).append(number)
    tried: list[_Tried] = []
    for count, mine in counts.items():
        shards = np.array([options[number].shards for number in mine])
        homes = np.array([options[number].home for number in mine])
        tried.append(_Tried(count, tuple(mine), shards, homes))
    return tried

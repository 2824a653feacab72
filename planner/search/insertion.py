"""Finds the best way to add one table to a plan, over all options and suitable ranks.

Greedy construction, reinsertion, and the alternatives in a report use this module. Shards are
placed on the best-scored ranks or on a block of neighboring ranks. A few array operations then
compute the new maxima over ranks for all options with the same number of shards.
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
    Move,
    Option,
    Problem,
    State,
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


def goal(state: State, penalty: Floats) -> float:
    """Return the value that the search minimizes for a whole plan. ``penalty`` [ranks] contains the
    ms per byte of excess.
    """
    loads, limit = state.loads, state.problem.limit_bytes
    even = np.sqrt(np.square(loads[:, :BYTES]).mean(axis=0)).sum()
    excess = np.maximum(loads[:, BYTES] - limit, 0.0) @ penalty
    step = loads[:, :BYTES].max(axis=0).sum()
    return float(step + EVENNESS * even + excess)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A table's options that have the same number of shards, as arrays.

    ``shards`` contains the load of each shard [n, count, 5], or, if the shards of every option are
    about equal, the largest shard load [n, 1, 5]. ``homes`` [n, 5] contains the load on every rank.
    ``by_rank`` is true if the loads of all ranks must be computed to find the largest one: if ranks
    differ in speed or share links, or if a shard makes its rank faster, because the more tables a
    rank stores, the less it sends to other ranks.
    """

    count: int
    numbers: tuple[int, ...]
    shards: Floats
    homes: Floats
    by_rank: bool


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

    def ranked(
        self, state: State, table: int, avoid: frozenset[object] = frozenset()
    ) -> list[Insertion]:
        """Return the insertions of ``table`` into ``state``, up to two for each option, best first.

        Options with a key in ``avoid`` are omitted unless no other option remains.
        """
        options, now = self.problem.options[table], _Sums.of(state)
        insertions: list[Insertion] = []
        for tried in self._tried[table]:
            insertions += self._priced(state, now, options, tried)
        if avoid:
            keys = (options[i.move.option].keys(i.move.ranks) for i in insertions)
            free = [i for i, mine in zip(insertions, keys, strict=True) if avoid.isdisjoint(mine)]
            insertions = free or insertions
        insertions.sort(key=lambda insertion: insertion.goal)
        return insertions

    def best(self, state: State, table: int) -> Insertion:
        return self.ranked(state, table)[0]

    def _ranks(self, now: "_Sums", tried: _Tried) -> tuple[Ints, Ints]:
        """Return option places [m] and their ranks [m, count]: for each option, the best block of
        ``count`` neighboring ranks if blocks divide the world, and the best ranks unless there are
        many. Blocks are tried because tables on the same block share keys that depend on ranks, and
        individually chosen ranks rarely coincide. If ranks share links, the best ranks that are
        spread evenly over the links are tried, too. Unequal ranks cannot replace each other, so if
        ranks differ in speed, up to ``FEW`` sets of good ranks are tried.
        """
        size, count, which = len(now.loads), tried.count, np.arange(len(tried.numbers))
        if count in (0, size):
            return which, np.tile(np.arange(count), (len(which), 1))
        largest = tried.shards.max(axis=1)[:, None]  # [n, 1, 5]
        largest = largest * self._factors
        above = np.maximum(now.loads + largest - now.most, 0.0)
        scores = above[..., :BYTES].sum(axis=-1) + now.evenness
        if not self.problem.has_equal_ranks:
            scores += EVENNESS * largest[..., :BYTES].sum(axis=-1)
        if self._limited:
            lacking = np.maximum((tried.homes[:, None] + largest)[..., BYTES] - now.room, 0.0)
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

    def _priced(
        self, state: State, now: "_Sums", options: tuple[Option, ...], tried: _Tried
    ) -> list[Insertion]:
        """Return the insertions of options with the same number of shards on the chosen ranks."""
        which, ranks = self._ranks(now, tried)
        numbers = [tried.numbers[n] for n in which.tolist()]
        moves = [Move(n, tuple(r)) for n, r in zip(numbers, ranks.tolist(), strict=True)]
        keys = np.array([state.new_keys(options[m.option], m.ranks) for m in moves])
        homes = tried.homes[which] + keys
        shards, mine = tried.shards[which], now.loads[ranks]  # [m, count, 5]
        if tried.by_rank:
            after = now.loads + homes[:, None] * self.problem.slowness
            after += self.problem.placed(shards, ranks)
            most, squares = after.max(axis=1), np.square(after).sum(axis=1)
        else:
            most = np.maximum((mine + shards).max(axis=1, initial=0.0), now.most) + homes
            # The home load changes the squares of all ranks, and the shard loads those of some.
            squares = now.squares + homes * (2 * now.total + len(now.loads) * homes)
            squares += (shards * (2 * (mine + homes[:, None]) + shards)).sum(1)
        ms = most[:, :BYTES].sum(axis=1)
        even = np.sqrt(np.maximum(squares[:, :BYTES], 0.0) / len(now.loads)).sum(axis=1)
        goals = ms + EVENNESS * even
        if self._limited:
            held, room = homes[:, BYTES, None], now.room
            goals += np.maximum(held - room, 0.0) @ self.penalty
            more = np.maximum(held + shards[..., BYTES] - room[ranks], 0.0)
            more -= np.maximum(held - room[ranks], 0.0)
            goals += (more * self.penalty[ranks]).sum(axis=1)
        values = zip(goals.tolist(), ms.tolist(), moves, strict=True)
        return [Insertion(goal, step, move) for goal, step, move in values]


class _Sums(NamedTuple):
    """A state's loads [ranks, 5], and values derived from them that all insertions use."""

    loads: Floats
    most: Floats
    total: Floats
    squares: Floats
    evenness: Floats  # [ranks]
    room: Floats

    @staticmethod
    def of(state: State) -> "_Sums":
        loads = state.loads
        return _Sums(
            loads=loads,
            most=loads.max(axis=0),
            total=loads.sum(axis=0),
            squares=np.square(loads).sum(axis=0),
            evenness=EVENNESS * loads[:, :BYTES].sum(axis=1),
            room=state.problem.limit_bytes - loads[:, BYTES],
        )


def _by_count(
    problem: Problem, options: tuple[Option, ...], numbers: Collection[int]
) -> list[_Tried]:
    """Return the options by their number of shards."""
    counts: dict[int, list[int]] = {}
    for number in numbers:
        counts.setdefault(options[number].num_shards, []).append(number)
    tried: list[_Tried] = []
    for count, mine in counts.items():
        chosen = [options[number] for number in mine]
        if all(option.alike for option in chosen):
            shards = np.array(
                [
                    option.shards.max(axis=0, initial=-np.inf if option.num_shards else 0.0)
                    for option in chosen
                ]
            )[:, None]
        else:
            shards = np.array([option.shards for option in chosen])
        homes = np.array([option.home for option in chosen])
        alike = problem.has_equal_ranks and problem.ranks_per_link == 1
        by_rank = not alike or bool((shards[..., :BYTES] < 0).any())
        tried.append(_Tried(count, tuple(mine), shards, homes, by_rank))
    return tried

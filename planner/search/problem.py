"""Represents a planning problem as arrays: the load that each option adds to the ranks.

A load consists of five numbers: ms of work, ms of the transfers of each phase, and bytes. A table's
move consists of an ``Option`` and the ranks of its shards. Loads are summed over tables, so
changing a plan takes one subtraction and one addition. The load that an option adds to a rank is
multiplied by the factors of the rank, which differ if ranks differ in speed. Ranks that share a
link have the mean of their transfers. The step time is the sum of the maxima of all times over the
ranks. This module is pure arithmetic and does not use the engine.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from sbpflow.costs.counts import Ints, Key
from sbpflow.costs.ids import Floats
from sbpflow.costs.prices import PHASES, shared
from sbpflow.errors import PlanError

if TYPE_CHECKING:  # that module uses the engine
    from sbpflow.planner.task import Shape

TIMES = ("work", *PHASES)  # the times in a load, in ms
BYTES = len(TIMES)  # index of the bytes in a load
NO_LIMIT = 1e18  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way to store a table, with the ranks left open.

    ``shape`` names the option. The load ``shards[s]`` is added to the rank of shard s, and ``home``
    to every rank for the rank's own samples. A copied table has no shards; ``home`` contains the
    load of the copy. ``keys(ranks)`` names resources that tables can share (a group, a storage).
    For each distinct key of a plan, the load ``Problem.key_loads[key[0]]`` is added to every rank
    (see ``Problem.first_join``).
    """

    shape: "Shape"
    shards: Floats  # [S, 5]
    home: Floats  # [5]
    keys: Callable[[tuple[int, ...]], tuple[Key, ...]]

    @property
    def num_shards(self) -> int:
        return len(self.shards)


def step_ms(loads: Floats) -> Floats:
    """Return the step times in ms [..] for loads [.., ranks, 5]."""
    return loads[..., :BYTES].max(axis=-2).sum(axis=-1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The options of all tables, the memory of all ranks, and the loads of keys.

    ``options`` contains the allowed options of every table, with at most one shard per rank, and
    ``limit_bytes`` [ranks] the memory of each rank. ``base`` [ranks, 5] and the keys ``present``
    come from fixed parts, such as pinned tables. ``slowness`` [ranks, 5] contains the factors of
    the loads that options and keys add to a rank; ``base`` includes them. ``ranks_per_link``
    consecutive ranks share a link.

    Features from ``first_join`` on are outputs, and their keys name an output's groups. Their load
    is that of joining the parts of the groups, so it is added once if a plan has several of these
    keys, and not for a single one.
    """

    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    limit_bytes: Floats
    key_loads: Floats = field(repr=False)  # [F, 5], by feature, which is the first part of a key
    base: Floats = field(repr=False)
    slowness: Floats = field(repr=False)
    ranks_per_link: int = 1
    present: tuple[Key, ...] = ()
    first_join: int = sys.maxsize

    @property
    def num_tables(self) -> int:
        return len(self.names)

    @property
    def num_ranks(self) -> int:
        return int(self.limit_bytes.shape[0])

    @cached_property
    def has_equal_ranks(self) -> bool:
        """Return whether all factors are 1."""
        return bool((self.slowness == 1.0).all())

    @cached_property
    def own_share(self) -> Floats:
        """Return the parts of a shard's load [5] that count at its own rank."""
        share = np.ones(BYTES + 1)
        share[1:BYTES] /= self.ranks_per_link
        return share

    @cached_property
    def weights(self) -> Floats:
        """Return, for each table, the ms that its cheapest option adds to the mean over ranks,
        [tables]. Tables are placed in descending order of this value.
        """
        return np.array([min(map(self.mean_ms, options)) for options in self.options])

    def mean_ms(self, option: Option) -> float:
        """Return the ms that an option adds to the mean over ranks, without its keys."""
        spread = option.shards[:, :BYTES].sum() / self.num_ranks
        return float(option.home[:BYTES].sum() + spread)

    def placed(self, shards: Floats, ranks: Ints) -> Floats:
        """Return what n sets of shards [n, count, 5] on ``ranks`` [n, count] add to the loads of
        all ranks, [n, ranks, 5].
        """
        added = np.zeros((len(ranks), *self.base.shape))
        added[np.arange(len(ranks))[:, None], ranks] = shards * self.slowness[ranks]
        return shared(added, self.ranks_per_link)


@dataclass(frozen=True, slots=True)
class Move:
    """A table's option number and ranks, with shard s on ``ranks[s]``; a copy has no ranks."""

    option: int
    ranks: tuple[int, ...]


Assignment = tuple[Move, ...]  # a complete plan: one move per table


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan's time, its loads [ranks, 5], and the bytes in excess of the limits."""

    ms: float
    loads: Floats
    excess_bytes: float

    @property
    def memory(self) -> Floats:
        return self.loads[:, BYTES]

    @property
    def feasible(self) -> bool:
        return self.excess_bytes <= 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """Return the sort key of plans: plans that fit come first, then faster plans."""
        return (self.excess_bytes, self.ms)


class State:
    """A plan during search: the loads of all ranks, updated as tables are added and removed."""

    def __init__(self, problem: Problem, assignment: Sequence[Move] = ()) -> None:
        self.problem = problem
        self.loads = problem.base.copy()
        self.moves: list[Move | None] = [None] * problem.num_tables
        self.present: dict[Key, int] = dict.fromkeys(problem.present, 1)
        self._num_keys = Counter(feature for feature, _ in problem.present)
        self._key_sums: dict[tuple[int, ...], Floats] = {}  # by the features of new keys
        for table, move in enumerate(assignment):
            self.add(table, move)

    def add(self, table: int, move: Move) -> None:
        option = self.problem.options[table][move.option]
        self._add(option, move.ranks, 1.0)
        for key in option.keys(move.ranks):
            self.present[key] = self.present.get(key, 0) + 1
            self._num_keys[key[0]] += self.present[key] == 1
        self.moves[table] = move

    def remove(self, table: int) -> Move:
        move = self.moves[table]
        if move is None:
            raise PlanError(f"table {self.problem.names[table]} is not placed")
        option = self.problem.options[table][move.option]
        for key in option.keys(move.ranks):
            self.present[key] -= 1
            if not self.present[key]:
                del self.present[key]
                self._num_keys[key[0]] -= 1
        self._add(option, move.ranks, -1.0)
        self.moves[table] = None
        return move

    def _add(self, option: Option, ranks: tuple[int, ...], sign: float) -> None:
        factors = sign * self.problem.slowness
        self.loads += (option.home + self.new_keys(option, ranks)) * factors
        if ranks:
            self.loads += sign * self.problem.placed(option.shards[None], np.array([ranks]))[0]

    def new_keys(self, option: Option, ranks: tuple[int, ...]) -> Floats:
        """Return the total load [5] of the option's keys that are not yet in the plan."""
        first_join, num_keys = self.problem.first_join, self._num_keys
        new = tuple(
            key[0]
            for key in option.keys(ranks)
            if key not in self.present and (key[0] < first_join or num_keys[key[0]] == 1)
        )
        if new not in self._key_sums:
            self._key_sums[new] = self.problem.key_loads[list(new)].sum(axis=0)
        return self._key_sums[new]

    def assignment(self) -> Assignment:
        moves = tuple(move for move in self.moves if move is not None)
        if len(moves) != len(self.moves):
            raise PlanError("a table is not placed yet")
        return moves

    def price(self) -> Priced:
        excess = np.maximum(self.loads[:, BYTES] - self.problem.limit_bytes, 0.0)
        return Priced(
            ms=float(step_ms(self.loads)),
            loads=self.loads.copy(),
            # Rounding errors in sums of bytes must not make a full rank exceed the limit.
            excess_bytes=float(excess[excess > 0.5].sum()),
        )


def price_of(problem: Problem, assignment: Sequence[Move]) -> Priced:
    """Return the price of a whole plan."""
    return State(problem, assignment).price()

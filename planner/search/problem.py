"""Represents a planning problem as arrays: the work that each option of a table adds to the ranks,
and the cost of sums.

A table's move is an ``Option`` and the ranks of its shards. An option adds a row of features to a
rank; rows are summed over tables. A ``Pricing`` converts a rank's sums into ms of its phases, and
the phases of all ranks into the time of a step. A change of plan is therefore a subtraction and an
addition, and one call prices thousands of changes. The module is pure arithmetic and does not use
the engine.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sbpflow.errors import PlanError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """Describes one way to store a table, with its ranks left open.

    ``shape`` names the option. ``shards`` [S, features] is added to the ranks of the shards, and
    ``home`` [features] is added to every rank for its own samples. A copied table has no shards:
    all its features are in ``home``. ``keys(ranks)`` are resources that tables can share (a group,
    a storage): feature ``key[0]`` of every rank is the number of the plan's distinct keys that
    start with it.
    """

    shape: Hashable
    shards: Floats
    home: Floats
    keys: Callable[[tuple[int, ...]], tuple[Key, ...]]
    alike: bool = True  # whether all shards add about the same features

    @property
    def num_shards(self) -> int:
        return int(self.shards.shape[0])

    @property
    def whole(self) -> bool:
        """Return whether the table is on a single rank."""
        return self.num_shards == 1


class Pricing(Protocol):
    """Defines the cost model that the search uses; times are in milliseconds.

    All functions increase with every feature and phase: more work never makes a step shorter.
    """

    def rank_ms(self, totals: Floats) -> Floats:
        """Map [.., features] to [.., phases], separately for each rank."""
        ...

    def rough_ms(self, totals: Floats) -> Floats:
        """Approximate ``rank_ms`` at a lower cost: exact enough to select the moves to price."""
        ...

    def combine(self, phases: Floats) -> Floats:
        """Map [N, ranks, phases] to [N]: the time of a step."""
        ...

    def memory(self, totals: Floats) -> Floats:
        """Map [.., features] to [..] bytes in use; linear in the features."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Contains tables with their options, ranks with their memory, and the cost model.

    ``options`` contains the allowed options of every table, and ``limit_bytes`` [ranks] the memory
    of each rank. ``base`` [ranks, features] and the keys ``present`` come from fixed parts, such as
    pinned tables. Raises PlanError if a table has no option for this many ranks.
    """

    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    limit_bytes: Floats
    pricing: Pricing
    base: Floats = field(repr=False)
    present: tuple[Key, ...] = ()

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.options):
            raise PlanError(
                f"{len(self.names)} tables with options for {len(self.options)}; give at least one "
                "table, each with its options"
            )
        for name, options in zip(self.names, self.options, strict=True):
            if all(option.num_shards > self.num_ranks for option in options):
                raise PlanError(
                    f"table {name}: no layout is allowed on {self.num_ranks} ranks; allow whole "
                    "tables, S(0) or B"
                )

    @property
    def num_tables(self) -> int:
        return len(self.names)

    @property
    def num_ranks(self) -> int:
        return int(self.limit_bytes.shape[0])

    def excess(self, totals: Floats) -> Floats:
        """Map [.., ranks, features] to [..]: bytes beyond the limits, summed over all ranks."""
        return np.maximum(self.pricing.memory(totals) - self.limit_bytes, 0.0).sum(axis=-1)


@dataclass(frozen=True, slots=True)
class Move:
    """Puts shard s of a table in its ``option``-th option on ``ranks[s]``; no ranks if copied."""

    option: int
    ranks: tuple[int, ...]


Assignment = tuple[Move, ...]  # one move per table, a complete plan


@dataclass(frozen=True, slots=True)
class Priced:
    """Stores a plan's time, its phases [ranks, phases], and its bytes in use and in excess."""

    ms: float
    phases: Floats
    memory: Floats
    excess_bytes: float

    @property
    def feasible(self) -> bool:
        return self.excess_bytes <= 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """Return the sort key of plans: plans that fit come first, then faster plans."""
        return (self.excess_bytes, self.ms)


class State:
    """Tracks a plan under search: the sums of all ranks, updated as tables are added and
    removed.
    """

    def __init__(self, problem: Problem, assignment: Sequence[Move] = ()) -> None:
        self.problem = problem
        self.totals = problem.base.copy()
        self.moves: list[Move | None] = [None] * problem.num_tables
        self.present: dict[Key, int] = dict.fromkeys(problem.present, 1)
        for table, move in enumerate(assignment):
            self.add(table, move)

    def add(self, table: int, move: Move) -> None:
        option = self.problem.options[table][move.option]
        self.totals += option.home
        if move.ranks:
            self.totals[list(move.ranks)] += option.shards
        for key in option.keys(move.ranks):
            count = self.present.get(key, 0)
            self.present[key] = count + 1
            if not count:
                self.totals[:, key[0]] += 1.0
        self.moves[table] = move

    def remove(self, table: int) -> Move:
        move = self.moves[table]
        if move is None:
            raise PlanError(f"table {self.problem.names[table]} is not placed")
        option = self.problem.options[table][move.option]
        self.totals -= option.home
        if move.ranks:
            self.totals[list(move.ranks)] -= option.shards
        for key in option.keys(move.ranks):
            self.present[key] -= 1
            if not self.present[key]:
                del self.present[key]
                self.totals[:, key[0]] -= 1.0
        self.moves[table] = None
        return move

    def added(self, option: Option, ranks: tuple[int, ...]) -> Floats:
        """Return the [features] that a table adds to every rank: its home and its new keys."""
        extra = option.home
        fresh = [key[0] for key in option.keys(ranks) if key not in self.present]
        if fresh:
            extra = extra.copy()
            for feature in fresh:
                extra[feature] += 1.0
        return extra

    def assignment(self) -> Assignment:
        moves = tuple(move for move in self.moves if move is not None)
        if len(moves) != len(self.moves):
            raise PlanError("a table is not placed yet")
        return moves

    def price(self) -> Priced:
        phases = self.problem.pricing.rank_ms(self.totals)
        return Priced(
            ms=float(self.problem.pricing.combine(phases[None])[0]),
            phases=phases,
            memory=self.problem.pricing.memory(self.totals),
            excess_bytes=float(self.problem.excess(self.totals)),
        )


def price_of(problem: Problem, assignment: Sequence[Move]) -> Priced:
    """Return the price of a whole plan."""
    return State(problem, assignment).price()


def check_assignment(problem: Problem, assignment: Sequence[Move]) -> None:
    """Raise PlanError unless every table has a valid option and distinct ranks of this world."""
    if len(assignment) != problem.num_tables:
        raise PlanError(
            f"plan: {len(assignment)} moves for {problem.num_tables} tables; use one per table"
        )
    for name, options, move in zip(problem.names, problem.options, assignment, strict=True):
        if not 0 <= move.option < len(options):
            raise PlanError(
                f"table {name}: option {move.option} of {len(options)}; use 0 to {len(options) - 1}"
            )
        option, ranks = options[move.option], set(move.ranks)
        if len(move.ranks) != option.num_shards or len(ranks) != len(move.ranks):
            raise PlanError(
                f"table {name}: {option.shape} has {option.num_shards} shards, on ranks "
                f"{list(move.ranks)}; give each shard a different rank"
            )
        if outside := sorted(ranks - set(range(problem.num_ranks))):
            raise PlanError(
                f"table {name}: ranks {outside} outside a world of {problem.num_ranks}; use 0 to "
                f"{problem.num_ranks - 1}"
            )

"""Finds the optimum of a small planning problem by enumeration."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from sbpflow.planner.search.problem import (
    BYTES,
    Assignment,
    Floats,
    Ints,
    Move,
    Option,
    Problem,
    step_ms,
)

CHUNK = 4096  # number of plans to price at a time


def enumerated(
    problem: Problem, numbers: tuple[tuple[int, ...], ...], most: int = 5_000_000
) -> tuple[Assignment, int] | None:
    """Return the best plan that uses only the options ``numbers[table]``, and the number of plans.

    Whole tables may be on any rank; a split table is on the first ranks. Plans that differ only in
    the numbering of ranks count once. The result is exact for split tables on all ranks, or None if
    there are more than ``most`` plans.
    """
    if problem.ranks_per_link > 1 or not problem.has_equal_ranks:
        raise ValueError("ranks that share links or differ in speed cannot be renumbered")
    places = _Places(problem, numbers)
    best: tuple[tuple[float, float], Assignment] | None = None
    count = 0
    for plans in _canonical(problem, numbers, places):
        count += len(plans)
        if count > most:
            return None
        excess, ms = places.priced(plans)
        first = int(np.lexsort((ms, excess))[0])
        rank = (float(excess[first]), float(ms[first]))
        if best is None or rank < best[0]:
            best = (rank, places.assignment(plans[first]))
    return None if best is None else (best[1], count)


class _Places:
    """The moves to try for each table, with the loads that each move adds to the ranks."""

    def __init__(self, problem: Problem, numbers: tuple[tuple[int, ...], ...]) -> None:
        self.problem = problem
        self.moves: list[list[Move]] = []
        self.first: list[dict[int, int]] = []  # for each table: option -> index of its first move
        for options, mine in zip(problem.options, numbers, strict=True):
            moves: list[Move] = []
            first: dict[int, int] = {}
            for n in mine:
                first[n] = len(moves)
                tried = moves_of(problem, options[n], n)
                moves += tried if options[n].num_shards == 1 else tried[:1]
            self.moves.append(moves)
            self.first.append(first)
        self.added = [self._added(table) for table in range(problem.num_tables)]
        self._know_keys()

    def _added(self, table: int) -> Floats:
        """[moves, ranks, 5]"""
        added = np.zeros((len(self.moves[table]), *self.problem.base.shape))
        for place, move in zip(added, self.moves[table], strict=True):
            option = self.problem.options[table][move.option]
            place += option.home
            if move.ranks:
                place[list(move.ranks)] += option.shards
        return added

    def _know_keys(self) -> None:
        keys = [
            [self.problem.options[t][move.option].keys(move.ranks) for move in moves]
            for t, moves in enumerate(self.moves)
        ]
        known = {key for of_table in keys for of_move in of_table for key in of_move}
        known = sorted(known - set(self.problem.present), key=repr)
        self.has = [
            np.array([[key in of_move for key in known] for of_move in of_table], dtype=bool)
            for of_table in keys
        ]
        self.loads = self.problem.key_loads[[key[0] for key in known]]
        joins = sorted({key[0] for key in known if key[0] >= self.problem.first_join})
        self.joins = {n: np.array([key[0] == n for key in known]) for n in joins}
        for columns in self.joins.values():
            self.loads[columns] = 0.0

    def priced(self, plans: Ints) -> tuple[Floats, Floats]:
        """Return the excess bytes and the ms of each of the plans ([N, tables])."""
        totals = np.repeat(self.problem.base[None], len(plans), axis=0)
        present = np.zeros((len(plans), len(self.loads)), dtype=bool)
        for table, added in enumerate(self.added):
            totals += added[plans[:, table]]
            present |= self.has[table][plans[:, table]]
        totals += (present @ self.loads)[:, None]
        for join, columns in self.joins.items():
            several = present[:, columns].sum(axis=1) > 1
            totals += (several[:, None] * self.problem.key_loads[join])[:, None]
        excess = np.maximum(totals[..., BYTES] - self.problem.limit_bytes, 0.0).sum(axis=-1)
        return excess, step_ms(totals)

    def assignment(self, plan: Ints) -> Assignment:
        return tuple(moves[int(n)] for moves, n in zip(self.moves, plan, strict=True))


def moves_of(problem: Problem, option: Option, number: int) -> list[Move]:
    """List the moves of an option: to each rank, to aligned neighbors, or to all ranks."""
    count, size = option.num_shards, problem.num_ranks
    if not count:
        return [Move(number, ())]
    starts = range(0, size - count + 1, count)
    return [Move(number, tuple(range(start, start + count))) for start in starts]


def _canonical(
    problem: Problem, numbers: tuple[tuple[int, ...], ...], places: _Places
) -> Iterator[Ints]:
    """Yield plans as rows of move numbers, in chunks; plans that differ only in the numbering of
    ranks appear once.
    """
    partitions = {
        n: np.array(list(_partitions(n, problem.num_ranks)), dtype=np.int64)
        for n in range(problem.num_tables + 1)
    }
    waiting: list[Ints] = []
    for chosen in product(*numbers):
        whole = [t for t, n in enumerate(chosen) if problem.options[t][n].num_shards == 1]
        rows = np.array([places.first[t][n] for t, n in enumerate(chosen)], dtype=np.int64)
        plans = np.repeat(rows[None], len(partitions[len(whole)]), axis=0)
        plans[:, whole] += partitions[len(whole)]
        waiting.append(plans)
        if sum(map(len, waiting)) >= CHUNK:
            joined = np.concatenate(waiting)
            yield from np.array_split(joined, -(-len(joined) // CHUNK))
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


def _partitions(items: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield all partitions of items into at most ``most`` unnamed sets, as restricted growth
    strings.
    """
    if items == 0:
        yield ()
        return
    for head in _partitions(items - 1, most):
        for place in range(min(max(head, default=-1) + 2, most)):
            yield (*head, place)

"""The best plan of the linearised model by an integer program, and of a small space by enumeration.

The integer program knows every rank's memory, the keys that tables share, and the maximum over
ranks of each phase. Its space: for every table the few options that are cheapest on average, each
family of them represented; shards of a table split over some ranks lie on neighbours.
Without ortools (the ``planner`` extra) there is no integer program; the search goes on without.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from sbpflow.planner.search.linear import Linear, linearised, mean_ms
from sbpflow.planner.search.problem import (
    Assignment,
    Floats,
    Ints,
    Key,
    Move,
    Option,
    Problem,
)

SCALE = 1e5  # integers per millisecond: 10 ns
WEIGHT_SCALE = 1000  # of the weights of phases
OPTIONS_KEPT = 5  # per table
MOST_MOVES = 12_000  # of all tables together, beyond which the program is not tried
CHUNK = 4096  # plans priced at a time


@dataclass(frozen=True, slots=True)
class LinearOptimum:
    """A plan, its time and a lower bound in the linear model (ms); optimal if the two are equal."""

    assignment: Assignment
    linear_ms: float
    bound_ms: float
    moves: int


def moves_of(problem: Problem, option: Option, number: int) -> list[Move]:
    """An option on every rank, on aligned neighbours, or everywhere."""
    count, size = option.num_shards, problem.num_ranks
    if not count:
        return [Move(number, ())]
    if count == size:
        return [Move(number, tuple(range(size)))]
    starts = range(0, size - count + 1, count)
    return [Move(number, tuple(range(start, start + count))) for start in starts]


def kept_options(problem: Problem, linear: Linear, table: int, always: int) -> list[int]:
    """Options of a table: ``always`` and the cheapest on average, of each kind at least one."""
    options = problem.options[table]
    fits = [n for n, option in enumerate(options) if option.num_shards <= problem.num_ranks]
    fits.sort(key=lambda n: mean_ms(problem, linear, options[n]))
    kinds = {0: "copied", 1: "whole"}
    chosen = [always]
    for kind in ("copied", "whole", "split"):
        chosen += [n for n in fits if kinds.get(options[n].num_shards, "split") == kind][:1]
    return list(dict.fromkeys([*chosen, *fits]))[:OPTIONS_KEPT]


def linear_optimum(
    problem: Problem, around: Assignment, *, exact_time: float, seed: int
) -> LinearOptimum | None:
    """The best plan of the model linearised at ``around``; ``None`` if too large, or no ortools.

    ``exact_time`` is in CP-SAT's deterministic units.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return None
    linear = linearised(problem, around)
    tables = range(problem.num_tables)
    kept = [kept_options(problem, linear, table, around[table].option) for table in tables]
    moves = [
        [
            *(
                move
                for n in kept[table]
                for move in moves_of(problem, problem.options[table][n], n)
            ),
        ]
        for table in tables
    ]
    for table in tables:
        if around[table] not in moves[table]:
            moves[table].append(around[table])
    if sum(map(len, moves)) > MOST_MOVES:
        return None
    program = _Program(problem, linear, moves, cp_model.CpModel())
    program.hint(around)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = exact_time
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    status = solver.solve(program.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = tuple(
        next(move for move, chosen in zip(mine, flags, strict=True) if solver.value(chosen))
        for mine, flags in zip(moves, program.chosen, strict=True)
    )
    return LinearOptimum(
        assignment=found,
        linear_ms=solver.objective_value / SCALE / WEIGHT_SCALE,
        bound_ms=solver.best_objective_bound / SCALE / WEIGHT_SCALE,
        moves=sum(map(len, moves)),
    )


@dataclass(frozen=True, slots=True)
class _Price:
    """Features to whole units of the program."""

    slope: Floats

    def __call__(self, row: Floats) -> int:
        return round(SCALE * float(row @ self.slope))


class _Program:
    """The integer program: a flag per move, a flag per key, a maximum per phase.

    ortools has no types that a checker can follow, hence ``Any``.
    """

    def __init__(
        self,
        problem: Problem,
        linear: Linear,
        moves: list[list[Move]],
        model: Any,  # noqa: ANN401
    ) -> None:
        self.problem, self.linear, self.moves, self.model = problem, linear, moves, model
        self.chosen: list[list[Any]] = [[model.new_bool_var("") for _ in mine] for mine in moves]
        for flags in self.chosen:
            model.add_exactly_one(flags)
        self.keys: dict[Key, Any] = {}
        for table, mine in enumerate(moves):
            for move, flag in zip(mine, self.chosen[table], strict=True):
                for key in problem.options[table][move.option].keys(move.ranks):
                    if key not in problem.present:
                        model.add_implication(flag, self._key(key))
        self._limit_memory()
        self._minimise()

    def _key(self, key: Key) -> Any:  # noqa: ANN401
        if key not in self.keys:
            self.keys[key] = self.model.new_bool_var("")
        return self.keys[key]

    def hint(self, around: Assignment) -> None:
        for mine, flags, given in zip(self.moves, self.chosen, around, strict=True):
            for move, flag in zip(mine, flags, strict=True):
                self.model.add_hint(flag, int(move == given))

    def _limit_memory(self) -> None:
        unit = max(1.0, float(self.problem.limit_bytes.max()) / 1e6)

        def held(row: Floats) -> int:
            return int(np.ceil(float(self.problem.pricing.memory(row)) / unit))

        for rank in range(self.problem.num_ranks):
            terms = self._terms(rank, held)
            held_before = float(self.problem.pricing.memory(self.problem.base[rank]))
            room = float(self.problem.limit_bytes[rank]) - held_before
            self.model.add(sum(terms) <= int(room / unit))

    def _terms(self, rank: int, cost: Callable[[Floats], int]) -> list[Any]:
        terms: list[Any] = []
        for table, mine in enumerate(self.moves):
            for move, flag in zip(mine, self.chosen[table], strict=True):
                option = self.problem.options[table][move.option]
                row = option.home
                if rank in move.ranks:
                    row = row + option.shards[move.ranks.index(rank)]
                value = cost(row)
                if value:
                    terms.append(value * flag)
        return terms

    def _minimise(self) -> None:
        total: list[Any] = []
        for phase, weight in enumerate(self.linear.weights):
            slope = self.linear.slopes[:, phase]
            if weight <= 0.0 or not slope.any():
                continue
            longest = self.model.new_int_var(-(2**40), 2**40, "")
            shared = sum(
                round(SCALE * float(slope[key[0]])) * flag for key, flag in self.keys.items()
            )
            for rank in range(self.problem.num_ranks):
                first = float(self.linear.offsets[phase] + self.problem.base[rank] @ slope)
                terms = self._terms(rank, _Price(slope))
                self.model.add(round(SCALE * first) + sum(terms) + shared <= longest)
            total.append(round(WEIGHT_SCALE * float(weight)) * longest)
        self.model.minimize(sum(total))


def enumerated(
    problem: Problem, numbers: tuple[tuple[int, ...], ...], most: int = 5_000_000
) -> tuple[Assignment, int] | None:
    """The best of all plans that lay each table in one of ``numbers[table]``; and their number.

    Whole tables go to any rank, split ones lie on the first aligned neighbours; equal ranks are not
    told apart. Exact on the full model. ``None`` if there are more than ``most``.
    """
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
    """Every move of every table by number, with what it adds: plans are rows of numbers."""

    def __init__(self, problem: Problem, numbers: tuple[tuple[int, ...], ...]) -> None:
        self.problem = problem
        self.moves: list[list[Move]] = []
        self.first: list[dict[int, int]] = []  # of each table: option -> number of its first move
        for options, mine in zip(problem.options, numbers, strict=True):
            moves: list[Move] = []
            first: dict[int, int] = {}
            for n in mine:
                first[n] = len(moves)
                found = moves_of(problem, options[n], n)
                moves += found if options[n].whole else found[:1]
            self.moves.append(moves)
            self.first.append(first)
        self.added = [self._added(table) for table in range(problem.num_tables)]
        self._know_keys()

    def _added(self, table: int) -> Floats:
        """[moves, ranks, features]"""
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
        known = sorted({k for mine in keys for found in mine for k in found}, key=repr)
        known = [key for key in known if key not in self.problem.present]
        self.has = [
            np.array([[key in found for key in known] for found in mine], dtype=bool)
            for mine in keys
        ]
        self.counts = np.zeros((len(known), self.problem.base.shape[1]))
        for row, key in zip(self.counts, known, strict=True):
            row[key[0]] = 1.0

    def priced(self, plans: Ints) -> tuple[Floats, Floats]:
        """Bytes in excess and ms of plans [N, tables]."""
        totals = np.repeat(self.problem.base[None], len(plans), axis=0)
        present = np.zeros((len(plans), len(self.counts)), dtype=bool)
        for table, added in enumerate(self.added):
            totals += added[plans[:, table]]
            present |= self.has[table][plans[:, table]]
        totals += (present @ self.counts)[:, None]
        phases = self.problem.pricing.rank_ms(totals)
        return self.problem.excess(totals), self.problem.pricing.combine(phases)

    def assignment(self, plan: Ints) -> Assignment:
        return tuple(moves[int(n)] for moves, n in zip(self.moves, plan, strict=True))


def _canonical(
    problem: Problem, numbers: tuple[tuple[int, ...], ...], places: _Places
) -> Iterator[Ints]:
    """Plans as rows of move numbers, in chunks, each once up to a renaming of ranks."""
    partitions = {
        n: np.array(list(_partitions(n, problem.num_ranks)), dtype=np.int64)
        for n in range(problem.num_tables + 1)
    }
    waiting: list[Ints] = []
    for chosen in product(*numbers):
        whole = [t for t, n in enumerate(chosen) if problem.options[t][n].whole]
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
    """Restricted growth strings: every way to put items into at most ``most`` unnamed sets."""
    if items == 0:
        yield ()
        return
    for head in _partitions(items - 1, most):
        for place in range(min(max(head, default=-1) + 2, most)):
            yield (*head, place)

"""Finds the best plan of the linearized model with an integer program.

The program models every rank's memory, the keys that tables share, and the maximum over ranks of
each phase. To stay small, the program has a few options for every table: the cheapest ones on
average, with at least one of each family. The shards of a split table are on neighboring ranks.
Without ortools (the ``planner`` extra), the program is skipped and the search continues without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbpflow.planner.search.linear import Linear, linearized, mean_ms
from sbpflow.planner.search.problem import Assignment, Floats, Key, Move, Option, Problem

SCALE = 1e5  # integers per millisecond: the resolution is 10 ns
WEIGHT_SCALE = 1000  # scale of the phase weights
OPTIONS_KEPT = 5  # per table
MOST_MOVES = 12_000  # limit for all tables; larger programs are not tried


@dataclass(frozen=True, slots=True)
class LinearOptimum:
    """Contains a plan, its time and the lower bound in ms of the linear model. An optimal plan's
    time equals the bound.
    """

    assignment: Assignment
    linear_ms: float
    bound_ms: float


def moves_of(problem: Problem, option: Option, number: int) -> list[Move]:
    """List an option's moves: to each rank, to aligned neighbors, or to all ranks."""
    count, size = option.num_shards, problem.num_ranks
    if not count:
        return [Move(number, ())]
    if count == size:
        return [Move(number, tuple(range(size)))]
    starts = range(0, size - count + 1, count)
    return [Move(number, tuple(range(start, start + count))) for start in starts]


def cheapest_options(problem: Problem, linear: Linear, table: int, always: int) -> list[int]:
    """Return the options ``always`` and a table's cheapest on average, at least one of each
    kind.
    """
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
    """Return the best plan of the model linearized at ``around``; None if too large or no ortools.

    ``exact_time`` is in CP-SAT's deterministic units.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return None
    linear = linearized(problem, around)
    moves: list[list[Move]] = []
    for table, options in enumerate(problem.options):
        numbers = cheapest_options(problem, linear, table, around[table].option)
        tried = [move for n in numbers for move in moves_of(problem, options[n], n)]
        moves.append(tried if around[table] in tried else [*tried, around[table]])
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
    assignment = tuple(
        next(move for move, flag in zip(mine, flags, strict=True) if solver.value(flag))
        for mine, flags in zip(moves, program.chosen, strict=True)
    )
    return LinearOptimum(
        assignment=assignment,
        linear_ms=solver.objective_value / SCALE / WEIGHT_SCALE,
        bound_ms=solver.best_objective_bound / SCALE / WEIGHT_SCALE,
    )


class _Program:
    """Builds the integer program: a flag per move, a flag per key, and a maximum per phase.

    ``Any`` is used because ortools has no types that a checker understands.
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
        self._minimize()

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

    def _minimize(self) -> None:
        total: list[Any] = []
        for phase, weight in enumerate(self.linear.weights):
            slope = self.linear.slopes[:, phase]
            if weight <= 0.0 or not slope.any():
                continue

            def units(row: Floats, slope: Floats = slope) -> int:
                return round(SCALE * float(row @ slope))

            longest = self.model.new_int_var(-(2**40), 2**40, "")
            shared = sum(
                round(SCALE * float(slope[key[0]])) * flag for key, flag in self.keys.items()
            )
            for rank in range(self.problem.num_ranks):
                first = float(self.linear.offsets[phase] + self.problem.base[rank] @ slope)
                terms = self._terms(rank, units)
                self.model.add(round(SCALE * first) + sum(terms) + shared <= longest)
            total.append(round(WEIGHT_SCALE * float(weight)) * longest)
        self.model.minimize(sum(total))

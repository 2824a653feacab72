"""Generates starting plans: one shape for all tables, small tables copied, and greedy plans.

These are the plans that experts and published heuristics would try, so the search result is never
worse than theirs.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.local import build, mean_ms, weights_of
from sbpflow.planner.search.problem import BYTES, Assignment, Floats, Key, Problem

COPIED_SHARES = (0.25, 0.5, 0.75)  # shares of the tables to copy, starting with the smallest tables


def heaviest_first(weights: Floats) -> list[int]:
    """Sort the table numbers by descending weight."""
    return [int(table) for table in np.argsort(-weights, kind="stable")]


def bytes_of(problem: Problem) -> Floats:
    """Return the bytes [tables] of each table if stored once, in its smallest option."""
    return np.array(
        [
            min(float(option.home[BYTES] + option.shards[:, BYTES].sum()) for option in options)
            for options in problem.options
        ]
    )


def narrowed(problem: Problem, chosen: Sequence[Sequence[Hashable]]) -> Inserter:
    """Return an inserter that tries only the shapes of ``chosen[table]`` that the table allows."""
    allowed: list[tuple[int, ...]] = []
    for options, shapes in zip(problem.options, chosen, strict=True):
        numbers = tuple(
            n
            for n, option in enumerate(options)
            if option.shape in shapes and option.num_shards <= problem.num_ranks
        )
        allowed.append(numbers or tuple(range(len(options))))
    return Inserter(problem, tuple(allowed))


def families(problem: Problem) -> list[Hashable]:
    """Return the shapes that tables can have, sorted by the mean rank's ms if all tables that allow
    the shape use it.
    """
    least = weights_of(problem)
    total: dict[Hashable, float] = {}
    for weight, options in zip(least.tolist(), problem.options, strict=True):
        for option in options:
            more = mean_ms(problem, option) - weight
            total[option.shape] = total.get(option.shape, 0.0) + more
    return sorted(total, key=lambda shape: total[shape])


def homogeneous(
    problem: Problem, weights: Floats, shapes: Sequence[Hashable]
) -> Iterator[tuple[str, Assignment]]:
    """Yield one plan per shape, in which all tables that allow the shape use it."""
    order = heaviest_first(weights)
    for shape in shapes:
        inserter = narrowed(problem, [(shape,)] * problem.num_tables)
        yield f"all {shape}", build(problem, inserter, order).assignment()


def partly_copied(
    problem: Problem, weights: Floats, rests: Sequence[Hashable]
) -> Iterator[tuple[str, Assignment]]:
    """Yield plans that copy the smallest tables and use the same shape for all other tables."""
    copied = {
        option.shape for options in problem.options for option in options if not option.num_shards
    }
    if not copied:
        return
    small_first = np.argsort(bytes_of(problem), kind="stable")
    order = heaviest_first(weights)
    for share in COPIED_SHARES:
        small = {int(table) for table in small_first[: int(share * problem.num_tables)]}
        for rest in rests:
            if not small or rest in copied:
                continue
            chosen = [
                tuple(copied) if table in small else (rest,) for table in range(problem.num_tables)
            ]
            built = build(problem, narrowed(problem, chosen), order)
            yield f"{share:.0%} copied, else {rest}", built.assignment()


def mixed(
    problem: Problem, weights: Floats, shapes: Sequence[Hashable]
) -> Iterator[tuple[str, Assignment]]:
    """Yield a plan for each pair of shapes, built as if the shapes' keys were already paid for.
    Otherwise, greedy insertion would never create a group that only pays off for several tables
    together.
    """
    order = heaviest_first(weights)
    for first, second in combinations(shapes, 2):
        both = [(first, second)] * problem.num_tables
        inserter = narrowed(problem, both)
        built = build(_paid(problem, both), inserter, order)
        yield f"{first} and {second}", built.assignment()


def _paid(problem: Problem, chosen: Sequence[Sequence[Hashable]]) -> Problem:
    """Return the problem with the keys of these shapes already present on all ranks."""
    present: dict[Key, None] = dict.fromkeys(problem.present)
    base = problem.base.copy()
    for options, shapes in zip(problem.options, chosen, strict=True):
        for option in options:
            if option.shape in shapes and option.num_shards <= problem.num_ranks:
                for key in option.keys(tuple(range(option.num_shards))):
                    if key not in present:
                        present[key] = None
                        base += problem.key_loads[key[0]]
    return replace(problem, base=base, present=tuple(present))


def greedy(
    problem: Problem, weights: Floats, inserter: Inserter
) -> Iterator[tuple[str, Assignment]]:
    """Yield plans that insert tables one after another, each with the currently best option and
    ranks."""
    yield "greedy", build(problem, inserter, heaviest_first(weights)).assignment()
    whole = [[option.shape for option in options if option.whole] for options in problem.options]
    built = build(problem, narrowed(problem, whole), heaviest_first(weights))
    yield "greedy, whole tables", built.assignment()
    largest = heaviest_first(bytes_of(problem))
    yield "greedy, largest first", build(problem, inserter, largest).assignment()

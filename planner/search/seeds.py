"""Generates starting plans: greedy plans, and one shape for all tables.

These are plans that experts would try. By the model's prices, the search result is never worse.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.local import build
from sbpflow.planner.search.problem import BYTES, Assignment, Floats, Problem


def heaviest_first(weights: Floats) -> list[int]:
    """Sort the table numbers by descending weight."""
    return np.argsort(-weights, kind="stable").tolist()


def bytes_of(problem: Problem) -> Floats:
    """Return the bytes [tables] that each table needs if stored once, in its smallest option."""
    return np.array(
        [
            min(float(option.home[BYTES] + option.shards[:, BYTES].sum()) for option in options)
            for options in problem.options
        ]
    )


def narrowed(problem: Problem, chosen: Sequence[Sequence[Hashable]]) -> Inserter:
    """Return an inserter that tries only the shapes of ``chosen[table]`` that the table allows, or
    all shapes if it allows none of these.
    """
    allowed: list[tuple[int, ...]] = []
    for options, shapes in zip(problem.options, chosen, strict=True):
        numbers = tuple(n for n, option in enumerate(options) if option.shape in shapes)
        allowed.append(numbers or tuple(range(len(options))))
    return Inserter(problem, tuple(allowed))


def families(problem: Problem) -> list[Hashable]:
    """Return the shapes that tables can have, sorted by the mean ms per rank of a plan in which all
    tables that allow the shape use it.
    """
    total: dict[Hashable, float] = {}
    for weight, options in zip(problem.weights.tolist(), problem.options, strict=True):
        for option in options:
            more = problem.mean_ms(option) - weight
            total[option.shape] = total.get(option.shape, 0.0) + more
    return sorted(total, key=lambda shape: total[shape])


def homogeneous(problem: Problem, shapes: Sequence[Hashable]) -> Iterator[tuple[str, Assignment]]:
    """Yield one plan per shape, in which all tables that allow the shape use it."""
    order = heaviest_first(problem.weights)
    for shape in shapes:
        yield f"all {shape}", build(narrowed(problem, [(shape,)] * problem.num_tables), order)


def greedy(inserter: Inserter) -> Iterator[tuple[str, Assignment]]:
    """Yield plans that insert one table after another, each where it is best at that point."""
    problem = inserter.problem
    order = heaviest_first(problem.weights)
    yield "greedy", build(inserter, order)
    whole = [[o.shape for o in options if o.num_shards == 1] for options in problem.options]
    yield "greedy, whole tables", build(narrowed(problem, whole), order)
    yield "greedy, largest first", build(inserter, heaviest_first(bytes_of(problem)))


def around_largest(problem: Problem, count: int) -> list[Assignment]:
    """Return greedy plans in which the table with the most bytes has each of its ``count`` cheapest
    options. A plan may exceed the memory limits.

    With memory limits, the place of the largest table decides where the others fit. Local search
    rarely moves it, because many tables would have to move at the same time.
    """
    largest = int(bytes_of(problem).argmax())
    options = sorted(problem.options[largest], key=problem.mean_ms)
    order = [largest, *(table for table in heaviest_first(problem.weights) if table != largest)]
    shapes = [[option.shape for option in mine] for mine in problem.options]
    plans: list[Assignment] = []
    for option in options[:count]:
        shapes[largest] = [option.shape]
        plans.append(build(narrowed(problem, shapes), order))
    return plans

"""Plans to start from: all tables alike, the small ones copied, and greedy plans.

Each is what an expert or a published heuristic would try first, so a search is never worse.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.local import build, lay_out
from sbpflow.planner.search.problem import Assignment, Floats, Key, Problem

COPIED_SHARES = (0.25, 0.5, 0.75)  # of the tables, the smallest first


def heaviest_first(weights: Floats) -> list[int]:
    """Table numbers by falling weight."""
    return [int(table) for table in np.argsort(-weights, kind="stable")]


def bytes_of(problem: Problem) -> Floats:
    """[tables] bytes of each table when it is stored once, in its smallest option."""
    held = [
        [problem.pricing.memory(option.home + option.shards.sum(axis=0)) for option in options]
        for options in problem.options
    ]
    return np.array([float(min(sizes)) for sizes in held])


def narrowed(problem: Problem, chosen: Sequence[Sequence[Hashable]]) -> Inserter:
    """An inserter that tries, for each table, only the shapes of ``chosen[table]`` that it has."""
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
    """The shapes that at least one table can have, in order of first appearance."""
    return list(dict.fromkeys(option.shape for options in problem.options for option in options))


def homogeneous(problem: Problem, weights: Floats) -> Iterator[tuple[str, Assignment]]:
    """For every shape, a plan with all tables that allow it in that shape."""
    order = heaviest_first(weights)
    for shape in families(problem):
        inserter = narrowed(problem, [(shape,)] * problem.num_tables)
        yield f"all {shape}", lay_out(problem, inserter, order).assignment()


def partly_copied(
    problem: Problem, weights: Floats, rests: Sequence[Hashable]
) -> Iterator[tuple[str, Assignment]]:
    """The smallest tables copied, the others in one shape."""
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
            built = lay_out(problem, narrowed(problem, chosen), order)
            yield f"{share:.0%} copied, else {rest}", built.assignment()


def mixed(
    problem: Problem, weights: Floats, shapes: Sequence[Hashable]
) -> Iterator[tuple[str, Assignment]]:
    """Greedy plans of two shapes each, with the keys of both already paid for.

    Otherwise no single table would pay for a group that is worth it for several tables.
    """
    order = heaviest_first(weights)
    for first, second in combinations(shapes, 2):
        both = [(first, second)] * problem.num_tables
        inserter = narrowed(problem, both)
        built = build(_paid(problem, both), inserter, order)
        yield f"{first} and {second}", built.assignment()


def _paid(problem: Problem, chosen: Sequence[Sequence[Hashable]]) -> Problem:
    """The problem with the keys of these shapes on all ranks present from the start."""
    present: dict[Key, None] = dict.fromkeys(problem.present)
    base = problem.base.copy()
    for options, shapes in zip(problem.options, chosen, strict=True):
        for option in options:
            if option.shape in shapes and option.num_shards <= problem.num_ranks:
                for key in option.keys(tuple(range(option.num_shards))):
                    if key not in present:
                        present[key] = None
                        base[:, key[0]] += 1.0
    return replace(problem, base=base, present=tuple(present))


def greedy(
    problem: Problem, weights: Floats, inserter: Inserter
) -> Iterator[tuple[str, Assignment]]:
    """Tables one after another, each in the option and on the ranks that are best then."""
    yield "greedy", build(problem, inserter, heaviest_first(weights)).assignment()
    whole = [[option.shape for option in options if option.whole] for options in problem.options]
    built = build(problem, narrowed(problem, whole), heaviest_first(weights))
    yield "greedy, whole tables", built.assignment()
    largest = heaviest_first(bytes_of(problem))
    yield "greedy, largest first", build(problem, inserter, largest).assignment()

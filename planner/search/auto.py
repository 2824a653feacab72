"""Runs the whole search: seeds, local search from the best seeds, and a final descent.

By the model's prices, the result is never worse than any seed, and no table has a better place
while the others stay. The same problem, seed and effort give the same plan, because budgets limit
insertions instead of seconds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from sbpflow.planner.search.bounds import bound
from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.local import LocalSearch, build, descend, weights_of
from sbpflow.planner.search.problem import (
    BYTES,
    Assignment,
    Priced,
    Problem,
    check_assignment,
    price_of,
)
from sbpflow.planner.search.seeds import (
    bytes_of,
    families,
    greedy,
    heaviest_first,
    homogeneous,
    mixed,
    partly_copied,
)

STARTS = 4  # number of seeds that local search improves before it continues with the best
ALIKE = 8  # number of the cheapest shapes that are tried for all tables
MIXED = 3  # number of the cheapest shapes that are tried in pairs
SCALES = (1.0, 1.1, 1.25)
CLOSE = 1e-3  # search ends within this share of the lower bound: far less than any model's error


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Contains the best plan, every seed by name (``plans``), and the seeds' prices (``seeds``).

    ``others`` are the next best plans of the search; measurements can help to choose among them.
    """

    assignment: Assignment
    priced: Priced
    seeds: Mapping[str, Priced]
    plans: Mapping[str, Assignment]
    others: tuple[Assignment, ...]


def default_insertions(problem: Problem) -> int:
    """Return the default effort: a few seconds for 200 tables x 16 ranks, on one core."""
    return max(800, min(4000, 40 * problem.num_tables))


def search(
    problem: Problem,
    *,
    seed: int = 0,
    insertions: int | None = None,
    given: Mapping[str, Assignment] | None = None,
) -> Found:
    """Find the fastest plan that fits, or the plan with the smallest excess if none fits.

    ``given`` contains additional plans to start from, by name. ``insertions`` limits local search.
    """
    insertions = insertions or default_insertions(problem)
    inserter = Inserter(problem)
    plans = dict(given or {})
    for plan in plans.values():
        check_assignment(problem, plan)
    plans |= _seeds(problem, inserter)
    priced = {name: price_of(problem, plan) for name, plan in plans.items()}
    best = _starts(plans, priced)
    feasible = [price.ms for price in priced.values() if price.feasible]
    lower = bound(problem, min(feasible, default=np.inf))
    local = LocalSearch(problem, Inserter(problem, lower.options), seed, lower.ms * (1 + CLOSE))
    with tqdm(total=insertions, desc="planning", delay=2, disable=None) as bar:
        pool = [local.improve(plan, insertions // 8, bar.update) for plan in best]
        pool.sort(key=lambda plan: price_of(problem, plan).rank)
        pool.insert(0, local.improve(pool[0], insertions - local.insertions, bar.update))
    pool = [descend(problem, inserter, pool[0]), *pool, *best]
    unique = sorted(dict.fromkeys(pool), key=lambda plan: price_of(problem, plan).rank)
    return Found(
        assignment=unique[0],
        priced=price_of(problem, unique[0]),
        seeds=priced,
        plans=plans,
        others=tuple(unique[1:]),
    )


def _seeds(problem: Problem, inserter: Inserter) -> Iterator[tuple[str, Assignment]]:
    """Generate plans by name: greedy ones, the cheapest options on average, and simple ones."""
    weights = weights_of(problem)
    yield from greedy(problem, weights, inserter)
    cheapest = bound(problem, np.inf).options
    narrow = Inserter(problem, tuple(options[:1] for options in cheapest))
    state = build(problem, narrow, heaviest_first(weights))
    yield "options of the lower bound", state.assignment()
    mean = state.loads[:, :BYTES].mean(axis=0)
    for order in (heaviest_first(weights), heaviest_first(bytes_of(problem))):
        for scale in SCALES:
            packed = build(problem, Inserter(problem, floor=scale * mean), order)
            yield f"packed {scale} {order[:2]}", packed.assignment()
    leading = families(problem)[:ALIKE]
    yield from homogeneous(problem, weights, leading)
    yield from partly_copied(problem, weights, leading[:MIXED])
    yield from mixed(problem, weights, leading[:MIXED])


def _starts(plans: Mapping[str, Assignment], priced: Mapping[str, Priced]) -> list[Assignment]:
    """Return the best seeds with different prices, so that no plan appears under two names."""
    chosen: list[Assignment] = []
    seen: set[tuple[float, float]] = set()
    for name in sorted(plans, key=lambda name: priced[name].rank):
        rank = priced[name].rank
        place = (round(rank[0], 3), round(rank[1], 9))
        if place not in seen:
            seen.add(place)
            chosen.append(plans[name])
        if len(chosen) == STARTS:
            break
    return chosen

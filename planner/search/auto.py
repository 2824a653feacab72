"""Runs the whole search: seeds, local search from the best seeds, and a final descent.

By the model's prices, the result is at least as good as every seed, and moving a single table would
not improve it. The same problem, seed, and number of insertions lead to the same plan, because no
limit is measured in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from sbpflow.planner.search.bounds import CLOSE, bound
from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.local import LocalSearch, build, descend
from sbpflow.planner.search.problem import (
    NO_LIMIT,
    Assignment,
    Priced,
    Problem,
    price_of,
)
from sbpflow.planner.search.seeds import (
    around_largest,
    families,
    greedy,
    heaviest_first,
    homogeneous,
)

STARTS = 4  # number of seeds that local search improves before it continues with the best result
NUM_ALIKE = 8  # how many of the cheapest shapes are tried for all tables at once
# With memory limits, how many options of the largest table are tried, and from how many of these
# plans local search starts.
NUM_LARGEST, LARGEST_STARTS = 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan, every seed by name (``plans``), and the seeds' prices (``seeds``). ``others``
    has the search's next best plans, which may turn out to be faster when measured.
    """

    assignment: Assignment
    priced: Priced
    seeds: Mapping[str, Priced]
    plans: Mapping[str, Assignment]
    others: tuple[Assignment, ...]


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
    if insertions is None:  # a few seconds for 200 tables x 16 ranks on one core
        insertions = max(2000, min(4000, 40 * problem.num_tables + 32 * problem.num_ranks))
    plans = dict(given or {})
    inserter = Inserter(problem)
    plans |= greedy(inserter)
    lower = bound(problem, _least_ms(problem, plans), branch=False)
    cheapest = Inserter(problem, tuple(options[:1] for options in lower.options))
    plans["options of the lower bound"] = build(cheapest, heaviest_first(problem.weights))
    local = LocalSearch(inserter, seed, lower.ms * (1 + CLOSE))
    with tqdm(total=insertions, desc="planning", delay=2, disable=None) as bar:
        pool = [local.improve(_starts(problem, plans)[0], insertions // 4, bar.update)]
        if price_of(problem, pool[0]).rank > (0.0, local.enough_ms):
            plans |= homogeneous(problem, families(problem)[:NUM_ALIKE])
            allowed = bound(problem, _least_ms(problem, plans), branch=False).options
            local.inserter = Inserter(problem, allowed)
            starts = _starts(problem, plans)
            if problem.limit_bytes.min() < NO_LIMIT:
                count = min(NUM_LARGEST, insertions // (4 * problem.num_tables))
                others = around_largest(problem, count)
                starts += sorted(others, key=lambda plan: price_of(problem, plan).ms)[
                    :LARGEST_STARTS
                ]
            bar.total = local.insertions + (len(starts) + 2) * (insertions // 8)
            pool += [local.improve(plan, insertions // 8, bar.update) for plan in starts]
            pool.sort(key=lambda plan: price_of(problem, plan).rank)
            pool.insert(0, local.improve(pool[0], insertions // 4, bar.update))
    pool = [descend(inserter, pool[0]), *pool, *_starts(problem, plans)]
    unique = sorted(dict.fromkeys(pool), key=lambda plan: price_of(problem, plan).rank)
    return Found(
        assignment=unique[0],
        priced=price_of(problem, unique[0]),
        seeds={name: price_of(problem, plan) for name, plan in plans.items()},
        plans=plans,
        others=tuple(unique[1:]),
    )


def _least_ms(problem: Problem, plans: Mapping[str, Assignment]) -> float:
    prices = (price_of(problem, plan) for plan in plans.values())
    return min((price.ms for price in prices if price.feasible), default=np.inf)


def _starts(problem: Problem, plans: Mapping[str, Assignment]) -> list[Assignment]:
    """Return the best plans, keeping one per price so that no plan appears under two names."""
    by_price: dict[tuple[float, float], Assignment] = {}
    for plan in sorted(plans.values(), key=lambda plan: price_of(problem, plan).rank):
        excess_bytes, ms = price_of(problem, plan).rank
        by_price.setdefault((round(excess_bytes, 3), round(ms, 9)), plan)
    return list(by_price.values())[:STARTS]

"""Defines small problems that can be enumerated."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from sbpflow.planner.search.auto import search
from sbpflow.planner.search.insertion import Inserter, goal
from sbpflow.planner.search.problem import Key, Move, Option, Problem, State

GROUPS = 0  # the feature number in each key
KEY_LOADS = np.array([[0.1, 0.05, 0.1, 0.05, 0.0]])
NOTHING = [0.0] * 5


def keys_of(*keys: Key):
    return lambda _ranks: keys


def option(shape, shards, home, *keys):
    """Return an option with equal shards."""
    return Option(shape, np.array(shards).reshape(-1, 5), np.array(home), keys_of(*keys))


def make_problem(
    num_tables, num_ranks, *, seed=0, slack=2.0, splits=True, ranks_per_link=1
) -> Problem:
    """Return a problem of random tables that may be whole, split by rows over 2 or all ranks, or
    copied.
    """
    random = np.random.default_rng(seed)
    work = random.lognormal(0.0, 1.0, num_tables)
    sent = 0.2 * random.lognormal(0.0, 1.0, (3, num_tables))
    held = random.lognormal(0.0, 1.5, num_tables) * 1e9
    options = []
    for load in np.stack([work, *sent, held], axis=1):
        mine = [option(("whole",), [load], NOTHING, (GROUPS, "columns"))]
        for parts in sorted({2, num_ranks}) if splits else ():
            shard = load / parts * [1.1, 1.5, 1.4, 1.6, 1.0]
            home = [0.05 * load[0] / parts, *NOTHING[1:]]
            mine.append(option(("rows", parts), [shard] * parts, home, (GROUPS, "unique")))
        if splits:
            copied = load * [1.0, 0.0, 0.0, 4.0, 1.0]
            mine.append(option(("copied",), [], copied, (GROUPS, "local")))
        options.append(tuple(mine))
    limit = np.full(num_ranks, max(slack * held.sum() / num_ranks, held.max() * 1.01))
    return Problem(
        names=tuple(f"t{n}" for n in range(num_tables)),
        options=tuple(options),
        limit_bytes=limit,
        key_loads=KEY_LOADS,
        base=np.zeros((num_ranks, 5)),
        slowness=np.ones((num_ranks, 5)),
        ranks_per_link=ranks_per_link,
    )


def with_joins(problem) -> Problem:
    """Return the problem in which plans with several groups also pay three times a group's load."""

    def joined(one):
        keys = one.keys(())
        return replace(one, keys=keys_of(*keys, *((1, text) for _, text in keys)))

    return replace(
        problem,
        options=tuple(tuple(map(joined, mine)) for mine in problem.options),
        key_loads=np.concatenate([KEY_LOADS, 3 * KEY_LOADS]),
        first_join=1,
    )


def with_exchange(problem, name):
    """Return the problem in which all tables use this exchange."""
    options = tuple(tuple(o for o in mine if o.shape.exchange == name) for mine in problem.options)
    return replace(problem, options=options)


def all_plans(problem):
    """Return an iterator over all plans, with the shards of a table on ascending ranks."""
    moves = [
        [
            Move(n, ranks)
            for n, one in enumerate(options)
            for ranks in combinations(range(problem.num_ranks), one.num_shards)
        ]
        for options in problem.options
    ]
    return product(*moves)


def check_insertions(problem):
    """Check the times and goals of insertions into a plan, one table after another."""
    plan = search(problem, insertions=30).assignment
    state, inserter = State(problem, plan), Inserter(problem)
    for table in range(problem.num_tables):
        before = state.remove(table)
        for insertion in inserter.ranked(state, table):
            state.add(table, insertion.move)
            assert insertion.ms == pytest.approx(state.price().ms, rel=1e-9)
            assert insertion.goal == pytest.approx(
                goal(problem, state.loads, inserter.penalty), rel=1e-3
            )
            state.remove(table)
        state.add(table, before)

"""Tests that plans and their predicted times take the speeds of ranks into account."""

from dataclasses import replace

import numpy as np
import pytest

from sbpflow.embedding.plan.price import price_plan
from sbpflow.errors import ConfigError
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import PLANNERS, make_plan, priced_plan
from sbpflow.planner.search.auto import search
from sbpflow.planner.search.balance import balance
from sbpflow.planner.search.bounds import CLOSE, bound
from sbpflow.planner.search.problem import Move, State, price_of
from sbpflow.planner.shapes import problem_of
from sbpflow.planner.task import embedding_plan
from sbpflow.planner.workloads import random_task
from sbpflow.runtime.ranks.topology import Topology
from tests.planner.problems import GROUPS, KEY_LOADS, all_plans, check_insertions, make_problem
from tests.planner.tasks import make_task, mixed_plan
from tests.planner.test_search import keys_by_ranks, slow_link
from tests.quick import quick

SMALL = 300  # insertions
SPEEDS = (1.0, 0.5, 0.8)


def unequal(problem, speeds):
    """Return the problem with ranks of these speeds."""
    slowness = np.ones((problem.num_ranks, 5))
    slowness[:, 0] /= speeds
    return replace(problem, slowness=slowness, base=problem.base * slowness)


def problems(seed):
    """Return small problems: with and without a tight limit, with keys that depend on ranks, with
    work that all ranks share, and with shards that make ranks faster.
    """
    plain = make_problem(4, 3, seed=seed, slack=9.0)
    by_ranks = tuple(
        tuple(replace(o, keys=keys_by_ranks) if o.num_shards == 2 else o for o in mine)
        for mine in plain.options
    )
    task = make_task(world_size=3, rows=(4000, 50, 900))
    return [
        plain,
        make_problem(4, 3, seed=seed, slack=1.3),
        replace(plain, options=by_ranks, key_loads=2 * KEY_LOADS),
        replace(plain, base=np.tile([1.0, 0.2, 0.2, 0.1, 0.0], (3, 1))),
        problem_of(TaskCost(slow_link(), task)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick(range(3), lambda seed: seed == 0))
def test_the_search_reaches_the_optimum_and_no_plan_is_faster_than_the_bound(seed):
    for number, equal in enumerate(problems(seed)):
        problem = unequal(equal, SPEEDS)
        prices = [price_of(problem, plan) for plan in all_plans(problem)]
        best = min(price.ms for price in prices if price.feasible)
        found = search(problem).priced
        assert found.feasible
        assert best <= found.ms * (1 + 1e-9) <= best * (1 + CLOSE), number
        for plan_ms in (best, 1.3 * best, 2.0 * best):
            for branch in (False, True):
                assert bound(problem, plan_ms, branch=branch).ms <= best * (1 + 1e-9), number


@pytest.mark.slow
def test_options_that_the_bound_drops_are_in_no_better_plan():
    for equal in problems(5):
        problem = unequal(equal, SPEEDS)
        prices = [(plan, price_of(problem, plan)) for plan in all_plans(problem)]
        ms = sorted(price.ms for _, price in prices if price.feasible)
        lower = bound(problem, ms[len(ms) // 50])
        for plan, price in prices:
            if price.feasible and price.ms < lower.plan_ms * (1 - 1e-9):
                assert all(m.option in kept for m, kept in zip(plan, lower.options, strict=True))


def test_an_insertion_has_the_price_of_the_plan():
    for equal in problems(3):
        problem = unequal(equal, SPEEDS)
        check_insertions(problem)


def test_balancing_keeps_the_sums_right_and_gives_fast_ranks_more():
    problem = unequal(make_problem(40, 3, seed=3, splits=False, slack=9.0), SPEEDS)
    state = State(problem, tuple(Move(0, (n % 3,)) for n in range(40)))
    before = state.price()
    balance(state, 200)
    after = state.price()
    assert after.ms < before.ms
    work = after.loads[:, 0] * SPEEDS
    assert work[0] > work[2] > work[1]
    np.testing.assert_allclose(after.loads, price_of(problem, state.assignment()).loads)


def test_speeds_divide_the_work_of_each_rank_and_nothing_else():
    task, speeds = make_task(), (1.0, 0.5, 2.0, 4.0)
    plan = mixed_plan(task)
    equal, ones, unequal_speeds = (
        priced_plan("a plan", plan, TaskCost(described("h100-dgx"), replace(task, speeds=given)))
        for given in (None, (1.0,) * 4, speeds)
    )
    assert (ones.priced.loads == equal.priced.loads).all()
    factors = np.ones((4, 5))
    factors[:, 0] /= speeds
    np.testing.assert_allclose(unequal_speeds.priced.loads, equal.priced.loads * factors)


def test_the_prediction_equals_the_price_of_the_search():
    task = replace(
        random_task(1, num_tables=12, world_size=4, held_out=True), speeds=(1.0, 0.25, 1.0, 2.0)
    )
    cost = TaskCost(described("h100-dgx"), task)
    for name in PLANNERS[:7]:
        planned = make_plan(name, cost, insertions=SMALL)
        assert cost.predict(planned.plan).step_ms == pytest.approx(planned.priced.ms, rel=1e-9)


@pytest.mark.slow
def test_a_planner_that_knows_the_speeds_gives_a_slow_rank_less_work():
    task = random_task(3, num_tables=26, world_size=4, held_out=True, batch_size=65536)
    slow = TaskCost(described("h100-dgx"), replace(task, speeds=(1.0, 1.0, 1.0, 0.1)))
    blind = TaskCost(described("h100-dgx"), task)
    knowing = make_plan("auto", slow, insertions=SMALL).plan
    unknowing = make_plan("auto", blind, insertions=SMALL).plan
    assert slow.predict(knowing).step_ms < 0.8 * slow.predict(unknowing).step_ms
    shards = [sum(3 in choice.ranks for choice in p.values()) for p in (knowing, unknowing)]
    assert shards[0] < shards[1]


def test_the_built_in_prices_count_the_speed_of_the_slowest_rank():
    task = make_task()
    plan = embedding_plan(task, mixed_plan(task))
    hosts = ((0, 1), (2, 3))
    equal = price_plan(plan, task.batch_size, Topology(hosts=hosts))
    slow = price_plan(plan, task.batch_size, Topology(hosts=hosts, speeds=(1.0, 1.0, 1.0, 0.1)))
    fast = price_plan(plan, task.batch_size, Topology(hosts=hosts, speeds=(4.0,) * 4))
    assert slow.work_ms > equal.work_ms
    assert fast.work_ms == pytest.approx(equal.work_ms / 4)
    assert slow.transfer_ms == equal.transfer_ms == fast.transfer_ms


@pytest.mark.parametrize("bad", [0.0, -2.0, 1e-320, 1e17, np.nan, np.inf])
def test_impossible_speeds_are_refused(bad):
    message = "a number from 0.001 to 1000 for each of the 4 ranks"
    for speeds in ((1.0,), (1.0, 1.0, bad, 1.0)):
        with pytest.raises(ConfigError, match=message):
            replace(make_task(), speeds=speeds)
        with pytest.raises(ConfigError, match=message):
            Topology(hosts=((0, 1, 2, 3),), speeds=speeds)


def test_the_bound_counts_the_fixed_work_of_a_very_slow_rank():
    task = random_task(3, num_tables=10, world_size=4, held_out=True, batch_size=65536)
    cost = TaskCost(described("h100-dgx"), replace(task, speeds=(1.0, 1.0, 1.0, 0.1)))
    planned = make_plan("auto", cost, insertions=SMALL)
    lower = bound(planned.problem, planned.priced.ms)
    assert lower.ms > planned.problem.base[3, 0]
    assert lower.gap < 1.5


@pytest.mark.few(1)
@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_equal_speeds_lead_to_the_plan_for_equal_ranks(speed):
    task = random_task(4, num_tables=20, world_size=4, held_out=True)
    equal, scaled = (
        make_plan(
            "auto",
            TaskCost(described("h100-dgx"), replace(task, speeds=speeds)),
            insertions=SMALL,
        ).priced
        for speeds in (None, (speed,) * 4)
    )
    assert scaled.loads[:, 0].max() == pytest.approx(equal.loads[:, 0].max() / speed, rel=0.05)


def test_keys_that_depend_on_ranks_are_counted_once_per_rank_set():
    problem = unequal(problems(0)[2], SPEEDS)
    split = next(n for n, one in enumerate(problem.options[0]) if one.num_shards == 2)
    state = State(problem, (Move(split, (0, 2)), Move(0, (0,)), Move(0, (1,)), Move(0, (2,))))
    assert (GROUPS, "rows on (0, 2)") in state.present
    together = state.loads.copy()
    state.add(0, state.remove(0))
    np.testing.assert_allclose(state.loads, together)

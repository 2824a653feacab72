"""Tests that the planner counts the transfers of ranks that share a link together."""

from dataclasses import replace

import numpy as np
import pytest

from sbpflow.costs.counts import INDEX
from sbpflow.costs.prices import PHASES, shared
from sbpflow.planner.clusters import described, link_of, with_link
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.search.auto import search
from sbpflow.planner.search.balance import balance
from sbpflow.planner.search.bounds import CLOSE, bound
from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.problem import BYTES, Move, State, price_of
from sbpflow.planner.shapes import assignment_of, plan_of, problem_of
from sbpflow.planner.task import Choice, Shape
from tests.planner.problems import all_plans, check_insertions, make_problem
from tests.planner.tasks import make_task


def test_ranks_of_a_link_have_the_mean_of_their_transfers():
    loads = np.random.default_rng(0).random((3, 4, 1 + len(PHASES) + 1))
    result = shared(loads, 2)
    np.testing.assert_array_equal(result[..., 0], loads[..., 0])
    np.testing.assert_array_equal(result[..., -1], loads[..., -1])
    for first in (0, 2):
        mean = loads[:, first : first + 2, 1:-1].mean(axis=1)
        np.testing.assert_allclose(result[:, first, 1:-1], mean)
        np.testing.assert_allclose(result[:, first + 1, 1:-1], mean)
    assert shared(loads, 1) is loads


@pytest.mark.slow
@pytest.mark.parametrize("slack", [9.0, 1.3])
def test_the_search_reaches_the_optimum_and_no_plan_is_faster_than_the_bound(slack):
    problem = make_problem(4, 4, seed=2, slack=slack, ranks_per_link=2)
    prices = [price_of(problem, plan) for plan in all_plans(problem)]
    best = min(price.ms for price in prices if price.feasible)
    found = search(problem).priced
    assert found.feasible
    assert best <= found.ms * (1 + 1e-9) <= best * (1 + CLOSE)
    for plan_ms in (best, 1.3 * best, 2.0 * best):
        for branch in (False, True):
            assert bound(problem, plan_ms, branch=branch).ms <= best * (1 + 1e-9)


@pytest.mark.slow
def test_options_that_the_bound_drops_are_in_no_better_plan():
    problem = make_problem(4, 4, seed=4, slack=1.5, ranks_per_link=2)
    prices = [(plan, price_of(problem, plan)) for plan in all_plans(problem)]
    ms = sorted(price.ms for _, price in prices if price.feasible)
    lower = bound(problem, ms[len(ms) // 50])
    for plan, price in prices:
        if price.feasible and price.ms < lower.plan_ms * (1 - 1e-9):
            assert all(m.option in kept for m, kept in zip(plan, lower.options, strict=True))


def test_an_insertion_has_the_price_of_the_plan():
    for ranks_per_link in (2, 3):
        check_insertions(make_problem(9, 6, seed=3, slack=0.9, ranks_per_link=ranks_per_link))


def test_balancing_keeps_the_sums_right():
    problem = make_problem(40, 4, seed=3, splits=False, slack=9.0, ranks_per_link=2)
    state = State(problem, tuple(Move(0, (n % 3,)) for n in range(40)))
    before = state.price()
    balance(state, 200)
    assert state.price().ms < 0.9 * before.ms
    np.testing.assert_allclose(state.loads, price_of(problem, state.assignment()).loads)


def test_balancing_relieves_the_rank_of_the_slowest_link_that_has_tables():
    """Both ranks of a link have the same transfers, but perhaps only one has tables to give."""
    problem = make_problem(8, 4, seed=1, splits=False, slack=9.0, ranks_per_link=2)
    for first in (0, 1):
        state = State(problem, (Move(0, (first,)),) * 8)
        before = state.price().loads[:, 1:BYTES].max()
        balance(state, 20)
        assert state.price().loads[:, 1:BYTES].max() < 0.7 * before


def test_shards_are_spread_evenly_over_links():
    """Four shards on two hosts of four ranks are fastest with two on each host."""
    cost = TaskCost(
        with_link(described("h100-dgx"), *link_of("1gbit", 4)),
        replace(make_task(world_size=8, rows=(4000, 900)), num_hosts=2),
    )
    problem = problem_of(cost)
    state = State(problem)
    inserter = Inserter(
        problem,
        tuple(
            tuple(n for n, one in enumerate(mine) if one.num_shards == 4)
            for mine in problem.options
        ),
    )
    hosts = [rank // 4 for rank in inserter.best(state, 0).move.ranks]
    assert sorted(hosts) == [0, 0, 1, 1]


def test_only_the_hosts_of_the_measured_link_share_it():
    profile = with_link(described("h100-dgx"), *link_of("1gbit", 2))
    two_hosts = TaskCost(profile, replace(make_task(), num_hosts=2))
    assert [TaskCost(profile, make_task()).ranks_per_link, two_hosts.ranks_per_link] == [1, 2]


def test_only_the_balance_between_hosts_matters_for_transfers():
    """Two tables on one host send twice as much over its link as one table on each host."""
    profile = with_link(described("h100-dgx"), *link_of("1gbit", 2))
    task = replace(make_task(rows=(900, 900)), num_hosts=2)
    cost = TaskCost(profile, task)
    assert cost.ranks_per_link == 2
    whole, transfers = Shape("B", "columns"), {}
    for ranks in ((0, 0), (0, 1), (0, 2)):
        plan = {name: Choice(whole, (r,)) for name, r in zip(("t0", "t1"), ranks, strict=True)}
        problem = problem_of(cost)
        assignment = assignment_of(problem, plan)
        assert plan_of(task, problem, assignment) == plan
        priced = price_of(problem, assignment)
        assert priced.ms == pytest.approx(cost.predict(plan).step_ms)
        transfers[ranks] = priced.loads[:, 1:BYTES].max(axis=0).sum()
    assert transfers[0, 0] == pytest.approx(transfers[0, 1])
    assert transfers[0, 2] < transfers[0, 1]


def test_in_an_all_reduce_a_host_sends_as_much_as_a_rank():
    alone, apart = (link_of("1gbit", ranks)[0] for ranks in (1, 2))
    # Both links give a host 1 Gbit/s. In a ring of 4 ranks on 2 hosts, as many bytes leave a host
    # as in a ring of 4 ranks on 4 hosts.
    assert apart.reduced_byte_ms(4) == pytest.approx(alone.reduced_byte_ms(4))
    profile = with_link(described("h100-dgx"), apart, "1gbit")
    gradients = 1 + PHASES.index("gradients")
    prices = profile.prices(4)[:, gradients]
    assert prices[INDEX["reduced_bytes"]] == apart.reduced_byte_ms(4)
    assert prices[INDEX["dense_parameters"]] == pytest.approx(6.0 * apart.reduced_byte_ms(4))


def test_a_measured_link_between_nodes_is_divided_by_the_ranks_of_a_node():
    measured, _ = link_of("1gbit", 2)
    for ranks in (1, 2, 4):
        assert measured.on_nodes_of(ranks) == link_of("1gbit", ranks)[0]
    own_adapters = replace(measured, ranks_per_link=1)
    for ranks in (1, 4):
        assert own_adapters.on_nodes_of(ranks) == replace(own_adapters, ranks_per_node=ranks)
    of_one_node = replace(measured, ranks_per_node=0)
    assert of_one_node.on_nodes_of(4) == of_one_node
    alone, _ = link_of("1gbit", 1)
    assert alone.on_nodes_of(2, shared=True) == link_of("1gbit", 2)[0]
    assert alone.on_nodes_of(2) == replace(alone, ranks_per_node=2)

"""The search finds the best plan of small spaces, and is never worse than what it starts from."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from sbpflow.errors import PlanError
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import CostModel
from sbpflow.planner.search.auto import Effort, search
from sbpflow.planner.search.bounds import bound
from sbpflow.planner.search.exact import enumerated, linear_optimum
from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.local import LocalSearch, weights_of
from sbpflow.planner.search.problem import Move, State, check_assignment, price_of
from sbpflow.planner.shapes import problem_of
from tests.planner.problems import make_problem
from tests.planner.tasks import make_task

SMALL = Effort(insertions=300, exact_time=0.0)


def all_plans(problem):
    """Every plan of whole tables, tables on all ranks and copied ones, ranks told apart."""
    size = problem.num_ranks
    moves = [
        [
            move
            for n, option in enumerate(options)
            for move in {
                0: [Move(n, ())],
                1: [Move(n, (rank,)) for rank in range(size)],
                size: [Move(n, tuple(range(size)))],
            }.get(option.num_shards, [])
        ]
        for options in problem.options
    ]
    return product(*moves)


@pytest.mark.parametrize("bend", [0.0, 0.5])
def test_enumeration_leaves_no_plan_out(bend):
    problem = make_problem(4, 3, seed=1, bend=bend, slack=1.6)
    best = min(price_of(problem, plan).rank for plan in all_plans(problem))
    numbers = tuple(
        tuple(n for n, option in enumerate(options) if option.num_shards in (0, 1, 3))
        for options in problem.options
    )
    found, count = enumerated(problem, numbers)
    assert price_of(problem, found).rank == pytest.approx(best)
    assert count < 5**4  # ranks that are renamed are not tried again
    assert enumerated(problem, numbers, most=10) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_search_reaches_the_optimum_of_small_problems(seed):
    problem = make_problem(6, 3, seed=seed, bend=0.3, slack=1.5)
    numbers = tuple(
        tuple(n for n, option in enumerate(options) if option.num_shards in (0, 1, 3))
        for options in problem.options
    )
    best, _ = enumerated(problem, numbers)
    found = search(problem, effort=SMALL)
    assert found.priced.feasible
    assert found.priced.ms <= price_of(problem, best).ms * (1 + 1e-9)


def test_a_search_is_no_worse_than_its_seeds_and_repeats_itself():
    problem = make_problem(30, 4, seed=2, bend=0.2, slack=1.3)
    given = {"mine": tuple(Move(0, (n % 4,)) for n in range(30))}
    one, two = (search(problem, seed=5, effort=SMALL, given=given) for _ in range(2))
    assert one.assignment == two.assignment
    assert "mine" in one.seeds
    assert one.priced.rank <= min(priced.rank for priced in one.seeds.values())
    check_assignment(problem, one.assignment)
    assert price_of(problem, one.assignment).ms == pytest.approx(one.priced.ms)


def test_local_search_improves_a_bad_plan_and_keeps_its_sums():
    problem = make_problem(24, 4, seed=3, bend=0.2, splits=False)
    inserter = Inserter(problem)
    start = tuple(Move(0, (0,)) for _ in range(24))
    local = LocalSearch(problem, inserter, weights_of(problem, inserter), seed=1)
    found = local.improve(start, 200)
    assert price_of(problem, found).ms < 0.5 * price_of(problem, start).ms


def test_tables_whose_columns_do_not_divide_share_a_storage():
    """16 columns on 3 ranks are 6, 5 and 5: laid in two orders they are two storages."""
    task = make_task(world_size=3, rows=(4000, 900, 3000), dim=16)
    problem = problem_of(CostModel(described("h100-dgx")).of(task))
    name = "all S(1) columns 1x3"
    found = search(problem, effort=SMALL)
    assert {move.ranks for move in found.plans[name]} == {(0, 1, 2)}
    state = State(problem, found.plans[name])
    mine = state.remove(1)
    offered = [one.move for one in Inserter(problem).ranked(state, 1)]
    assert mine in offered
    inserter = Inserter(problem, tuple((move.option,) for move in found.plans[name]))
    assert inserter.best(state, 1).move == mine


def test_sums_follow_tables_that_come_and_go():
    problem = make_problem(8, 4, seed=4)
    plan = search(problem, effort=Effort(insertions=50, exact_time=0.0)).assignment
    state = State(problem, plan)
    for table in (3, 5, 3):
        state.add(table, state.remove(table))
    fresh = State(problem, plan)
    np.testing.assert_allclose(state.totals, fresh.totals, rtol=1e-9, atol=1e-6)
    assert state.present == fresh.present
    state.remove(3)
    with pytest.raises(PlanError, match="not placed"):
        state.remove(3)


def test_memory_is_a_limit_and_what_lacks_least_is_found_where_nothing_fits():
    tight = make_problem(12, 3, seed=5, slack=1.15, splits=False)
    found = search(tight, effort=SMALL)
    assert found.priced.feasible
    assert (found.priced.memory <= tight.limit_bytes).all()
    none = make_problem(5, 3, seed=6, splits=False)
    less = type(none)(
        **{
            name: getattr(none, name) for name in none.__dataclass_fields__ if name != "limit_bytes"
        },
        limit_bytes=none.limit_bytes / 3,
    )
    short = search(less, effort=SMALL)
    best = min(price_of(less, plan).excess_bytes for plan in all_plans(less))
    assert short.priced.excess_bytes == pytest.approx(best)


def test_no_plan_is_below_the_bound():
    for seed, splits in ((0, True), (1, False)):
        problem = make_problem(5, 3, seed=seed, splits=splits, slack=1.5)
        best = min(
            (price_of(problem, plan) for plan in all_plans(problem)), key=lambda one: one.rank
        )
        found = bound(problem, search(problem, effort=SMALL).assignment)
        assert 0 < found.ms <= best.ms * (1 + 1e-9)
        assert found.gap < 0.6


def with_heavy_table(problem, times):
    """The first table, in its whole form, is that much the work of all tables together."""
    first, *others = problem.options
    whole = first[0]
    total = sum(options[0].shards.sum(0) for options in problem.options)
    heavy = replace(whole, shards=whole.shards * 0 + times * total * [0, 0, 1, 1, 1, 0])
    return replace(problem, options=((heavy, *first[1:]), *others))


def test_the_bound_sees_a_table_that_is_larger_than_the_share_of_a_rank():
    """Of 12 tables on 4 ranks one is as much work as all others: the mean alone is half of it."""
    problem = with_heavy_table(make_problem(12, 4, seed=8, splits=False, slack=9.0), 1.0)
    found = search(problem, effort=SMALL)
    assert bound(problem, found.assignment).gap < 0.02


def test_the_bound_leaves_out_options_that_no_better_plan_has():
    """Whole, the table costs the mean least, but then its rank is slower than the plan."""
    problem = with_heavy_table(make_problem(12, 4, seed=9, slack=9.0), 3.0)
    found = search(problem, effort=SMALL)
    assert problem.options[0][found.assignment[0].option].shape != ("whole",)
    gap = bound(problem, found.assignment).gap
    cheap = with_heavy_table(problem, 0.0)
    assert gap < bound(cheap, found.assignment).gap


def test_the_integer_program_is_exact_where_the_model_is_linear():
    pytest.importorskip("ortools")
    problem = make_problem(5, 2, seed=7, slack=1.5)
    start = search(problem, effort=Effort(insertions=20, exact_time=0.0)).assignment
    found = linear_optimum(problem, start, exact_time=0.5, seed=0)
    best = min(price_of(problem, plan).rank for plan in all_plans(problem))
    assert price_of(problem, found.assignment).rank <= best
    assert found.linear_ms == pytest.approx(price_of(problem, found.assignment).ms, rel=1e-3)


def test_plans_that_cannot_be_are_refused():
    problem = make_problem(2, 2)
    for plan, says in (
        ((Move(0, (0,)),), "plan of 1 tables for 2"),
        ((Move(9, (0,)), Move(0, (0,))), "option 9 of"),
        ((Move(1, (0, 0)), Move(0, (0,))), "a rank of its own"),
        ((Move(0, (2,)), Move(0, (0,))), "outside a world of 2"),
    ):
        with pytest.raises(PlanError, match=says):
            check_assignment(problem, plan)

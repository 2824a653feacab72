"""Tests the seeds of ``auto`` that need their own search, and the plans that are worth
measuring.
"""

from dataclasses import replace

from sbpflow.costs.counts import NUM_FEATURES
from sbpflow.planner.calibration.candidates import NEAR, to_measure
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Fusion
from sbpflow.planner.planners import UNCORRECTED, UNSPLIT, make_plan, published_seeds, seeds_of
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.auto import Effort, search
from sbpflow.planner.search.problem import price_of
from sbpflow.planner.shapes import plan_of, problem_of, table_wise
from sbpflow.planner.workloads import random_task

PROFILE = described("h100-dgx")
SMALL = Effort(insertions=100, exact_time=0.0)


def test_auto_starts_from_a_search_without_corrections():
    fusion = Fusion(mix=((1e-6,) * NUM_FEATURES,), scale=(1.0,), power=(0.7,), low=0.4, high=2.5)
    corrected = replace(PROFILE, members=({"lookup": fusion, "update": fusion},))
    task = random_task(3, num_tables=8, world_size=2, held_out=True)
    one, plain = (
        Setting(task, problem_of(TaskCost(profile, task))) for profile in (corrected, PROFILE)
    )
    seeds = seeds_of(one, SMALL)
    assert set(seeds) == {*published_seeds(one), UNSPLIT, UNCORRECTED}
    alone = search(plain.problem, effort=SMALL, given=published_seeds(plain))
    assert seeds[UNCORRECTED] == alone.assignment
    ours = make_plan("auto", TaskCost(corrected, task), effort=SMALL)
    assert ours.priced.rank <= price_of(one.problem, alone.assignment).rank
    assert UNCORRECTED not in seeds_of(plain, SMALL)  # has no corrections


def test_auto_starts_from_a_search_that_splits_no_table():
    task = random_task(0, num_tables=8, world_size=3, held_out=True)
    cost = TaskCost(PROFILE, task)
    task_setting = Setting(task, problem_of(cost), 0)
    narrow = problem_of(cost, table_wise)
    best = search(narrow, effort=SMALL).assignment
    seed = seeds_of(task_setting, SMALL)[UNSPLIT]
    assert plan_of(task_setting.task, task_setting.problem, seed) == plan_of(
        task_setting.task, narrow, best
    )
    ours = make_plan("auto", cost, effort=SMALL)
    assert ours.priced.rank <= price_of(narrow, best).rank


def test_plans_to_measure_include_the_uncorrected_one_and_homogeneous_ones():
    fusion = Fusion(mix=((1e-6,) * NUM_FEATURES,), scale=(1.0,), power=(0.5,), low=0.4, high=2.5)
    corrected = replace(PROFILE, members=({"lookup": fusion, "update": fusion},))
    task = random_task(3, num_tables=10, world_size=2, held_out=True)
    ours = make_plan("auto", TaskCost(corrected, task), effort=SMALL)
    assert ours.found is not None
    named = to_measure(ours, 4)
    mine = [plan for name, plan in named.items() if name.startswith("auto ")]
    assert mine[0] == ours.assignment
    assert ours.found.plans[UNCORRECTED] in mine[:2]
    assert len(mine) == len(set(mine)) == 4
    assert all(price_of(ours.problem, plan).ms < NEAR * ours.priced.ms for plan in mine)
    assert {"all B local", "all B columns", "all S(0) unique 2x1"} <= set(named)
    assert all(price_of(ours.problem, plan).feasible for plan in named.values())
    assert list(to_measure(make_plan("size", TaskCost(corrected, task)), 4)) == ["size 1"]

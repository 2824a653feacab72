"""What a search takes for the best plans of a task: to be measured, because there a model is wrong.

A search ends in plans that are much alike, so the next ones are taken only where they lay a share
of the tables otherwise.
"""

from planner.cost import TaskCost
from planner.search.auto import Effort, search
from planner.search.problem import Assignment, price_of
from planner.shapes import plan_of, problem_of
from planner.task import Plan

INSERTIONS = 160  # of a search: plans near the best one, in a fraction of a second
DIFFERENT = 0.2  # of the tables, at least one


def picks(cost: TaskCost, count: int) -> list[Plan]:
    """The plan that is predicted fastest, and the next that differ from those before it."""
    problem = problem_of(cost)
    found = search(problem, effort=Effort(insertions=INSERTIONS, exact_time=0.0))
    pool = dict.fromkeys([found.assignment, *found.others, *found.plans.values()])
    least = max(1, round(DIFFERENT * problem.num_tables))
    chosen: list[Assignment] = []
    for plan in sorted(pool, key=lambda one: price_of(problem, one).rank):
        if all(_different(plan, other) >= least for other in chosen):
            chosen.append(plan)
        if len(chosen) == count:
            break
    return [plan_of(cost.task, problem, plan) for plan in chosen]


def _different(one: Assignment, other: Assignment) -> int:
    """How many tables have another shape; ranks apart, plans are as good as each other."""
    return sum(a.option != b.option for a, b in zip(one, other, strict=True))

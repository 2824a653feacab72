"""Selects the plans of a task to measure next: the best ones that a search finds.

A model's errors matter most for these plans. Because a search ends in similar plans, a further plan
is selected only if it stores enough tables differently.
"""

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import UNCORRECTED, Planned
from sbpflow.planner.search.auto import Effort, search
from sbpflow.planner.search.problem import Assignment, price_of
from sbpflow.planner.search.seeds import families
from sbpflow.planner.shapes import plan_of, problem_of
from sbpflow.planner.task import Plan, Shape

# number of insertions in a search: enough for nearly the best plan in less than a second
INSERTIONS = 160
DIFFERENT = 0.2  # share of the tables that must differ, at least one table
NEAR = 1.05  # maximum price relative to the best plan: about a model's error among good plans


def candidates(cost: TaskCost, count: int) -> list[Plan]:
    """Return the plan predicted to be fastest, then the next plans that differ from all before
    them.
    """
    problem = problem_of(cost)
    found = search(problem, effort=Effort(insertions=INSERTIONS, exact_time=0.0))
    pool = dict.fromkeys([found.assignment, *found.others, *found.plans.values()])
    least = max(1, round(DIFFERENT * problem.num_tables))
    chosen: list[Assignment] = []
    for plan in sorted(pool, key=lambda plan: price_of(problem, plan).rank):
        if all(_different(plan, other) >= least for other in chosen):
            chosen.append(plan)
        if len(chosen) == count:
            break
    return [plan_of(cost.task, problem, plan) for plan in chosen]


def to_measure(planned: Planned, count: int) -> dict[str, Assignment]:
    """Return plans that fit, by name: the best ``count`` plans, and those with one shape for all
    tables.

    The best plan comes first, then the plan found without learned corrections. The remaining plans
    are those that differ most among the plans priced within ``NEAR`` of the best.
    """
    problem, found, best = planned.problem, planned.found, planned.assignment
    if found is None:
        return {f"{planned.planner} 1": best}
    chosen = [best]
    plain = found.plans.get(UNCORRECTED, best)
    if plain != best and count > 1 and price_of(problem, plain).feasible:
        chosen.append(plain)
    pool = dict.fromkeys([*found.others, *found.plans.values()])
    priced = [(plan, price_of(problem, plan)) for plan in pool]
    near = [
        plan for plan, price in priced if price.feasible and price.ms < NEAR * planned.priced.ms
    ]
    while near and len(chosen) < count:
        least = [min(_moved(plan, other) for other in chosen) for plan in near]
        if not max(least):
            break
        chosen.append(near[least.index(max(least))])
    named = {f"{planned.planner} {place + 1}": plan for place, plan in enumerate(chosen)}
    for shape in families(problem):
        name = f"all {shape}"
        everywhere = isinstance(shape, Shape) and shape.num_shards in (1, problem.num_ranks)
        if everywhere and name in found.plans and found.seeds[name].feasible:
            named[name] = found.plans[name]
    return named


def _moved(plan: Assignment, other: Assignment) -> int:
    """Return the number of tables with another shape or other ranks."""
    return sum(a != b for a, b in zip(plan, other, strict=True))


def _different(plan: Assignment, other: Assignment) -> int:
    """Return the number of tables with another shape; plans that differ only in ranks are equally
    good.
    """
    return sum(a.option != b.option for a, b in zip(plan, other, strict=True))

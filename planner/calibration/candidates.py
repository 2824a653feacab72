"""The plans of a task that a search finds best, to be measured: there a model errs most.

A search ends in similar plans, so further plans are taken only if they store enough tables
differently.
"""

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import UNCORRECTED, Planned
from sbpflow.planner.search.auto import Effort, search
from sbpflow.planner.search.problem import Assignment, price_of
from sbpflow.planner.search.seeds import families
from sbpflow.planner.shapes import plan_of, problem_of
from sbpflow.planner.task import Plan, Shape

INSERTIONS = 160  # of a search: finds plans near the best one in a fraction of a second
DIFFERENT = 0.2  # of the tables; at least one
NEAR = 1.05  # times the best plan's price: about a model's error among good plans


def candidates(cost: TaskCost, count: int) -> list[Plan]:
    """The plan that is predicted fastest, and the next plans that differ from all before them."""
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
    """Plans that fit, by name: the best ``count``, and those with all tables alike.

    The best plan comes first, then the one found without learned corrections, then those that
    differ most among the plans priced within ``NEAR`` of the best.
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
    """The number of tables with another shape or other ranks."""
    return sum(a != b for a, b in zip(plan, other, strict=True))


def _different(plan: Assignment, other: Assignment) -> int:
    """The number of tables with another shape; plans that differ only in ranks are equally good."""
    return sum(a.option != b.option for a, b in zip(plan, other, strict=True))

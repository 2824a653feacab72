"""Chooses the best plan that a search finds, or explains why no plan fits."""

from sbpflow.errors import PlanError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import Planned, make_plan
from sbpflow.planner.report import infeasible_text
from sbpflow.planner.task import Plan


def choose(cost: TaskCost, *, seed: int = 0) -> Plan:
    """Return the cheapest plan that the search finds; the same arguments give the same plan.

    Raises PlanError if no plan fits, naming the fullest rank and the smallest changes that would
    help.
    """
    return checked(make_plan("auto", cost, seed=seed), cost).plan


def checked(planned: Planned, cost: TaskCost) -> Planned:
    """Return the plan itself; raise PlanError unless it fits."""
    if not planned.priced.feasible:
        raise PlanError(infeasible_text(planned, cost))
    return planned

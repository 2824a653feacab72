"""The plan that a search finds best for a task, and what to say when none fits."""

from sbpflow.errors import PlanError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import Planned, make_plan
from sbpflow.planner.report import infeasible_text
from sbpflow.planner.task import Plan


def choose(cost: TaskCost, *, seed: int = 0) -> Plan:
    """The cheapest plan that was found; equal for equal arguments.

    PlanError where nothing fits: with the tightest rank and the smallest changes that would do.
    """
    return checked(make_plan("auto", cost, seed=seed), cost).plan


def checked(planned: Planned, cost: TaskCost) -> Planned:
    """PlanError unless the plan fits."""
    if not planned.priced.feasible:
        raise PlanError(infeasible_text(planned, cost))
    return planned

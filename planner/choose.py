"""The best plan of a search, and the error if no plan fits."""

from sbpflow.errors import PlanError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import Planned, make_plan
from sbpflow.planner.report import infeasible_text
from sbpflow.planner.task import Plan


def choose(cost: TaskCost, *, seed: int = 0) -> Plan:
    """The cheapest plan that the search finds; the same for the same arguments.

    Raises PlanError if none fits, naming the fullest rank and the smallest changes that help.
    """
    return checked(make_plan("auto", cost, seed=seed), cost).plan


def checked(planned: Planned, cost: TaskCost) -> Planned:
    """The plan itself; raises PlanError unless it fits."""
    if not planned.priced.feasible:
        raise PlanError(infeasible_text(planned, cost))
    return planned

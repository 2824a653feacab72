"""The plan that a search finds best for a task."""

from planner.calibrate import descend
from planner.cost import TaskCost
from planner.task import Plan


def choose(cost: TaskCost, *, seed: int = 0) -> Plan:
    """The cheapest plan that was found; equal for equal arguments."""
    del seed
    return descend(cost, 1)[0]

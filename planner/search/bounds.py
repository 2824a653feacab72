"""Computes a lower bound on the predicted time of any plan.

The bound is the best value of the Lagrangian dual in ``dual.py``, improved by branching. Without
branching, a bound may include only a fraction of a key's cost, such as a third. With branching,
either no table uses the key, or some table does and the key's whole cost is paid; the bound is the
smaller of the two. Maxima over ranks are split, too: plans whose maximum is below some ms have no
larger shards and less room on each set of ranks; all others take at least this time.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from sbpflow.planner.search.dual import Ascent, Dual, Solution
from sbpflow.planner.search.problem import Problem

CLOSE = 3e-3  # the search stops this close to the lower bound; the model's error is far larger
ROOT_ROUNDS = 400
BRANCH_ROUNDS = 20
WORK = 1_200_000  # maximum number of branches times options; limits the time for large problems
MOST_BRANCHES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A bound in ``ms``; ``gap`` is the fraction by which ``plan_ms``, the plan's time, exceeds the
    bound.

    ``options`` contains the options of each table that can occur in a faster plan, starting with
    the option that reaches the bound.
    """

    ms: float
    plan_ms: float
    options: tuple[tuple[int, ...], ...]

    @property
    def gap(self) -> float:
        return self.plan_ms / self.ms - 1.0 if self.ms > 0 else np.inf


def bound(problem: Problem, plan_ms: float, *, branch: bool = True) -> Bound:
    """Return a lower bound, at most ``plan_ms``, for all plans that use the problem's options.

    ``branch=False`` skips the branches, which takes a fraction of the time.
    """
    dual = Dual(problem, plan_ms)
    root = Ascent(dual, dual.free(), None).run(ROOT_ROUNDS)
    ms = min(root.ms, plan_ms)
    options = dual.options(root.above, plan_ms - ms)
    if branch:
        ms = _branched(dual, root, plan_ms)
    return Bound(ms=min(max(ms, dual.separable_ms), plan_ms), plan_ms=plan_ms, options=options)


def _branched(dual: Dual, root: Solution, plan_ms: float) -> float:
    """Return the bound after repeatedly splitting the loosest case."""
    open_cases: list[tuple[float, int, Solution]] = [(root.ms, 0, root)]
    branches = min(MOST_BRANCHES, WORK // len(dual.table))
    for number in range(branches):
        ms, _, case = open_cases[0]
        if case.halves is None or ms * (1 + CLOSE) >= plan_ms:
            break
        heapq.heappop(open_cases)
        for place, limits in enumerate(case.halves):
            half = Ascent(dual, limits, case).run(BRANCH_ROUNDS)
            if half.ms < plan_ms:
                heapq.heappush(open_cases, (max(half.ms, ms), 2 * number + place + 1, half))
        if not open_cases:
            return plan_ms
    return open_cases[0][0]

"""Linearizes the cost model at a plan, for solvers that need a linear model.

Each feature has the model's slope at the mean of the plan's ranks. The weight of a phase is the
growth of the step when that phase gets longer on all ranks. The cost of an option is then a sum, so
an integer program can find or bound the best plan.
"""

from dataclasses import dataclass

import numpy as np

from sbpflow.planner.search.problem import Assignment, Floats, Option, Pricing, Problem, State

STEP = 0.02  # relative change of a phase that is used to compute its weight


@dataclass(frozen=True, slots=True)
class Linear:
    """Approximates a step by ``sum_p weights_p max_rank (offsets_p + features . slopes_p)`` ms.

    The shapes are ``slopes`` [features, phases], ``offsets`` [phases] in ms, and ``weights``
    [phases].
    """

    slopes: Floats
    offsets: Floats
    weights: Floats


def linearized(problem: Problem, around: Assignment) -> Linear:
    """Return the model linearized at a plan."""
    state = State(problem, around)
    centre = state.totals.mean(axis=0)
    pricing = problem.pricing
    slopes, value = _slopes(pricing, centre, state.totals.max(axis=0))
    phases = pricing.rank_ms(state.totals)
    heaviest = phases.max(axis=0)
    longer = np.repeat(phases[None], len(heaviest) + 1, axis=0)
    for phase, ms in enumerate(heaviest):
        longer[phase + 1, :, phase] += STEP * ms
    times = pricing.combine(longer)
    gains = np.where(heaviest > 0, (times[1:] - times[0]) / np.maximum(STEP * heaviest, 1e-12), 0.0)
    return Linear(slopes, value - centre @ slopes, np.maximum(gains, 0.0))


def _slopes(pricing: Pricing, centre: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """Return [features, phases] slopes by finite differences, and the phases at the center."""
    steps = np.maximum(0.05 * scale, 1e-6)
    points = centre + np.diag(steps)
    value = pricing.rank_ms(centre[None])[0]
    return (pricing.rank_ms(points) - value) / steps[:, None], value


def mean_ms(problem: Problem, linear: Linear, option: Option) -> float:
    """Return what an option adds to the weighted phases of the mean rank, without keys."""
    added = option.home + option.shards.sum(axis=0) / problem.num_ranks
    return float(added @ linear.slopes @ linear.weights)

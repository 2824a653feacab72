"""The cost model as a linear one around a plan, for solvers that need one.

Every feature's slope is the model's own at the mean of the plan's ranks; every phase weighs what a
step gets longer when that phase gets longer on all ranks. What an option costs there is a sum, and
so the best plan of the linear model can be found, or bounded, by an integer program.
"""

from dataclasses import dataclass

import numpy as np

from sbpflow.planner.search.problem import Assignment, Floats, Option, Pricing, Problem, State

STEP = 0.02  # of a phase: how far it is lengthened to see what it weighs


@dataclass(frozen=True, slots=True)
class Linear:
    """``slopes`` [features, phases], ``offsets`` [phases] (ms), ``weights`` [phases]: a step's time
    is about ``sum_p weights_p max_rank (offsets_p + features . slopes_p)``.
    """

    slopes: Floats
    offsets: Floats
    weights: Floats


def linearised(problem: Problem, around: Assignment) -> Linear:
    """The model around a plan."""
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
    """[features, phases] by differences, and the phases at the centre."""
    steps = np.maximum(0.05 * scale, 1e-6)
    points = centre + np.diag(steps)
    value = pricing.rank_ms(centre[None])[0]
    return (pricing.rank_ms(points) - value) / steps[:, None], value


def mean_ms(problem: Problem, linear: Linear, option: Option) -> float:
    """What an option adds to the weighted phases of the mean rank, keys aside."""
    added = option.home + option.shards.sum(axis=0) / problem.num_ranks
    return float(added @ linear.slopes @ linear.weights)

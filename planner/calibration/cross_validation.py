"""Computes a profile's errors in predicted phases, predicted steps, and above all the choice of
plans.

A model can predict steps well and still choose badly. The main measure is therefore the regret: how
much slower the chosen plan was than the fastest random plan, with all plans measured together. For
comparison, the regret of a random plan and the regret of a single measurement round (the noise) are
reported. A plan picked by a search whose model had not seen it is compared with the best random
plan.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from sbpflow.costs.ids import Floats
from sbpflow.planner.calibration.records import AGAIN, Record, drift_of, on_one_clock
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import PHASE, step_ms

# The noise of clocks and schedulers is added to times before they are compared.
FLOOR_MS = 0.15
LEAST_JUDGED_MS = 0.3  # phases with a shorter mean time are not reported
LEAST_PLANS = 3  # sessions with fewer plans are not ranked


def predicted_phases(profile: Profile, records: Sequence[Record]) -> list[Floats]:
    """Return the predicted phases [D, P] of each record, in ms."""
    weights = profile.weights_for(records[0].totals.shape[0])
    linear = [np.maximum(record.totals @ weights, 0.0) for record in records]
    if not profile.members:
        return linear
    return [
        profile.corrected(record.totals, ms) for record, ms in zip(records, linear, strict=True)
    ]


def predicted_steps(profile: Profile, records: Sequence[Record]) -> Floats:
    """Return the predicted step time [records] in ms."""
    return step_ms(np.stack(predicted_phases(profile, records)), profile.hidden)


def cross_validation(
    records: Sequence[Record], phases: Sequence[Floats], steps: Floats
) -> dict[str, float]:
    """Compute the errors of predicted ``phases`` and ``steps``: medians, and means over the
    sessions.

    ``regret`` is the relative excess in time of the plan with the fastest prediction over the
    fastest plan.
    """
    predicted, measured = np.stack(phases), np.stack([record.phases for record in records])
    actual = np.array([record.step_ms for record in on_one_clock(records)])
    errors = {
        f"{name} relative": float(
            np.median(
                np.abs(predicted[..., place] - measured[..., place])
                / (measured[..., place] + FLOOR_MS)
            )
        )
        for name, place in PHASE.items()
        if measured[..., place].mean() > LEAST_JUDGED_MS
    }
    errors["step relative"] = float(np.median(np.abs(steps / actual - 1.0)))
    errors["noise of steps"] = float(np.median([record.noise for record in records]))
    drift = [abs(math.log(factor)) for factor in drift_of(records).values()]
    if drift:
        errors["drift between sessions"] = statistics.median(drift)
    return errors | _choices(records, steps)


def _choices(records: Sequence[Record], steps: Floats) -> dict[str, float]:
    errors: dict[str, list[float]] = {}
    for key in sorted({(record.sample, record.session) for record in records}):
        mine = [n for n, record in enumerate(records) if (record.sample, record.session) == key]
        if key[1]:
            errors.setdefault("pick over the best drawn plan", []).extend(_gains(records, mine))
            continue
        if len(mine) < LEAST_PLANS:
            continue
        real = np.array([records[n].step_ms for n in mine])
        chosen = int(steps[mine].argmin())
        errors.setdefault("regret", []).append(real[chosen] / real.min() - 1.0)
        errors.setdefault("regret of a random plan", []).append(real.mean() / real.min() - 1.0)
        errors.setdefault("rank correlation", []).append(_spearman(real, steps[mine]))
        rounds = [records[n].rounds_ms for n in mine]
        if min(map(len, rounds)) >= 2:
            later = np.array([np.mean(times[1:]) for times in rounds])
            first = int(np.argmin([times[0] for times in rounds]))
            errors.setdefault("regret of one round", []).append(later[first] / later.min() - 1.0)
    return {name: float(np.mean(values)) for name, values in errors.items()}


def _gains(records: Sequence[Record], mine: Sequence[int]) -> list[float]:
    """Return a session's first picked plan relative to the best plan before it; empty if either is
    missing.
    """
    before = [records[n].step_ms for n in mine if records[n].name.startswith(AGAIN)]
    first = [records[n].step_ms for n in mine if records[n].name.endswith(".0")]
    return [first[0] / before[0] - 1.0] if before and first else []


def _spearman(a: Floats, b: Floats) -> float:
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

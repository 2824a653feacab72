"""The errors of a profile: of phases, of steps, and above all of the plans that it would choose.

A model can predict steps well and still choose badly. What counts is the regret: how much slower
the chosen plan was than the fastest drawn plan, all measured together. For comparison there are the
regret of a random plan, and that of a single round of measurements, which is the noise. A plan that
the search picked with a model that had not seen it is compared with the best drawn plan.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from sbpflow.costs.ids import Floats
from sbpflow.planner.calibration.records import AGAIN, Record, drift_of, on_one_clock
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import PHASE, step_ms

FLOOR_MS = 0.15  # added to times before they are compared: clocks and the scheduler are this noisy
LEAST_JUDGED_MS = 0.3  # phases shorter than this on average are not reported
LEAST_PLANS = 3  # of a session, to rank them


def predicted_phases(profile: Profile, records: Sequence[Record]) -> list[Floats]:
    """[D, P] predicted ms for each record."""
    weights = profile.weights_for(records[0].totals.shape[0])
    linear = [np.maximum(record.totals @ weights, 0.0) for record in records]
    if not profile.members:
        return linear
    return [
        profile.corrected(record.totals, ms) for record, ms in zip(records, linear, strict=True)
    ]


def predicted_steps(profile: Profile, records: Sequence[Record]) -> Floats:
    """[records] predicted ms of each step."""
    return step_ms(np.stack(predicted_phases(profile, records)), profile.hidden)


def cross_validation(
    records: Sequence[Record], phases: Sequence[Floats], steps: Floats
) -> dict[str, float]:
    """Errors of predicted ``phases`` and ``steps``: medians, and means over the sessions.

    ``regret`` is how much slower the plan with the fastest prediction was than the fastest plan.
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
    """The first pick of a session relative to the best plan before it; empty without both."""
    before = [records[n].step_ms for n in mine if records[n].name.startswith(AGAIN)]
    first = [records[n].step_ms for n in mine if records[n].name.endswith(".0")]
    return [first[0] / before[0] - 1.0] if before and first else []


def _spearman(a: Floats, b: Floats) -> float:
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

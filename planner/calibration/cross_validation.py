"""How far a profile is off: phases, steps, and above all the plans that it would choose.

A model can predict steps well and still choose badly, so what counts is the regret of its choice:
how much slower that plan was than the fastest drawn one, all measured together. Beside it are the
regret of a plan taken at random, and that of a single round of measuring, which is the noise. What
the search picked with a model that had not seen it is compared with the best drawn plan beside it.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from sbpflow.costs.ids import Floats
from sbpflow.planner.calibration.records import AGAIN, Record, drift_of, on_one_clock
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import PHASE, step_ms

FLOOR_MS = 0.15  # relative errors count less below: clocks and the host's scheduler
LEAST_JUDGED_MS = 0.3  # phases shorter than this on average are not told of
LEAST_PLANS = 3  # of a session, for an order among them


def predicted_phases(profile: Profile, records: Sequence[Record]) -> list[Floats]:
    """[D, P] for each record."""
    weights = profile.weights_for(records[0].totals.shape[0])
    found: list[Floats] = []
    for record in records:
        linear = np.maximum(record.totals @ weights, 0.0)
        learned = profile.corrected(record.totals, linear) if profile.members else linear
        found.append(learned)
    return found


def predicted_steps(profile: Profile, records: Sequence[Record]) -> Floats:
    """[records] ms."""
    return step_ms(np.stack(predicted_phases(profile, records)), profile.hidden)


def cross_validation(
    records: Sequence[Record], phases: Sequence[Floats], steps: Floats
) -> dict[str, float]:
    """Errors of predicted ``phases`` and ``steps``: medians, and means over the sessions.

    ``regret`` is how much slower the plan that is predicted fastest was than the fastest.
    """
    said, measured = np.stack(phases), np.stack([record.phases for record in records])
    actual = np.array([record.step_ms for record in on_one_clock(records)])
    errors = {
        f"{name} relative": float(
            np.median(
                np.abs(said[..., place] - measured[..., place]) / (measured[..., place] + FLOOR_MS)
            )
        )
        for name, place in PHASE.items()
        if measured[..., place].mean() > LEAST_JUDGED_MS
    }
    errors["step relative"] = float(np.median(np.abs(steps / actual - 1.0)))
    errors["noise of steps"] = float(np.median([record.noise for record in records]))
    drift = [abs(math.log(one)) for one in drift_of(records).values()]
    if drift:
        errors["drift between sessions"] = statistics.median(drift)
    return errors | _choices(records, steps)


def _choices(records: Sequence[Record], steps: Floats) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for key in sorted({(record.sample, record.session) for record in records}):
        mine = [n for n, record in enumerate(records) if (record.sample, record.session) == key]
        if key[1]:
            found.setdefault("pick over the best drawn plan", []).extend(_gains(records, mine))
            continue
        if len(mine) < LEAST_PLANS:
            continue
        real = np.array([records[n].step_ms for n in mine])
        chosen = int(steps[mine].argmin())
        found.setdefault("regret", []).append(real[chosen] / real.min() - 1.0)
        found.setdefault("regret of a random plan", []).append(real.mean() / real.min() - 1.0)
        found.setdefault("rank correlation", []).append(_spearman(real, steps[mine]))
        rounds = [records[n].rounds_ms for n in mine]
        if min(map(len, rounds)) >= 2:
            later = np.array([np.mean(one[1:]) for one in rounds])
            first = int(np.argmin([one[0] for one in rounds]))
            found.setdefault("regret of one round", []).append(later[first] / later.min() - 1.0)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _gains(records: Sequence[Record], mine: Sequence[int]) -> list[float]:
    """Of the first pick of a session against the plan that was the best before it."""
    before = [records[n].step_ms for n in mine if records[n].name.startswith(AGAIN)]
    first = [records[n].step_ms for n in mine if records[n].name.endswith(".0")]
    return [first[0] / before[0] - 1.0] if before and first else []


def _spearman(a: Floats, b: Floats) -> float:
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

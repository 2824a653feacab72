"""Compares cost models on the measurements of calibrations; each task is held out once.

    python -m benchmarks.planner_ablation LINK=JOURNAL [LINK=JOURNAL ..] [--recorded]

LINK is ``loopback``, or the rate of the link between two hosts, such as ``1gbit``. JOURNAL is the
``.measured.jsonl`` file next to the profile of ``sbpflow calibrate`` or
``benchmarks.planner_link``. The models are fitted to each journal separately, and all price the
same plans: the built-in constants and the nominal rate of the link, the constants with five fitted
factors, the fit that calibrations use, and the fit with less and without shrinkage.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.planner_plans import unfitted
from benchmarks.planner_regimes import RANKS, nominal_link
from benchmarks.planner_worker import half_interval
from benchmarks.record import Results
from sbpflow.costs.ids import Floats
from sbpflow.planner.calibration.calibrate import Journal
from sbpflow.planner.calibration.fit import (
    LEAST_PLANS,
    SHRINKAGE,
    Record,
    errors_of,
    fitted_prices,
    held_out_steps,
    spearman,
)
from sbpflow.planner.costs.profile import Link, Profile

SHIPPED = "fit, shrunk toward the constants"

Errors = dict[str, dict[str, list[float]]]
"""The errors of each cost model, by measure, as in ``errors_of``."""


def constants(records: Sequence[Record], rate: str) -> Floats:
    """Return the prices of a search with built-in costs, which depend only on the link."""
    size = len(records[0].totals)
    empty = Profile(work_ms={}, link=Link(), world_size=size, backend="gloo")
    return unfitted(empty, nominal_link(rate)).prices(size).T


def models_of(rate: str) -> dict[str, Callable[[Sequence[Record]], Floats]]:
    """Return the function that computes each model's prices from measurements."""
    return {
        "constants": lambda records: constants(records, rate),
        "constants, five fitted factors": lambda records: fitted_prices(records, math.inf),
        "fit, a tenth of the shrinkage": lambda records: fitted_prices(records, SHRINKAGE / 10),
        SHIPPED: fitted_prices,
        "fit without shrinkage": lambda records: fitted_prices(records, 1e-9),
    }


def errors_by_model(records: Sequence[Record], rate: str) -> Errors:
    """Return the errors of each cost model on held-out tasks."""
    return {
        name: errors_of(records, held_out_steps(records, prices))
        for name, prices in models_of(rate).items()
    }


def summary(errors: Errors) -> dict[str, dict[str, float]]:
    """Return each cost model's mean errors; ``over`` is a model's regret minus that of the fit that
    calibrations use.
    """
    rows: dict[str, dict[str, float]] = {}
    for name, mine in errors.items():
        differences = np.subtract(mine["regret"], errors[SHIPPED]["regret"]).tolist()
        rows[name] = {
            **{key: round(statistics.mean(values), 4) for key, values in mine.items()},
            "regret interval": round(half_interval(mine["regret"]), 4),
            "over": round(statistics.mean(differences), 4),
            "over interval": round(half_interval(differences), 4),
        }
    return rows


def correlations_of_rounds(records: Sequence[Record]) -> list[float]:
    """Return, for each task, the rank correlation of the first two rounds of its plans, which shows
    the noise of a round.
    """
    found: list[float] = []
    for sample in sorted({record.sample for record in records}):
        rounds = [r.rounds_ms for r in records if r.sample == sample and len(r.rounds_ms) > 1]
        if len(rounds) >= LEAST_PLANS:
            first, second = (np.array([times[n] for times in rounds]) for n in range(2))
            found.append(spearman(first, second))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("journals", nargs="+", metavar="LINK=JOURNAL")
    parser.add_argument("--recorded", action="store_true")
    args = parser.parse_args()
    errors, rounds = dict[str, Errors](), dict[str, list[float]]()
    for given in args.journals:
        rate, _, path = given.partition("=")
        if not path:
            parser.error(f"{given!r} is not LINK=JOURNAL, such as 1gbit=profile.measured.jsonl")
        facts = json.loads(Path(path).read_text().splitlines()[-1])["facts"]
        if (rate == "loopback") != (facts["hosts"] == "1"):
            parser.error(f"{given}: the journal was measured on {facts['hosts']} host(s)")
        if facts["world"] != f"{RANKS} gloo":
            parser.error(f"{given}: the ranks are {facts['world']}, not {RANKS} gloo")
        records = list(Journal(Path(path), facts).records.values())
        found = errors_by_model(records, rate)
        for label in (rate, f"seed {facts['seed']}", "all"):
            rounds.setdefault(label, []).extend(correlations_of_rounds(records))
            for name, mine in found.items():
                known = errors.setdefault(label, {}).setdefault(name, {})
                for key, values in mine.items():
                    known.setdefault(key, []).extend(values)
    results = Results("planner_ablation", recorded=args.recorded)
    for label, of_models in errors.items():
        results.add(
            benchmark="ablation",
            link=label,
            tasks=len(of_models[SHIPPED]["regret"]),
            correlation_of_rounds=round(statistics.mean(rounds[label]), 4),
            models=summary(of_models),
        )


if __name__ == "__main__":
    main()

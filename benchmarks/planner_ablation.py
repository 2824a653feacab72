"""Compares cost models on the measurements of a calibration; each task is held out once.

    python -m benchmarks.planner_ablation JOURNAL [--steps NAME=FILE ..] [--recorded]

JOURNAL is the ``.measured.jsonl`` file next to the profile of ``sbpflow calibrate``. FILE contains
another model's predicted step times for held-out tasks: a JSON list with one number per plan. All
models price the same plans: the built-in constants, the constants with four fitted factors, the fit
that calibrations use, and the fit without shrinkage.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.planner_worker import half_interval
from benchmarks.record import Results
from sbpflow.costs.counts import vector_of
from sbpflow.costs.ids import Floats
from sbpflow.costs.prices import WORK_MS, by_phase, transfer_ms
from sbpflow.planner.calibration.calibrate import Journal
from sbpflow.planner.calibration.fit import (
    Record,
    errors_of,
    fitted_prices,
    held_out_steps,
)
from sbpflow.runtime.ranks.topology import Link

SHIPPED = "fit, shrunk toward the constants"


def constants(_: Sequence[Record]) -> Floats:
    """Return the prices of ``parallel.scheme: auto``, which do not depend on measurements."""
    link = Link()
    work = WORK_MS + vector_of({"always": 1e-9})  # the price of a step without tables
    transfers = transfer_ms(1e-6 / link.gb_per_s, link.latency_ms)
    return np.stack([work, *by_phase(transfers)])


MODELS = {
    "constants": constants,
    "constants, four fitted factors": lambda records: fitted_prices(records, math.inf),
    SHIPPED: fitted_prices,
    "fit without shrinkage": lambda records: fitted_prices(records, 1e-9),
}


def compare(records: Sequence[Record], others: dict[str, Floats]) -> dict[str, dict[str, object]]:
    """Return each cost model's errors; ``over`` is a model's regret minus that of the fit that
    calibrations use.
    """
    steps = {name: held_out_steps(records, prices) for name, prices in MODELS.items()} | others
    errors = {name: errors_of(records, ms) for name, ms in steps.items()}
    rows: dict[str, dict[str, object]] = {}
    for name, mine in errors.items():
        differences = np.subtract(mine["regret"], errors[SHIPPED]["regret"]).tolist()
        rows[name] = {
            **{key: round(statistics.mean(values), 4) for key, values in mine.items()},
            "regret interval": round(half_interval(mine["regret"]), 4),
            "over": round(statistics.mean(differences), 4),
            "over interval": round(half_interval(differences), 4),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("journal", type=Path)
    parser.add_argument("--steps", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--recorded", action="store_true")
    args = parser.parse_args()
    facts = json.loads(args.journal.read_text().splitlines()[-1])["facts"]
    records = list(Journal(args.journal, facts).records.values())
    others = {}
    for given in args.steps:
        name, _, path = given.partition("=")
        others[name] = np.array(json.loads(Path(path).read_text()))
    results = Results("planner_ablation", benchmark="ablation", recorded=args.recorded)
    results.add(
        world=facts["world"],
        hosts=int(facts["hosts"]),
        plans=len(records),
        tasks=len({record.sample for record in records}),
        models=compare(records, others),
    )


if __name__ == "__main__":
    main()

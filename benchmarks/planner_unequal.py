"""Measures all planners' plans on ranks that differ in speed.

    sbpflow calibrate --ranks 2 --output PROFILE
    python -m benchmarks.planner_unequal --profile PROFILE --journal FILE

Rank 0 has a core of its own, and the other two ranks share a core, so they have half its speed. The
calibration has a core for each rank. Only ``auto`` knows the speeds; "auto, equal speeds" is the
same search without them. The plans of a task run alternately (``planner_worker.py``). Finished
tasks are kept in the journal, so the benchmark continues where it stopped.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planner_plans import make_sample, planners_of, plans_of
from benchmarks.planner_regimes import OTHERS, journaled, over_auto
from benchmarks.planner_steps import OURS, Case, best_of, compared, measured_cases
from benchmarks.record import Results
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Profile, load
from sbpflow.planner.planners import make_plan

CORES = (0, 1, 1)  # of each rank
SPEEDS = tuple(1.0 / CORES.count(core) for core in CORES)
TASKS, TABLES, BATCH = 12, (10, 26, 40), 4096
COMPARED = (*OURS, *OTHERS, "scheme: auto", "auto, equal speeds")


def measured_task(number: int, args: argparse.Namespace, profile: Profile) -> dict[str, Any]:
    """Plan one task with every planner, measure the plans, and return the journal's line."""
    tables = TABLES[number % len(TABLES)]
    equal = make_sample(number, len(CORES), num_tables=tables, batch_size=BATCH).task
    task = replace(equal, speeds=SPEEDS)
    plans = plans_of(task, profile, planners_of(profile, equal, OTHERS))
    blind = make_plan("auto", TaskCost(profile, equal)).plan
    plans["auto, equal speeds"] = blind, TaskCost(profile, task).predict(blind).step_ms
    case = Case(
        number=number,
        tables=tables,
        batch=BATCH,
        plans={name: plans[name] for name in COMPARED if name in plans},
    )
    print(f"task {number}: {len(case.distinct())} plans", flush=True)
    words = ["--cores", *map(str, CORES)]
    (times,) = measured_cases([case], len(CORES), None, args.seconds, words)
    row = compared(case, times)
    errors = [abs(case.plans[name][1] / row["plans"][name]["ms"] - 1) for name in times]
    error = round(statistics.median(errors), 4)
    return {"number": number, "tables": tables, "batch": BATCH, "step_error": error, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of rounds per task")
    parser.add_argument("--tasks", type=int, nargs="*", default=list(range(TASKS)))
    args = parser.parse_args()
    profile = load(args.profile)
    rows = journaled(args.journal, args.tasks, lambda n: measured_task(n, args, profile))
    results = Results("planner_unequal_ranks", recorded=len(rows) == TASKS)
    for row in rows:
        results.add(benchmark="task", speeds=SPEEDS, **row)
    names = dict.fromkeys([*COMPARED, *best_of(())])
    results.add(
        benchmark="summary",
        speeds=SPEEDS,
        tasks=len(rows),
        planners={name: over for name in names if (over := over_auto(rows, name))},
        spearman_predicted=round(statistics.mean(row["spearman_predicted"] for row in rows), 3),
        step_error=round(statistics.median(row["step_error"] for row in rows), 4),
    )


if __name__ == "__main__":
    main()

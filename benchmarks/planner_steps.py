"""Measures plans from different planners on ranks on this machine.

On 2 ranks or more, all plans of a task run alternately, and each round gives the difference between
every plan and our plan. A plan runs until the time limit, or until the 95 % interval of its
difference from our plan is either narrower than +-3 % or farther from 0 than it is wide. An
interval containing 0 means no significant difference.

If one of several plans is selected, half of the rounds select it, and the other half give its
reported result. The ranks of the two halves are started separately, because some starts make a plan
faster or slower in all rounds.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import start_ranks
from benchmarks.planner_plans import Named, make_sample, planners_of, plans_of
from benchmarks.planner_worker import difference
from benchmarks.record import Results
from sbpflow.config.parse import plain
from sbpflow.planner.costs.profile import default_path, load
from sbpflow.planner.planners import GREEDY

STEPS_BATCH = 4096
STEPS_TABLES = (10, 26, 40)  # number of tables in each task
OURS = ("auto", "auto 2", "auto 3", "auto 4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task of the comparison, and all plans for it by name."""

    number: int
    tables: int
    batch: int
    plans: Named
    giant: float = 0.0

    def distinct(self) -> dict[str, list[str]]:
        """Return {plan as JSON: names of the plan}, so that equal plans are measured only once."""
        names_of: dict[str, list[str]] = {}
        for name, (plan, _) in self.plans.items():
            names_of.setdefault(json.dumps(plain(plan), sort_keys=True), []).append(name)
        return names_of


def planned(args: argparse.Namespace) -> list[Case]:
    """Return ``--tasks`` cases with the plans of ``--planners``."""
    size, counts = args.ranks, args.tables or STEPS_TABLES
    profile = load(Path(args.profile) if args.profile else default_path())
    cases: list[Case] = []
    planners = None
    for number in range(args.tasks):
        tables = counts[number % len(counts)]
        task = make_sample(number, size, num_tables=tables, batch_size=STEPS_BATCH).task
        planners = planners or planners_of(profile, task, args.planners)
        plans = plans_of(task, profile, planners)
        cases.append(Case(number=number, tables=tables, batch=STEPS_BATCH, plans=plans))
        print(f"planned {tables}x{size} {number}: {len(plans)} plans", flush=True)
    return cases


def run_steps(args: argparse.Namespace) -> None:
    """Measure wall-clock times on ``--ranks`` ranks on this machine."""
    size, cases = args.ranks, planned(args)
    where = args.link or "loopback"
    suffix = "" if size == 2 else f"_{size}_ranks"
    kind = "steps" if args.tables is None else "job"
    results = Results(f"planner_{kind}_{where}{suffix}", recorded=args.recorded)
    measured = measured_cases(cases, size, args.link, args.seconds / len(cases))
    rows: list[dict[str, Any]] = []
    for case, times in zip(cases, measured, strict=True):
        row = compared(case, times)
        rows.append(row)
        results.add(
            benchmark=kind,
            batch=case.batch,
            number=case.number,
            tables=case.tables,
            ranks=size,
            link=where,
            rounds=len(times["auto"]),
            **row,
        )
    results.add(benchmark="summary", ranks=size, link=where, tasks=len(rows), **summary(rows))


def measured_cases(
    cases: Sequence[Case], size: int, link: str | None, seconds: float, words: Sequence[str] = ()
) -> list[dict[str, list[float]]]:
    """Return {plan: ms in each round} for each case, in which equal plans have one of their
    names. The ranks are started twice, for half of the ``seconds`` per case each.
    """
    distinct = [case.distinct() for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        tasks_file, times_file = Path(folder, "tasks.json"), Path(folder, "times.json")
        tasks = [
            {
                "number": case.number, "num_tables": case.tables, "batch_size": case.batch,
                "giant": case.giant, "plans": [json.loads(text) for text in plans],
            }
            for case, plans in zip(cases, distinct, strict=True)
        ]  # fmt: skip
        tasks_file.write_text(json.dumps(tasks))
        words = [
            *("--tasks", str(tasks_file), "--output", str(times_file)),
            *("--seconds", str(seconds / 2)),
            *words,
        ]
        starts: list[list[list[list[float]]]] = []
        for seed in ("0", "1"):
            seeded = [*words, "--seed", seed]
            start_ranks("benchmarks.planner_worker", size, seeded, link=link)
            starts.append(json.loads(times_file.read_text()))
    return [
        {names[0]: alternated(a, b) for names, a, b in zip(plans.values(), one, two, strict=True)}
        for plans, one, two in zip(distinct, *starts, strict=True)
    ]


def alternated(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the rounds of two starts alternately, so that one half of the rounds is from each. If
    a plan dropped out earlier in one of them, the last rounds of the other are left out.
    """
    return [ms for pair in zip(first, second, strict=False) for ms in pair]


def best_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return {selection name: candidate plans}. One selection corresponds to ``--measure 4``, and
    the last selects the fastest of all plans.
    """
    names = list(names)
    alike = [name for name in names if name.startswith("all ")]
    return {
        "auto, best of 4": [*OURS],
        "greedies, best of 4": [name for name in GREEDY if name != "random"],
        "random, best of 4": ["random 1", "random 2", "random 3", "random 4"],
        "auto, best of 4 and of all alike": [*OURS, *alike],
        "all plans, fastest": [*names],
    }


def compared(case: Case, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """For every plan, return the predicted ms, the slowdown relative to our plan with its interval,
    and the step time in ms: our plan's median times the slowdown.

    ``times`` [name] contains the rounds of a plan; plans that dropped out have fewer rounds than
    our plan. If one of several plans is selected, every other round selects it, and the remaining
    rounds give its reported result (``alternated``).
    """
    of = {name: names[0] for names in case.distinct().values() for name in names}
    every = {name: list(times[of[name]]) for name in case.plans}
    against = {name: (ms, every["auto"]) for name, ms in every.items()}
    for name, among in best_of(case.plans).items():
        candidates = [plan for plan in among if plan in every]
        if candidates:
            ours = _choosing(every["auto"])
            chosen = min(candidates, key=lambda p: difference(_choosing(every[p]), ours)[0])
            against[name] = _reported(every[chosen]), _reported(every["auto"])
    results: dict[str, Any] = {}
    usual = statistics.median(every["auto"])
    for name, (theirs, ours) in against.items():
        mean, half = difference(theirs, ours)
        results[name] = {
            "ms": round(usual * (1 + mean), 3),
            "slower_than_auto": round(mean, 4),
            "plus_minus": round(half, 4) if np.isfinite(half) else None,
        }
        if name in case.plans:
            results[name]["predicted_ms"] = round(case.plans[name][1], 3)
    names = list(times)
    clock = [results[name]["ms"] for name in names]
    best = min(names, key=lambda name: results[name]["ms"])
    row: dict[str, Any] = {
        "plans": results,
        "fastest": best,
        "auto_over_fastest": round(results["auto"]["ms"] / results[best]["ms"] - 1, 4),
        "spearman_predicted": spearman([case.plans[name][1] for name in names], clock),
    }
    return row


def _choosing(ms: Sequence[float]) -> list[float]:
    """Return the rounds of the first start, which select one of several plans."""
    return list(ms[0::2])


def _reported(ms: Sequence[float]) -> list[float]:
    """Return the rounds of the second start, which give the reported result."""
    return list(ms[1::2])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Report every planner's slowdown relative to our planner over all tasks, with 95 %
    intervals.
    """
    planners: dict[str, Any] = {}
    names = [name for name in rows[0]["plans"] if all(name in row["plans"] for row in rows)]
    for name in names:
        theirs = [row["plans"][name]["ms"] for row in rows]
        mean, half = difference(theirs, [row["plans"]["auto"]["ms"] for row in rows])
        low, high = (1 + mean) / (1 + half) - 1, (1 + mean) * (1 + half) - 1
        planners[name] = {"slower_than_auto": round(mean, 4)}
        if np.isfinite(half):
            planners[name]["interval"] = [round(low, 4), round(high, 4)]
    closed = {name: gap_closed(rows, name) for name in (OURS[0], *best_of(())) if name in names}
    return {
        "planners": planners,
        "gap_from_the_best_greedy_closed": closed,
        **{
            key: round(statistics.mean(row[key] for row in rows), 3)
            for key in ("auto_over_fastest", "spearman_predicted")
        },
    }


def gap_closed(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the share of the gap that the plan ``name`` closes, where a task's gap is the
    difference in log time between its best greedy plan and its fastest plan. The fastest of many
    noisy medians underestimates the true time, so the share is slightly too low. Returns None if
    the greedy plans are the fastest plans.
    """
    ours = possible = 0.0
    for row in rows:
        ms = {plan: result["ms"] for plan, result in row["plans"].items()}
        greedy = min((ms[g] for g in GREEDY if g != "random" and g in ms), default=None)
        if greedy is not None:
            ours += math.log(greedy / ms[name])
            possible += math.log(greedy / min(ms.values()))
    return round(ours / possible, 3) if possible > 0 else None


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation of two lists, or 0 for fewer than three values."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda n: values[n])
        places = [0.0] * len(values)
        for rank, n in enumerate(order):
            places[n] = float(rank)
        return places

    return round(statistics.correlation(ranks(first), ranks(second)), 3) if len(first) > 2 else 0.0

"""Plans of different planners on the ranks of this machine: by the clock, and rank by rank.

``steps``: on 2 ranks (or more), all plans of a task in turns; the difference of a plan with ours is
taken round by round. A plan takes part until its 95 % interval is below 3 % or as far from 0 as it
is wide, or the time is over: then plans are not told apart where the interval holds 0.
``ranks``: for more ranks than there are cores. Every rank is a process with its part of the plan,
and its moves are timed by the clock of its own thread, so that ranks which share a core do not
count each other's work; what arrives is what would arrive, as if one rank at a time had been
replayed. The exchanges are priced by the profile and the step is simulated.
The first stated cost is of ``ranks``, the second of ``steps``; ``steps`` takes both and says how
they rank plans alike. Where a planner may have several plans measured, one half of the rounds or
passes chooses and the other is reported.
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
from sbpflow.planner.calibration.records import plan_of_tree, plan_tree
from sbpflow.planner.clusters import crowded, link_of, with_link
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Profile, load
from sbpflow.planner.costs.simulate import PHASE, TRANSFERS
from sbpflow.planner.planners import GREEDY
from sbpflow.planner.task import Task

STEPS_BATCH, RANKS_BATCH = 4096, 2048
STEPS_TABLES = (10, 26, 40)  # in turn
PASSES = 3  # over the moves of every plan: the first chooses, the others are reported
OURS = ("auto", "auto 2", "auto 3", "auto 4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task of the comparison, and everyone's plans of it by name."""

    number: int
    tables: int
    batch: int
    plans: Named

    def tree(self) -> dict[str, Any]:
        """JSON-ready."""
        plans = {name: [plan_tree(plan), ms] for name, (plan, ms) in self.plans.items()}
        return {
            "number": self.number, "tables": self.tables, "batch": self.batch, "plans": plans,
        }  # fmt: skip

    @staticmethod
    def of(tree: dict[str, Any]) -> "Case":
        plans = {name: (plan_of_tree(plan), ms) for name, (plan, ms) in tree["plans"].items()}
        return Case(number=tree["number"], tables=tree["tables"], batch=tree["batch"], plans=plans)

    def task(self, world_size: int) -> Task:
        return make_sample(
            self.number, world_size, num_tables=self.tables, batch_size=self.batch
        ).task

    def distinct(self) -> dict[str, list[str]]:
        """{plan as JSON: its names}: what is the same plan is measured once."""
        found: dict[str, list[str]] = {}
        for name, (plan, _) in self.plans.items():
            found.setdefault(json.dumps(plan_tree(plan), sort_keys=True), []).append(name)
        return found


def planned(args: argparse.Namespace, cells: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Plans for (tables, ranks, number of the task) each; from ``--plans`` where it is there."""
    path = Path(args.plans) if args.plans else None
    known: dict[str, Any] = {}
    if path is not None and path.is_file():
        known = json.loads(path.read_text())
    profile = load(Path(args.profile) if args.profile else None)
    trained: dict[int, Any] = {}
    for tables, size, number in cells:
        key, batch = f"{tables}x{size} {number}", args.batch
        if key in known:
            continue
        task = make_sample(number, size, num_tables=tables, batch_size=batch).task
        if size not in trained:
            trained[size] = planners_of(profile, task, args.planners)
        alike = args.what == "steps"
        plans = plans_of(task, profile, trained[size], alike=alike)
        known[key] = Case(number=number, tables=tables, batch=batch, plans=plans).tree()
        print(f"planned {key}: {len(plans)} plans", flush=True)
        if path is not None:
            path.write_text(json.dumps(known))
    return known


def run_steps(args: argparse.Namespace) -> None:
    """By the clock, on ``--ranks`` of this machine."""
    size = args.ranks
    counts = args.tables or STEPS_TABLES
    cells = [(counts[n % len(counts)], size, n) for n in range(args.tasks)]
    args.batch = STEPS_BATCH
    known = planned(args, cells)
    if args.plan_only:
        return
    where = args.link or "loopback"
    suffix = "" if size == 2 else f"_{size}_ranks"
    kind = "steps" if args.tables is None else "job"
    results = Results(f"planner_{kind}_{where}{suffix}", recorded=args.recorded)
    cases = [Case.of(known[f"{tables}x{size} {number}"]) for tables, size, number in cells]
    profile = load(Path(args.profile) if args.profile else None)
    found = _measured(cases, size, args.link, ["--seconds", str(args.seconds / len(cases))])
    elsewhere = load(Path(args.elsewhere)) if args.elsewhere else None
    if elsewhere is not None and args.link:
        elsewhere = with_link(elsewhere, *link_of(args.link))
    rows: list[dict[str, Any]] = []
    for case, one in zip(cases, found, strict=True):
        names = [names[0] for names in case.distinct().values()]
        times = dict(zip(names, one["rounds"], strict=True))
        priced = dict(zip(names, _priced(profile, case, size, one["moves"]), strict=True))
        row = compared(case, times, priced)
        if elsewhere is not None:
            row |= told_elsewhere(crowded(elsewhere, size), case, size, row["plans"])
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


def told_elsewhere(
    profile: Profile, case: Case, size: int, plans: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """How far a calibration of another number of ranks or another link is off, plan by plan."""
    cost = TaskCost(profile, case.task(size))
    names = [names[0] for names in case.distinct().values()]
    said = {name: cost.predict(case.plans[name][0]).step_ms for name in names}
    clock = [plans[name]["ms"] for name in names]
    errors = [said[name] / ms - 1 for name, ms in zip(names, clock, strict=True)]
    return {
        "elsewhere": {
            "ms": {name: round(ms, 3) for name, ms in said.items()},
            "median_error": round(statistics.median(errors), 4),
            "median_absolute_error": round(statistics.median(map(abs, errors)), 4),
            "spearman": spearman([said[name] for name in names], clock),
        }
    }


def run_ranks(args: argparse.Namespace) -> None:
    """Rank by rank, for every ``--cells`` TxDxN."""
    args.batch = RANKS_BATCH
    profile = load(Path(args.profile) if args.profile else None)
    results = Results(args.results, recorded=args.recorded)
    for cell in args.cells:
        tables, size, tasks = map(int, cell.split("x"))
        cells = [(tables, size, number) for number in range(tasks)]
        known = planned(args, cells)
        if args.plan_only:
            continue
        cases = [Case.of(known[f"{tables}x{size} {number}"]) for _, _, number in cells]
        found = _measured(cases, size, None, ["--passes", str(PASSES)])
        rows: list[dict[str, Any]] = []
        for case, one in zip(cases, found, strict=True):
            names = [names[0] for names in case.distinct().values()]
            ms = _priced(profile, case, size, one["moves"])
            passes = {
                name: [ms[place + turn * len(names)] for turn in range(PASSES)]
                for place, name in enumerate(names)
            }
            row = compared(case, passes)
            rows.append(row)
            results.add(benchmark="ranks", number=case.number, tables=tables, ranks=size, **row)
        results.add(benchmark="cell", tables=tables, ranks=size, tasks=len(rows), **summary(rows))


def _measured(
    cases: Sequence[Case], size: int, link: str | None, words: Sequence[str]
) -> list[dict[str, Any]]:
    """What the workers say of each case, plans in the order of ``Case.distinct``."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "tasks.json"), Path(folder, "times.json")
        tasks = [
            {**case.tree(), "plans": [json.loads(text) for text in case.distinct()]}
            for case in cases
        ]
        asked.write_text(json.dumps(tasks))
        words = ["--tasks", str(asked), "--output", str(answer), *words]
        start_ranks("benchmarks.planner_worker", size, words, link=link)
        return json.loads(answer.read_text())


def _priced(
    profile: Profile, case: Case, size: int, moves: Sequence[Sequence[Sequence[float]]]
) -> list[float]:
    """ms of a step of measured moves with the profile's exchanges; ``moves`` may be many passes."""
    cost = TaskCost(profile, case.task(size))
    plans = [case.plans[names[0]][0] for names in case.distinct().values()]
    exchanges = [PHASE[kind] for kind in TRANSFERS]
    said = [cost.rank_ms(cost.totals(plan)) for plan in plans]
    phases = np.array(moves)
    for place, one in enumerate(phases):
        mine = said[place % len(plans)]
        one[:, exchanges] = mine[:, exchanges]
        one[:, PHASE["rest"]] = mine[:, PHASE["rest"]]
    return [float(ms) for ms in cost.combine(phases)]


def best_of(names: Iterable[str]) -> dict[str, list[str]]:
    """{several plans of one: their names}; the last tries what ``--measure 4`` does."""
    alike = [name for name in names if name.startswith("all ")]
    return {
        "auto, best of 4": [*OURS],
        "greedies, best of 4": [name for name in GREEDY if name != "random"],
        "random, best of 4": ["random 1", "random 2", "random 3", "random 4"],
        "auto, best of 4 and of all alike": [*OURS, *alike],
    }


def compared(
    case: Case,
    times: Mapping[str, Sequence[float]],
    priced: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Of every plan: predicted ms, how much slower than ours, with the interval, and the ms that
    this makes of our median.

    ``times`` [name] are rounds or passes, of plans that dropped out fewer than of ours. What
    chooses among plans does so by every other one and is reported by the rest.
    """
    of = {name: names[0] for names in case.distinct().values() for name in names}
    every = {name: list(times[of[name]]) for name in case.plans}
    against = {name: (ms, every["auto"]) for name, ms in every.items()}
    for name, among in best_of(case.plans).items():
        there = [one for one in among if one in every]
        if there:
            ours = _choosing(every["auto"])
            chosen = min(there, key=lambda one: difference(_choosing(every[one]), ours)[0])
            against[name] = _reported(every[chosen]), _reported(every["auto"])
    found: dict[str, Any] = {}
    usual = statistics.median(every["auto"])
    for name, (theirs, ours) in against.items():
        mean, half = difference(theirs, ours)
        found[name] = {
            "ms": round(usual * (1 + mean), 3),
            "slower_than_auto": round(mean, 4),
            "plus_minus": round(half, 4) if np.isfinite(half) else None,
        }
        if name in case.plans:
            found[name]["predicted_ms"] = round(case.plans[name][1], 3)
            if priced is not None:
                found[name]["rank_by_rank_ms"] = round(priced[of[name]], 3)
    names = list(times)
    clock = [found[name]["ms"] for name in names]
    best = min(names, key=lambda name: found[name]["ms"])
    row: dict[str, Any] = {
        "plans": found,
        "fastest": best,
        "auto_over_fastest": round(found["auto"]["ms"] / found[best]["ms"] - 1, 4),
        "spearman_predicted": spearman([case.plans[name][1] for name in names], clock),
    }
    if priced is not None:
        row["spearman_rank_by_rank"] = spearman([priced[name] for name in names], clock)
    return row


def _choosing(ms: Sequence[float]) -> list[float]:
    """The rounds or passes by which one of several plans is chosen."""
    return list(ms[:1]) if len(ms) <= PASSES else list(ms[0::2])


def _reported(ms: Sequence[float]) -> list[float]:
    """The others."""
    return list(ms[1:]) if len(ms) <= PASSES else list(ms[1::2])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over tasks: of every planner how much slower than ours, with 95 % intervals."""
    found: dict[str, Any] = {}
    names = [name for name in rows[0]["plans"] if all(name in row["plans"] for row in rows)]
    for name in names:
        theirs = [row["plans"][name]["ms"] for row in rows]
        mean, half = difference(theirs, [row["plans"]["auto"]["ms"] for row in rows])
        low, high = (1 + mean) / (1 + half) - 1, (1 + mean) * (1 + half) - 1
        found[name] = {"slower_than_auto": round(mean, 4)}
        if np.isfinite(half):
            found[name]["interval"] = [round(low, 4), round(high, 4)]
    closed = {name: gap_closed(rows, name) for name in (OURS[0], *best_of(())) if name in names}
    means = ("auto_over_fastest", "spearman_predicted", "spearman_rank_by_rank")
    told = [row["elsewhere"] for row in rows if "elsewhere" in row]
    keys = ("median_error", "median_absolute_error", "spearman")
    return {
        "planners": found,
        "gap_from_the_best_greedy_closed": closed,
        "elsewhere": {
            key: round(statistics.mean(one[key] for one in told), 4) for key in keys if told
        },
        **{
            key: round(statistics.mean(row[key] for row in rows), 3)
            for key in means
            if key in rows[0]
        },
    }


def gap_closed(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Of the way from each task's best greedy to its fastest plan, in logarithms over all tasks.

    The fastest of many noisy medians is a little too fast, so this errs on the low side. ``None``
    where the greedies are as fast.
    """
    ours = possible = 0.0
    for row in rows:
        ms = {plan: one["ms"] for plan, one in row["plans"].items()}
        greedy = min((ms[one] for one in GREEDY if one != "random" and one in ms), default=None)
        if greedy is not None:
            ours += math.log(greedy / ms[name])
            possible += math.log(greedy / min(ms.values()))
    return round(ours / possible, 3) if possible > 0 else None


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda n: values[n])
        found = [0.0] * len(values)
        for rank, n in enumerate(order):
            found[n] = float(rank)
        return found

    return round(statistics.correlation(ranks(one), ranks(other)), 3) if len(one) > 2 else 0.0

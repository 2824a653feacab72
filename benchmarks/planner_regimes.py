"""Measures all planners' plans on two hosts with a slow link and, in most tasks, little memory.

    python -m benchmarks.planner_link --link 1gbit --ranks 4 --output PROFILE
    python -m benchmarks.planner_regimes --link 1gbit --profile PROFILE --journal FILE

The hosts are network namespaces with two ranks each. A third of the tasks have no memory limit, a
third have equal limits, and in the last third, the ranks on the second host have half as much
memory as the others. In half of the tasks with limits, one table is too large for any rank. Plans
that do not fit are counted and not measured. The plans of a task run alternately
(``planner_worker.py``). Finished tasks are kept in the journal, so the benchmark continues where it
stopped. With ``--link 1gbit,250mbit``, the first host sends at 1 Gbit/s, and the second at 250
Mbit/s. With ``--link loopback``, all ranks are on one host; the profile then comes from ``sbpflow
calibrate --ranks 4``.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.network import sending_rates
from benchmarks.planner_plans import Named, make_sample, planners_of, plans_of
from benchmarks.planner_steps import OURS, Case, best_of, compared, measured_cases
from benchmarks.planner_worker import half_interval
from benchmarks.record import Results
from sbpflow.planner.calibration.design import draw_plans
from sbpflow.planner.clusters import link_of, with_link
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Link, Profile, load
from sbpflow.planner.planners import GREEDY, LEARNED
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.problem import price_of
from sbpflow.planner.shapes import problem_of
from sbpflow.planner.task import Plan, Task

RANKS, HOSTS = 4, 2
TASKS, TABLES, BATCH = 12, (10, 26, 40), 4096
LIMITS = ("none", "equal", "unequal")
SLACK = 1.15  # total memory limit of the ranks, relative to the memory of whole tables
# In every other task with limits, the largest table has this share of the bytes of all rows.
GIANT = 0.4
DRAWN_EVERY = 3  # in every third task, random plans are measured, too
OTHERS = (*(name for name in GREEDY if name != "random"), "embark", *LEARNED, "torchrec")
COMPARED = (
    *OURS, *OTHERS, "scheme: auto", "auto, built-in constants", "auto, whole or copied",
)  # fmt: skip


def limits_of(number: int) -> str:
    return LIMITS[number * len(LIMITS) // TASKS]


def giant_of(number: int) -> float:
    """Return the largest table's share of the bytes of all tables, or 0 if no table is especially
    large.
    """
    return GIANT if number % 2 and limits_of(number) != "none" else 0.0


def nominal_link(rate: str) -> Link | None:
    """Return the link that ``--link`` describes, computed from its rate alone, or from the lower of
    two rates; the ranks of a host share the link. Returns None on loopback.
    """
    if rate == "loopback":
        return None
    links = [link_of(sending, RANKS // HOSTS)[0] for sending in sending_rates(rate)]
    return min(links, key=lambda link: link.between_gb_per_s)


def task_of(number: int, profile: Profile, batch: int, hosts: int = HOSTS) -> Task:
    """Return the task with this number, with its hosts and memory limits."""
    tables = TABLES[number % len(TABLES)]
    sample = make_sample(number, RANKS, num_tables=tables, batch_size=batch, giant=giant_of(number))
    task = replace(sample.task, num_hosts=hosts)
    if limits_of(number) == "none":
        return task
    whole = Setting(task, problem_of(TaskCost(profile, task)))
    even = SLACK * float(price_of(whole.problem, GREEDY["size"](whole)).memory.mean())
    shares = (4 / 3, 2 / 3) if limits_of(number) == "unequal" else (1.0, 1.0)
    each = tuple(int(even * shares[rank * HOSTS // RANKS]) for rank in range(RANKS))
    return replace(task, device_bytes=each)


def drawn_plans(task: Task, number: int, count: int) -> dict[str, Plan]:
    """Return random plans, half of which use one shape for as many tables as possible."""
    sample = make_sample(number, RANKS, num_tables=len(task.tables), batch_size=task.batch_size)
    sample = replace(sample, task=task)
    return {f"drawn {name}": plan for name, plan in draw_plans(sample, number, count)}


def fitting(task: Task, profile: Profile, plans: Named) -> tuple[Named, list[str]]:
    """Return the plans that fit, and the names of the others."""
    cost, limits = TaskCost(profile, task), task.device_bytes or (math.inf,) * RANKS
    fits = {
        name: all(
            held <= limit
            for held, limit in zip(cost.predict(plan).memory_bytes, limits, strict=True)
        )
        for name, (plan, _) in plans.items()
    }
    return {n: p for n, p in plans.items() if fits[n]}, [n for n, fit in fits.items() if not fit]


def measured_task(number: int, args: argparse.Namespace, profile: Profile) -> dict[str, Any]:
    """Plan one task with every planner, measure the plans that fit, and return the journal's
    line.
    """
    link = nominal_link(args.link)
    task = task_of(number, profile, args.batch, hosts=1 if link is None else HOSTS)
    published = planners_of(profile, task, OTHERS)
    plans = plans_of(task, profile, published, link)
    plans = {name: plans[name] for name in COMPARED if name in plans}
    if args.drawn and number % DRAWN_EVERY == 0:
        cost = TaskCost(profile, task)
        plans |= {
            name: (plan, cost.predict(plan).step_ms)
            for name, plan in drawn_plans(task, number, args.drawn).items()
        }
    none = [name for name in OTHERS if name not in plans]
    plans, too_large = fitting(task, profile, plans)
    case = Case(
        number=number,
        tables=len(task.tables),
        batch=args.batch,
        plans=plans,
        giant=giant_of(number),
    )
    print(
        f"task {number}: {len(case.distinct())} plans; plans that do not fit: {too_large}",
        flush=True,
    )
    wire = args.link if link else None
    (times,) = measured_cases([case], RANKS, wire, args.seconds)
    row = compared(case, times)
    errors = [abs(case.plans[name][1] / row["plans"][name]["ms"] - 1) for name in times]
    return {
        "number": number,
        "tables": case.tables,
        "hosts": task.num_hosts,
        "limits": limits_of(number),
        "giant": case.giant,
        "batch": args.batch,
        "rounds": len(times["auto"]),
        "do_not_fit": [*none, *too_large],
        "step_error": round(statistics.median(errors), 4),
        "split_tables": sum(choice.shape.num_shards > 1 for choice in plans["auto"][0].values()),
        **row,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, for every planner, its mean slowdown relative to ``auto`` over the tasks in which its
    plan fits, with Student's interval; and the same for tasks with and without limits.
    """
    names = dict.fromkeys([*COMPARED, *best_of(())])
    groups = {
        "all": list(rows),
        "limits": [row for row in rows if row["limits"] != "none"],
        "no limits": [row for row in rows if row["limits"] == "none"],
    }
    planners = {
        name: {group: over for group, chosen in groups.items() if (over := over_auto(chosen, name))}
        for name in names
    }
    return {
        "planners": planners,
        "do_not_fit": {name: sum(name in row["do_not_fit"] for row in rows) for name in COMPARED},
        "auto_over_fastest": round(statistics.mean(row["auto_over_fastest"] for row in rows), 4),
        "spearman_predicted": round(statistics.mean(row["spearman_predicted"] for row in rows), 3),
        "step_error": round(statistics.median(row["step_error"] for row in rows), 4),
    }


def over_auto(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return a planner's mean slowdown relative to ``auto`` over the tasks for which its plan was
    measured, with Student's interval; empty for fewer than two tasks.
    """
    logs = [
        math.log1p(row["plans"][name]["slower_than_auto"]) for row in rows if name in row["plans"]
    ]
    if len(logs) < 2:
        return {}
    mean, half = statistics.mean(logs), half_interval(logs)
    return {
        "tasks": len(logs),
        "slower_than_auto": round(math.expm1(mean), 4),
        "interval": [round(math.expm1(mean - half), 4), round(math.expm1(mean + half), 4)],
    }


def journaled(
    path: Path, numbers: Sequence[int], measure: Callable[[int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Measure the tasks that are not yet in the journal, and add a line for each. Return the lines
    of all tasks, by number.
    """
    known: dict[int, dict[str, Any]] = {}
    if path.is_file():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        known = {line["number"]: line for line in lines}
    for number in numbers:
        if number not in known:
            known[number] = measure(number)
            with path.open("a", encoding="ascii") as file:
                file.write(json.dumps(known[number]) + "\n")
    return [known[number] for number in sorted(known)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="1gbit", help="a rate, two rates, or loopback")
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seconds", type=float, default=150.0, help="of rounds per task")
    parser.add_argument("--tasks", type=int, nargs="*", default=list(range(TASKS)))
    parser.add_argument("--drawn", type=int, default=20, help="random plans in every third task")
    parser.add_argument(
        "--replace-rate",
        action="store_true",
        help="replace the rate between hosts in the profile, which was measured on another link",
    )
    args = parser.parse_args()
    profile = load(args.profile)
    if args.replace_rate and (nominal := nominal_link(args.link)) is not None:
        link = replace(profile.link, between_gb_per_s=nominal.between_gb_per_s)
        profile = with_link(profile, link, f"{args.link} between hosts")
    rows = journaled(args.journal, args.tasks, lambda n: measured_task(n, args, profile))
    results = Results(f"planner_regimes_{args.link.replace(',', '_')}", recorded=len(rows) == TASKS)
    for row in rows:
        results.add(benchmark="task", link=args.link, ranks=RANKS, **row)
    results.add(benchmark="summary", link=args.link, tasks=len(rows), **summary(rows))


if __name__ == "__main__":
    main()

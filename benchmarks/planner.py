"""Compares our planner with published planners by predicted step time and by measured time.

    python -m benchmarks.planner objective [--journal FILE | --profile FILE] [--cells 10x2x12 ..]
    python -m benchmarks.planner steps [--link 1gbit] [--profile FILE] [--tasks 6]
    python -m benchmarks.planner speed [--profile FILE]
    python -m benchmarks.planner calibration [--profile FILE] [--link 1gbit]

``objective`` prices plans for held-out generated tasks and for EMBark's workloads. Planners search
with a cost model fitted to every other sample of a calibration's journal, and a cost model fitted
to the other samples prices their plans. With ``--profile``, one model does both, which favors
planners that search with it. For each task, the report lists every planner's plan, the best known
plan, the lower bound, and, for 10 tables on up to 4 ranks, the optimum of a stated set of plans.

``steps`` runs plans alternately on --ranks ranks (``benchmarks/planner_steps.py``).
"""

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.peer_torchrec_planner import torchrec_plan
from benchmarks.planner_embark import EMBARK, embark_task
from benchmarks.planner_optimum import enumerated
from benchmarks.planner_plans import unsplit
from benchmarks.planner_steps import run_steps
from benchmarks.planner_worker import half_interval
from benchmarks.record import Results
from sbpflow.errors import SbpError
from sbpflow.planner.calibration.calibrate import Journal
from sbpflow.planner.calibration.fit import fit
from sbpflow.planner.clusters import MACHINES, described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Profile, default_path, load
from sbpflow.planner.plan_command import to_measure
from sbpflow.planner.planners import GREEDY, LEARNED, make_plan, published
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.auto import search
from sbpflow.planner.search.bounds import bound
from sbpflow.planner.search.problem import Assignment, price_of
from sbpflow.planner.shapes import WHOLE, Shape, option_number, problem_of
from sbpflow.planner.task import Task
from sbpflow.planner.workloads import DIMS, Drawn, make_task, random_task, split_pool

CELLS = ("10x2x12", "10x4x12", "20x3x12", "50x4x12", "100x8x6", "200x16x3")  # tables, ranks, tasks
# maximum number of tables for these planners; with more tables, they take minutes per task
SLOW = {"neuroshard": 100, "torchrec": 100}
# memory limits per rank, relative to the mean memory per rank if all tables are whole
SLACKS = (1.1, 1.25, 1.5, 2.0)
# The judging cost model picks the best of this many of our plans, and of as many random plans.
MEASURED = 4
BATCH = 8192
GIANT = Drawn(num_rows=200_000_000, active=20_000_000, pooling=50.0, s=0.8, q=10.0)


@dataclass(frozen=True, slots=True)
class Models:
    """The cost model that the planners use (``seen``), and the one that judges their plans."""

    seen: Profile
    judge: Profile
    origin: str


@dataclass(frozen=True, slots=True)
class Judged:
    """A task, priced with both cost models."""

    cost: TaskCost
    setting: Setting
    judge: Setting


def halves(path: Path) -> Models:
    """Fit two models to disjoint samples of one calibration."""
    facts = json.loads(path.read_text().splitlines()[-1])["facts"]
    records = list(Journal(path, facts).records.values())
    numbers = sorted({record.sample for record in records})
    backend = facts["world"].split()[1]
    seen, judge = (
        fit([record for record in records if record.sample in half], backend=backend, about=facts)
        for half in (set(numbers[0::2]), set(numbers[1::2]))
    )
    return Models(seen, judge, f"each fitted to half of {len(numbers)} calibration samples")


def judged(models: Models, task: Task, slack: float | None, seed: int) -> Judged:
    """Price the task with both models; ``slack`` is each rank's memory limit, relative to the mean
    memory per rank of a plan with whole tables.
    """
    if slack is not None:
        open_cost = TaskCost(models.seen, task)
        whole = Setting(task, problem_of(open_cost))
        held = price_of(whole.problem, GREEDY["size"](whole)).memory.mean()
        task = replace(task, device_bytes=(int(slack * held),) * task.world_size)
    pair = [TaskCost(profile, task) for profile in (models.seen, models.judge)]
    settings = [Setting(task, problem_of(cost), seed) for cost in pair]
    return Judged(pair[0], *settings)


class Planners:
    """All planners for one number of ranks. The learned planners are trained with ``models.seen``,
    the cost model that the planners use.
    """

    def __init__(self, models: Models, world_size: int, seed: int, names: Sequence[str]) -> None:
        task = random_task(
            0, num_tables=10, world_size=world_size, held_out=False, batch_size=BATCH
        )
        like = TaskCost(models.seen, task)
        self.training_s: dict[str, float] = {}
        self.plans: dict[str, Callable[[Setting], Assignment]] = dict(GREEDY)
        self.plans["embark"] = published("embark", like, seed)
        for name in LEARNED:
            if name in names:
                start = time.perf_counter()
                self.plans[name] = published(name, like, seed)
                self.training_s[name] = time.perf_counter() - start
        if "torchrec" in names:
            self.plans["torchrec"] = torchrec_plan
        self.plans = {name: plan for name, plan in self.plans.items() if name in names}


def one_task(case: Judged, planners: Planners, optimum: bool) -> dict[str, object]:
    """Return the ms that the judge predicts for every planner's plan; None means that no plan
    exists or that the plan does not fit.
    """
    seen, judge = case.setting, case.judge
    ms: dict[str, float | None] = {}
    seconds: dict[str, float] = {}

    def keep(name: str, plan: Assignment, start: float) -> None:
        priced = price_of(judge.problem, plan)
        seconds[name] = time.perf_counter() - start
        ms[name] = priced.ms if priced.feasible else None

    for name, planner in planners.plans.items():
        start = time.perf_counter()
        try:
            keep(name, planner(seen), start)
        except (SbpError, ValueError, RuntimeError) as error:
            ms[name], seconds[name] = None, time.perf_counter() - start
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    start = time.perf_counter()
    drawn = [GREEDY["random"](replace(seen, seed=n)) for n in range(MEASURED)]
    keep("random, best of 4", min(drawn, key=lambda p: price_of(judge.problem, p).rank), start)
    start = time.perf_counter()
    ours = make_plan("auto", case.cost, seed=seen.seed)
    keep("auto", ours.assignment, start)
    named = to_measure(ours, MEASURED)
    best = [plan for name, plan in named.items() if name.startswith("auto")]
    keep("auto, best of 4", min(best, key=lambda p: price_of(judge.problem, p).rank), start)
    start = time.perf_counter()
    narrow = unsplit(problem_of(case.cost))
    table_only = search(narrow, seed=seen.seed)
    keep("auto, whole or copied", _in(judge, narrow, table_only.assignment), start)
    # Also search with the judge's own prices, because gaps are relative to the best known plan.
    own = search(judge.problem, seed=1, given={"auto": ours.assignment})
    limit = bound(judge.problem, own.priced.ms)
    facts: dict[str, object] = {"bound_ms": limit.ms}
    if optimum:
        facts |= _optimum(judge)
    known = [own.priced.ms if own.priced.feasible else None, facts.get("optimum_ms"), *ms.values()]
    facts["best_known_ms"] = min((ms for ms in known if ms), default=None)
    return {**facts, "ms": ms, "seconds": {name: round(s, 3) for name, s in seconds.items()}}


def _in(judge: Setting, problem: object, assignment: Assignment) -> Assignment:
    """Convert an assignment of a narrowed problem to the option numbers of the judge's problem."""
    from sbpflow.planner.shapes import assignment_of, plan_of

    return assignment_of(judge.problem, plan_of(judge.task, problem, assignment))


def _optimum(judge: Setting) -> dict[str, object]:
    """Return the optimum over all plans in which each table is whole on some rank, or split by rows
    over all ranks with the ``unique`` exchange.
    """
    size = judge.num_ranks
    rows = Shape("S(0)", "unique", (size, 1))
    numbers = tuple(
        tuple(n for shape in (WHOLE, rows) if (n := option_number(options, shape)) is not None)
        for options in judge.problem.options
    )
    optimum = enumerated(judge.problem, numbers)
    if optimum is None:
        return {}
    priced = price_of(judge.problem, optimum[0])
    return {
        "optimum_ms": priced.ms if priced.feasible else None,
        "optimum_of": f"{optimum[1]:,} plans: tables whole on one rank (columns), or S(0) (unique)",
    }


def summary(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """Report, for each planner, the geometric mean of its slowdown relative to our planner, with
    the 95 % interval, the share of tasks in which its plan fits, and its planning time. For our
    planner, also report how far its plans are from the bound, the best known plan, and the optimum.
    """
    found: dict[str, object] = {"tasks": len(rows)}
    names = list(rows[0]["ms"])
    for name in names:
        pairs = [(row["ms"][name], row["ms"]["auto"]) for row in rows]
        both = [math.log(other / ours) for other, ours in pairs if other and ours]
        if not both:
            continue
        mean = statistics.mean(both)
        half = half_interval(both) if len(both) > 1 else math.inf
        found[name] = {
            "slower_than_auto": round(math.expm1(mean), 4),
            "interval": [round(math.expm1(mean - half), 4), round(math.expm1(mean + half), 4)],
            "fits": round(sum(other is not None for other, _ in pairs) / len(pairs), 3),
            "seconds": round(
                statistics.mean(row["seconds"][name] for row in rows),
                3,
            ),
        }
    for name in ("auto", "auto, best of 4"):
        found[f"gap to the bound, {name}"] = _mean(rows, name, "bound_ms")
        found[f"above the best known, {name}"] = _mean(rows, name, "best_known_ms")
        if any(row.get("optimum_ms") for row in rows):
            found[f"above the optimum of its space, {name}"] = _mean(rows, name, "optimum_ms")
        found[f"share of the gap from the best greedy closed, {name}"] = _closed(rows, name)
    return found


def _mean(rows: Sequence[dict[str, object]], name: str, key: str) -> float | None:
    values = [row["ms"][name] / row[key] - 1 for row in rows if row["ms"][name] and row.get(key)]
    return round(statistics.mean(values), 4) if values else None


def _closed(rows: Sequence[dict[str, object]], name: str) -> float | None:
    """Return how much of the gap between the best feasible greedy plan and the best known plan is
    closed. Logarithms are summed over all tasks, because for a single task the share would be a
    ratio of small differences.
    """
    ours = possible = 0.0
    for row in rows:
        ms = row["ms"]
        greedy = min((ms[g] for g in GREEDY if g != "random" and ms.get(g)), default=None)
        if greedy is not None and ms[name] and row["best_known_ms"]:
            ours += math.log(greedy / ms[name])
            possible += math.log(greedy / row["best_known_ms"])
    return round(ours / possible, 3) if possible > 0 else None


def objective(args: argparse.Namespace) -> None:
    models = halves(Path(args.journal)) if args.journal else _one(args.profile)
    results = Results(args.results, recorded=args.recorded)
    for cell in args.cells:
        num_tables, size, tasks = map(int, cell.split("x"))
        names = [name for name in args.planners if num_tables <= SLOW.get(name, num_tables)]
        planners = Planners(models, size, 0, names)
        rows: list[dict[str, object]] = []
        for number in range(tasks):
            slack = (None, *SLACKS)[number % 5]
            task = random_task(
                100 + number,
                num_tables=num_tables,
                world_size=size,
                held_out=True,
                batch_size=BATCH,
            )
            case = judged(models, task, slack, number)
            row = one_task(case, planners, optimum=num_tables <= 10 and size <= 4)
            rows.append(row)
            results.add(
                benchmark="task", tables=num_tables, ranks=size, slack=slack, number=number, **row
            )
        results.add(
            benchmark="cell",
            tables=num_tables,
            ranks=size,
            judge=models.origin,
            training_seconds=planners.training_s,
            **summary(rows),
        )
    if args.embark:
        _embark(args, models, results)


def _embark(args: argparse.Namespace, models: Models, results: Results) -> None:
    planners = Planners(models, 8, 0, args.planners)
    rows: list[dict[str, object]] = []
    for name in EMBARK:
        task = embark_task(name, world_size=8, batch_size=BATCH)
        row = one_task(judged(models, task, 1.5, 0), planners, optimum=False)
        rows.append(row)
        results.add(benchmark="embark", workload=name, ranks=8, slack=1.5, **row)
    results.add(benchmark="cell", workloads=list(EMBARK), ranks=8, **summary(rows))


def calibration(args: argparse.Namespace) -> None:
    """Report the errors on held-out tasks that the profile's calibration recorded."""
    profile = _one(args.profile).seen
    results = Results(
        "planner_calibration", benchmark=args.link or "loopback", recorded=args.recorded
    )
    kept = ("world", "plans", "samples", "turns", "taken")
    results.add(
        errors={name: round(value, 4) for name, value in profile.errors.items()},
        link=asdict(profile.link),
        about={name: profile.about[name] for name in kept if name in profile.about},
    )


def speed(args: argparse.Namespace) -> None:
    """Measure the planning time in seconds and the gap to the bound."""
    models = _one(args.profile)
    results = Results("planner_speed", recorded=args.recorded)
    for num_tables, size, batch, giants in (
        (26, 2, 8192, 0),
        (50, 4, 8192, 0),
        (200, 16, 8192, 0),
        (50, 64, 65536, 3),
        (300, 64, 65536, 0),
        (1000, 128, 65536, 0),
        (5000, 128, 65536, 0),
    ):
        if giants:
            task = _task_with_giants(giants, num_tables, size, batch)
        else:
            task = random_task(
                0, num_tables=num_tables, world_size=size, held_out=True, batch_size=batch
            )
        start, busy = time.perf_counter(), time.process_time()
        planned = make_plan("auto", TaskCost(models.seen, task))
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        limit = bound(planned.problem, planned.priced.ms)
        results.add(
            benchmark="speed",
            tables=num_tables,
            ranks=size,
            giants=giants,
            seconds=round(seconds, 2),
            cpu_seconds=round(busy, 2),
            predicted_ms=planned.priced.ms,
            gap=round(limit.gap, 4),
            memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        )


def _task_with_giants(giants: int, num_tables: int, world_size: int, batch_size: int) -> Task:
    """Return a task with tables from the pool, except that the first ``giants`` tables are giant
    tables.
    """
    random = np.random.default_rng([0, num_tables, world_size, 7])
    half = split_pool(held_out=True)
    tables = [half[int(n)] for n in random.choice(len(half), num_tables, replace=False)]
    dims = [int(dim) for dim in random.choice(DIMS, num_tables)]
    tables[:giants], dims[:giants] = [GIANT] * giants, [max(DIMS)] * giants
    return make_task(tables, dims, world_size=world_size, batch_size=batch_size)


def _one(name: str | None) -> Models:
    profile = described(name) if name in MACHINES else load(Path(name) if name else default_path())
    return Models(profile, profile, f"the model used by the planners: {name or 'this machine'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["calibration", "objective", "steps", "speed"])
    parser.add_argument(
        "--journal", help="measurements of a calibration; a model is fitted to each half"
    )
    parser.add_argument("--profile")
    parser.add_argument("--tasks", type=int, default=6, help="number of tasks (steps)")
    parser.add_argument("--cells", nargs="*", default=CELLS, metavar="TxDxN")
    parser.add_argument("--embark", action="store_true", help="add EMBark's workloads")
    parser.add_argument(
        "--planners",
        nargs="+",
        default=[*GREEDY, "embark", "torchrec", "neuroshard", "dreamshard", "autoshard"],
    )
    parser.add_argument("--results", help="default planner_objective")
    parser.add_argument("--recorded", action="store_true", help="write to benchmarks/results")
    parser.add_argument("--link", help="a rate in tc's notation, such as 1gbit (steps)")
    parser.add_argument(
        "--elsewhere",
        help="a calibration of 2 ranks over loopback, whose predictions are also reported (steps)",
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="total time (steps)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (steps)")
    parser.add_argument("--tables", type=int, nargs="+", help="numbers of tables to try (steps)")
    parser.add_argument(
        "--plans", help="a file of plans to read, or to write if it does not exist (steps)"
    )
    parser.add_argument(
        "--plan-only",
        action="store_true",
        help="only write the plans, to measure them later with --plans",
    )
    args = parser.parse_args()
    args.results = args.results or f"planner_{args.what}"
    kinds = {
        "calibration": calibration,
        "objective": objective,
        "steps": run_steps,
        "speed": speed,
    }
    kinds[args.what](args)


if __name__ == "__main__":
    main()

"""``sbpflow plan | explain | compare``: plans for a ``tables.json`` under a profile.

Each returns the text that is printed.
"""

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.calibrate import plan_of_tree, plan_tree
from sbpflow.planner.calibration.candidates import to_measure
from sbpflow.planner.choose import checked
from sbpflow.planner.clusters import MACHINES, memory_of, profile_name, profile_of
from sbpflow.planner.costs.cost import CostModel, TaskCost
from sbpflow.planner.measured_plans import measure_plans
from sbpflow.planner.planners import PLANNERS, Planned, PlannerName, make_plan, planner_of
from sbpflow.planner.report import as_html, as_json, as_text, report_of
from sbpflow.planner.search.problem import price_of
from sbpflow.planner.shapes import assignment_of, plan_of, problem_of
from sbpflow.planner.tables_file import read_tables
from sbpflow.planner.task import plan_from_yaml, plan_to_yaml
from sbpflow.runtime.files.json_file import JsonError, is_number, list_of, read_json
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser
from sbpflow.runtime.processes.start_ranks import start_ranks

WRITERS = {".txt": as_text, ".json": as_json, ".html": as_html}


def _parser(name: str, says: str) -> ArgumentParser:
    parser = ArgumentParser(prog=f"sbpflow {name}", description=says)
    parser.add_argument(
        "--tables",
        type=local_path,
        required=True,
        help="tables.json; planner/tables_file.py has it",
    )
    parser.add_argument("--world-size", type=int, default=2, help="ranks; 2 by default")
    parser.add_argument(
        "--profile",
        type=profile_name,
        help=f"a calibration, or {', '.join(MACHINES)}; this machine's by default",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


def plan(argv: Sequence[str]) -> str:
    """Choose a layout, ranks and an exchange for every table; the YAML goes to ``--output``."""
    parser = _parser("plan", "Choose where every table lives, and say why.")
    parser.add_argument("--planner", default="auto", help=f"{', '.join(PLANNERS)}; auto by default")
    parser.add_argument(
        "--output", type=local_path, help="where parallel.plan finds it, as plan.yaml"
    )
    parser.add_argument(
        "--report", type=local_path, help="a .txt, .json or .html file beside the printed text"
    )
    parser.add_argument(
        "--measure",
        type=int,
        default=0,
        metavar="K",
        help="run the best K plans, and those with all tables alike, on ranks of this machine",
    )
    args = parser.parse_args(argv)
    cost, name = _cost(args), planner_of(args.planner)
    planned = make_plan(name, cost, seed=args.seed)
    lines: list[str] = []
    if args.measure:
        planned, lines = _measured(args, cost, checked(planned, cost))
    lines.append(_write(args, cost, planned))
    checked(planned, cost)
    return "\n".join(lines)


def explain(argv: Sequence[str]) -> str:
    """What a plan that is there would take, and what would be better for each table."""
    parser = _parser(
        "explain-plan", "Show what a plan takes on each rank, and what would be better."
    )
    parser.add_argument(
        "--plan", type=local_path, required=True, help="a YAML of plan, or a person's"
    )
    parser.add_argument(
        "--report", type=local_path, help="a .txt, .json or .html file beside the printed text"
    )
    args = parser.parse_args(argv)
    cost = _cost(args)
    given = plan_from_yaml(args.plan, cost.task)
    problem = problem_of(cost, given=given)
    assignment = assignment_of(problem, given)
    planned = Planned(
        planner=f"{args.plan}",
        plan=given,
        assignment=assignment,
        priced=price_of(problem, assignment),
        problem=problem,
        seconds=0.0,
    )
    return _write(args, cost, planned)


def compare(argv: Sequence[str]) -> str:
    """Every planner on the same tables, as the profile prices their plans."""
    parser = _parser("compare", "Price the plans of all planners, ours and the published ones.")
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), metavar="NAME")
    args = parser.parse_args(argv)
    cost = _cost(args)
    names: list[PlannerName] = [planner_of(name) for name in args.planners]
    rows = [make_plan(name, cost, seed=args.seed) for name in names]
    lines = [f"{'planner':<12} {'predicted ms':>13} {'fits':>5} {'seconds':>8}"]
    for one in sorted(rows, key=lambda one: one.priced.rank):
        fits = "yes" if one.priced.feasible else "no"
        lines.append(f"{one.planner:<12} {one.priced.ms:>13.3f} {fits:>5} {one.seconds:>8.2f}")
    return "\n".join(lines)


def _cost(args: Namespace) -> TaskCost:
    """What can be wrong is told before anything is searched."""
    if args.world_size < 1:
        raise ConfigError(f"--world-size: {args.world_size}; use 1 or more, as 4")
    report = getattr(args, "report", None)
    if report and report.suffix not in WRITERS:
        raise ConfigError(f"--report: {report}; end its name in {', '.join(WRITERS)}")
    if getattr(args, "measure", 0) < 0:
        raise ConfigError(f"--measure: {args.measure}; use 1 or more plans, as 4")
    for key in ("report", "output"):
        path: Path | None = getattr(args, key, None)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"--{key}: {path}: there is no folder {path.parent}; make it first")
    tables = read_tables(args.tables)
    if getattr(args, "measure", 0) and set(tables.laws) != {one.name for one in tables.tables}:
        raise ConfigError(
            "--measure: draws ids by each table's zipf, and not all have one; give all tables "
            '"zipf": {"s": .., "q": ..}, or leave --measure out'
        )
    profile, limit = profile_of(args.profile), memory_of(args.profile)
    device = {"nccl": "cuda", "gloo": "cpu"}[profile.backend]
    if getattr(args, "measure", 0) and device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--measure: --profile {args.profile} is of GPUs, and this machine has none that can "
            "be used; leave one of the two out"
        )
    return CostModel(profile).of(tables.task(args.world_size, device, device_bytes=limit))


def _write(args: Namespace, cost: TaskCost, planned: Planned) -> str:
    """Writes the files that are asked for, also of a plan that does not fit; the report's text."""
    report = report_of(planned, cost)
    if args.report:
        args.report.write_text(WRITERS[args.report.suffix](report), encoding="utf-8")
    if getattr(args, "output", None):
        notes = {
            "planner": planned.planner,
            "world_size": cost.task.world_size,
            "batch_size": cost.task.batch_size,
            "predicted_step_ms": round(planned.priced.ms, 4),
            "lower_bound_ms": round(report.bounds[0].ms, 4),
            "lower_bound_of": report.bounds[0].kind,
        }
        args.output.write_text(plan_to_yaml(planned.plan, notes), encoding="ascii")
    return as_text(report)


def _measured(args: Namespace, cost: TaskCost, planned: Planned) -> tuple[Planned, list[str]]:
    """The fastest as measured of the best K plans and the homogeneous ones."""
    plans = {
        name: plan_of(cost.task, planned.problem, assignment)
        for name, assignment in to_measure(planned, args.measure).items()
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "plans.json"), Path(folder, "measured.json")
        asked.write_text(json.dumps([plan_tree(one) for one in plans.values()]))
        words = [
            "measure",
            "--tables",
            str(args.tables),
            "--plans",
            str(asked),
            "--output",
            str(answer),
        ]
        if code := start_ranks(words, args.world_size, "--world-size"):
            raise ConfigError(
                f"--measure: a rank ended with exit code {code}; its message is above"
            )
        times = dict(zip(plans, _times(answer, len(plans)), strict=True))
    lines = [
        f"measured {ms:9.3f} ms  {name}" for name, ms in sorted(times.items(), key=lambda t: t[1])
    ]
    fastest = min(times, key=lambda name: times[name])
    assignment = assignment_of(planned.problem, plans[fastest])
    fastest_plan = replace(
        planned,
        plan=plans[fastest],
        assignment=assignment,
        priced=price_of(planned.problem, assignment),
    )
    return fastest_plan, lines


def _times(answer: Path, count: int) -> list[float]:
    """What ``measure`` wrote; ConfigError for anything else."""
    try:
        times = list_of(read_json(answer), str(answer))
    except (FileNotFoundError, JsonError) as error:
        raise ConfigError(f"--measure: the ranks left no times ({error}); run it again") from error
    if len(times) != count or not all(map(is_number, times)):
        raise ConfigError(f"--measure: the ranks left {len(times)} times of {count} plans")
    return times


def measure(argv: Sequence[str]) -> str:
    """One of the ranks that ``plan --measure`` starts; writes the ms of each plan."""
    parser = ArgumentParser(
        prog="sbpflow measure", description="As a rank: time plans one after another."
    )
    for name in ("--tables", "--plans", "--output"):
        parser.add_argument(name, type=local_path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    tables = read_tables(args.tables)
    try:
        plans = [plan_of_tree(tree) for tree in list_of(read_json(args.plans), str(args.plans))]
    except (FileNotFoundError, JsonError) as error:
        raise ConfigError(f"--plans: {error}; use the file that plan --measure wrote") from error
    times = measure_plans(tables, plans, rounds=args.rounds)
    if times is not None:
        args.output.write_text(json.dumps(times))
    return ""

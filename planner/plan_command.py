"""Implements the commands for a file of tables: ``sbpflow plan``, ``explain-plan``, ``compare``,
``measure``, and ``clusters``.

Each command returns the text to print.
"""

import json
import math
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.config.parse import plain
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.design import Sample
from sbpflow.planner.calibration.measure import measure_in_turns
from sbpflow.planner.clusters import (
    MACHINES,
    link_of,
    memory_of,
    profile_name,
    profile_of,
    with_link,
)
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.feasible import checked
from sbpflow.planner.planners import PLANNERS, Planned, make_plan, planner_of, priced_plan
from sbpflow.planner.report import as_html, as_json, as_text, report_of
from sbpflow.planner.search.auto import NUM_ALIKE
from sbpflow.planner.search.problem import BYTES, Assignment, price_of
from sbpflow.planner.search.seeds import families, homogeneous
from sbpflow.planner.shapes import plan_of
from sbpflow.planner.tables_file import TablesFile, read_tables
from sbpflow.planner.task import plan_from_yaml, plan_of_tree, plan_to_yaml
from sbpflow.runtime.files.json_file import JsonError, list_of, read_json
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser, parse_seed
from sbpflow.runtime.processes.start_ranks import start_ranks
from sbpflow.runtime.ranks.world import World

# Maximum price relative to the best plan's; the margin is about the model's error for good plans.
NEAR = 1.05
WRITERS = {".txt": as_text, ".json": as_json, ".html": as_html}


def _parser(name: str, description: str, *, one_size: bool = True) -> ArgumentParser:
    """Return a parser of the common arguments, with ``one_size`` also of the number of ranks."""
    parser = ArgumentParser(prog=f"sbpflow {name}", description=description)
    parser.add_argument(
        "--tables",
        type=local_path,
        required=True,
        help="tables.json; planner/tables_file.py describes its format",
    )
    parser.add_argument(
        "--profile",
        type=profile_name,
        help=f"a calibration file, or {', '.join(MACHINES)}; default: this machine's calibration",
    )
    parser.add_argument("--seed", type=parse_seed, default=0, help="seed of the search; default 0")
    if one_size:
        parser.add_argument("-n", "--ranks", type=int, default=2, help="number of ranks; default 2")
    return parser


def _add_planner(parser: ArgumentParser) -> None:
    parser.add_argument("--planner", default="auto", help=f"{', '.join(PLANNERS)}; default auto")


def _add_report(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--report", type=local_path, help="also write the report to a .txt, .json, or .html file"
    )


def plan(argv: Sequence[str]) -> str:
    """Choose a layout, ranks and an exchange for every table; ``--output`` writes the YAML file.

    Raises PlanError if no plan fits; the report is written even then.
    """
    parser = _parser("plan", "Choose where every table is stored, and report the alternatives.")
    _add_planner(parser)
    parser.add_argument("--output", type=local_path, help="a YAML file for parallel.plan")
    _add_report(parser)
    parser.add_argument(
        "--measure",
        type=int,
        default=0,
        metavar="K",
        help="time K of the best plans, and the plans in which all tables have the same layout and "
        "exchange, on this machine; use the fastest",
    )
    args = parser.parse_args(argv)
    cost, name = _cost(args), planner_of(args.planner)
    planned = make_plan(name, cost, seed=args.seed)
    lines: list[str] = []
    if args.measure and planned.priced.feasible:
        planned, lines = _measured(args, cost, planned)
    if not planned.priced.feasible:
        args.output = None  # A plan that does not fit is only reported.
    lines.append(_write(args, cost, planned))
    checked(planned, cost)
    return "\n".join(lines)


def explain(argv: Sequence[str]) -> str:
    """Predict the step time of an existing plan and find the best alternative for each table."""
    parser = _parser(
        "explain-plan",
        "Predict the time of a plan for each rank, and list the best alternative for each table.",
    )
    parser.add_argument("--plan", type=local_path, required=True, help="a YAML file of table rules")
    _add_report(parser)
    args = parser.parse_args(argv)
    cost = _cost(args)
    given = plan_from_yaml(args.plan, cost.task)
    return _write(args, cost, priced_plan(f"{args.plan}", given, cost))


def compare(argv: Sequence[str]) -> str:
    """Price the plans of every planner for the same tables."""
    parser = _parser(
        "compare",
        "Compare the plans of all planners: the project's own planner and the published planners.",
    )
    parser.add_argument(
        "--planners",
        nargs="+",
        default=list(PLANNERS),
        metavar="NAME",
        help=f"planners to compare; default {', '.join(PLANNERS)}",
    )
    args = parser.parse_args(argv)
    cost = _cost(args)
    names = [planner_of(name) for name in args.planners]
    lines = [f"{'planner':<12} {'predicted ms':>13} {'fits':>5} {'seconds':>8}"]
    results = [make_plan(name, cost, seed=args.seed) for name in names]
    for planned in sorted(results, key=lambda planned: planned.priced.rank):
        fits, ms = "yes" if planned.priced.feasible else "no", planned.priced.ms
        lines.append(f"{planned.planner:<12} {ms:>13.3f} {fits:>5} {planned.seconds:>8.2f}")
    return "\n".join(lines)


def clusters(argv: Sequence[str]) -> str:
    """Plan for several numbers of ranks, on this machine or on others. Return a table of the
    predicted step times and the share of communication, and which prices are measured.
    """
    parser = _parser(
        "clusters",
        "Predict the step time and the communication share for each number of ranks.",
        one_size=False,
    )
    parser.add_argument(
        "--link",
        help=f"the links of {', '.join(MACHINES)}, or a rate (25gbit); default: the links of the "
        "calibration",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, help="number of ranks that share the --link"
    )
    default = [8, 16, 32, 64, 128]
    ranks_help = f"numbers of ranks; default {' '.join(map(str, default))}"
    parser.add_argument("--ranks", type=int, nargs="+", default=default, help=ranks_help)
    parser.add_argument("--weak", action="store_true", help="keep the batch size per rank")
    _add_planner(parser)
    args = parser.parse_args(argv)
    if bad := [ranks for ranks in args.ranks if ranks < 1]:
        raise ConfigError(f"--ranks must be 1 or more, got {bad[0]}; for example, --ranks 8 16 32")
    profile, tables = _linked_profile(args), read_tables(args.tables)
    least, costs, alone = min(args.ranks), list[TaskCost](), tables.one_rank
    for ranks in sorted(args.ranks):
        batch = math.ceil(alone.batch_size * ranks / least) if args.weak else alone.batch_size
        scaled = replace(tables, one_rank=replace(alone, batch_size=batch))
        costs.append(_cost_on(ranks, args, profile, scaled))
    planner = planner_of(args.planner)
    lines = [
        f"{'ranks':>6} {'step ms':>9} {'samples/s':>12} {'communication':>14} {'GB per rank':>12}"
    ]
    for cost in costs:
        planned = make_plan(planner, cost, seed=args.seed)
        loads = planned.priced.loads
        samples_per_s = 1e3 * cost.task.batch_size / planned.priced.ms
        fits = "" if planned.priced.feasible else "  does not fit"
        lines.append(
            f"{cost.task.world_size:>6} {planned.priced.ms:>9.3f} {samples_per_s:>12,.0f} "
            f"{100 * loads[:, 1:BYTES].max(axis=0).sum() / planned.priced.ms:>13.0f}% "
            f"{loads[:, BYTES].max() / 1e9:>12.2f}{fits}"
        )
    about = {key: profile.about.get(key) for key in ("from", "cpu", "device", "taken")}
    lines += [f"{key}: {value}" for key, value in {**profile.sources, **about}.items() if value]
    return "\n".join(lines)


def _linked_profile(args: Namespace) -> Profile:
    """Return the profile of ``--profile``, with the links of ``--link``, if given."""
    profile = profile_of(args.profile)
    if args.link is None:
        if args.ranks_per_node != 1:
            raise ConfigError(
                f"--ranks-per-node {args.ranks_per_node} needs --link, the adapter that these "
                "ranks share; add --link (for example, --link 25gbit), or remove --ranks-per-node"
            )
        return profile
    if args.ranks_per_node < 1:
        raise ConfigError(
            f"--ranks-per-node must be 1 or more, got {args.ranks_per_node}; for example, "
            "--ranks-per-node 8"
        )
    return with_link(profile, *link_of(args.link, args.ranks_per_node))


def _cost(args: Namespace) -> TaskCost:
    """Check all arguments before any search, and return the task's prices."""
    if args.ranks < 1:
        raise ConfigError(f"--ranks must be 1 or more, got {args.ranks}; for example, --ranks 4")
    report, measure = getattr(args, "report", None), getattr(args, "measure", 0)
    if report and report.suffix not in WRITERS:
        raise ConfigError(f"--report must end in one of {', '.join(WRITERS)}, got {report}")
    if measure < 0:
        raise ConfigError(f"--measure must be 0 or more, got {measure}; for example, --measure 4")
    _check_files(args)
    tables = read_tables(args.tables)
    if measure and len(tables.laws) < len(tables.one_rank.tables):
        raise ConfigError(
            "--measure samples ids by each table's key zipf, which some tables lack; give every "
            'table "zipf": {"s": .., "q": ..}, or omit --measure'
        )
    profile = profile_of(args.profile)
    if measure and profile.device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--measure: the profile {args.profile} describes GPUs, but this machine has no "
            "usable GPU; omit --measure or --profile"
        )
    return _cost_on(args.ranks, args, profile, tables)


def _cost_on(ranks: int, args: Namespace, profile: Profile, tables: TablesFile) -> TaskCost:
    """Return the prices of the task on this many ranks."""
    task = tables.task(ranks, profile.device_type, device_bytes=memory_of(args.profile))
    return TaskCost(profile, replace(task, num_hosts=profile.link.num_hosts(ranks)))


def _check_files(args: Namespace) -> None:
    """Raise ConfigError unless each output is a separate file in an existing folder."""
    examples = {"output": "plan.yaml", "report": "report.txt"}
    read = {key: getattr(args, key, None) for key in ("tables", "plan", "profile")}
    given = {Path(path).resolve(): key for key, path in read.items() if path is not None}
    for key, example in examples.items():
        path: Path | None = getattr(args, key, None)
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(
                f"--{key}: {path} is a folder; use a file, such as --{key} {path / example}"
            )
        if not path.parent.is_dir():
            raise ConfigError(
                f"--{key} {path}: the folder {path.parent} does not exist; create it first"
            )
        if (other := given.setdefault(path.resolve(), key)) != key:
            raise ConfigError(
                f"--{key} {path}: this is also the file of --{other}; use another file, such as "
                f"--{key} {path.with_stem(f'{path.stem}-{key}')}"
            )


def _write(args: Namespace, cost: TaskCost, planned: Planned) -> str:
    """Write the requested files; return the report's text."""
    report = report_of(planned, cost)
    if args.report:
        args.report.write_text(WRITERS[args.report.suffix](report), encoding="utf-8")
    if getattr(args, "output", None):
        notes = {
            "planner": planned.planner,
            "world_size": cost.task.world_size,
            "batch_size": cost.task.batch_size,
            "predicted_step_ms": round(planned.priced.ms, 4),
            "lower_bound_ms": round(report.bound.ms, 4),
        }
        args.output.write_text(plan_to_yaml(planned.plan, notes), encoding="ascii")
    return as_text(report)


def _measured(args: Namespace, cost: TaskCost, planned: Planned) -> tuple[Planned, list[str]]:
    """Measure the plans of ``to_measure``; return the fastest plan, and a line of text per plan."""
    plans = {
        name: plan_of(cost.task, planned.problem, assignment)
        for name, assignment in to_measure(planned, args.measure).items()
    }
    with tempfile.TemporaryDirectory() as folder:
        plans_file, times_file = Path(folder, "plans.json"), Path(folder, "measured.json")
        plans_file.write_text(json.dumps(plain(list(plans.values()))))
        command = ["measure", "--tables", str(args.tables), "--plans", str(plans_file)]
        command += ["--output", str(times_file), "--device", cost.task.device_type]
        if code := start_ranks(command, args.ranks, "--ranks"):
            raise ConfigError(
                f"--measure: a rank failed with exit code {code}; its message is above"
            )
        try:
            times = dict(zip(plans, list_of(read_json(times_file), "the times"), strict=True))
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(f"--measure: {error}; run the command again") from error
    lines = [
        f"measured {ms:9.3f} ms  {name}" for name, ms in sorted(times.items(), key=lambda t: t[1])
    ]
    fastest = plans[min(times, key=lambda name: times[name])]
    priced = priced_plan(planned.planner, fastest, cost, seconds=planned.seconds)
    return replace(priced, found=planned.found), lines


def to_measure(planned: Planned, count: int) -> dict[str, Assignment]:
    """Return plans that fit, by name: the best plan, up to ``count - 1`` others, and the plans with
    one shape for all tables.

    The others are those that differ most from the plans chosen before them, among all plans within
    a price factor of ``NEAR``. Planners without a search have only one plan.
    """
    problem, found, chosen = planned.problem, planned.found, [planned.assignment]
    if found is None:
        return {f"{planned.planner} 1": planned.assignment}
    pool = dict.fromkeys([*found.others, *found.plans.values()])
    priced = [(plan, price_of(problem, plan)) for plan in pool]
    near = [
        plan for plan, price in priced if price.feasible and price.ms < NEAR * planned.priced.ms
    ]
    while near and len(chosen) < count:
        # the number of tables whose shape or ranks differ from those in the closest chosen plan
        moved = [
            min(sum(a != b for a, b in zip(plan, other, strict=True)) for other in chosen)
            for plan in near
        ]
        if not max(moved):
            break
        chosen.append(near[moved.index(max(moved))])
    named = {f"{planned.planner} {place + 1}": plan for place, plan in enumerate(chosen)}
    alike = dict(homogeneous(problem, families(problem)[:NUM_ALIKE]))
    return named | {n: plan for n, plan in alike.items() if price_of(problem, plan).feasible}


def measure(argv: Sequence[str]) -> str:
    """Run as one of the ranks that ``plan --measure`` starts, and write each plan's median step
    time in ms.
    """
    parser = ArgumentParser(
        prog="sbpflow measure", description="Act as one of the ranks that time the plans."
    )
    files = {"tables": "the tables", "plans": "the plans to time", "output": "the times to write"}
    for name, text in files.items():
        parser.add_argument(f"--{name}", type=local_path, required=True, help=text)
    parser.add_argument("--rounds", type=int, default=3, help="how often to time each plan")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), required=True, help="device of the ranks"
    )
    args = parser.parse_args(argv)
    tables = read_tables(args.tables)
    try:
        plans = [plan_of_tree(tree) for tree in list_of(read_json(args.plans), str(args.plans))]
    except (FileNotFoundError, JsonError) as error:
        raise ConfigError(
            f"--plans: {error}; use the file that `sbpflow plan --measure` wrote"
        ) from error
    with World.start(args.device) as world:
        if world.device.type == "cpu":
            torch.set_num_threads(1)
        sample = Sample(task=tables.task(world.size, world.device.type), laws=tables.laws)
        rounds = measure_in_turns(Boxing(world), sample, plans, rounds=args.rounds)
        if world.rank == 0:
            args.output.write_text(json.dumps([statistics.median(times) for times in rounds]))
    return ""

"""Implements ``sbpflow clusters``: predicts a model's step time for growing numbers of ranks.

The ranks are on this machine or on other machines. For each number of ranks, the command prints the
predicted step time of the best plan, and the share of this time that is spent on communication.
Below the table, it lists which prices are measured and which are assumed.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from sbpflow.errors import ConfigError
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
from sbpflow.planner.planners import PLANNERS, make_plan, planner_of
from sbpflow.planner.search.problem import BYTES
from sbpflow.planner.tables_file import TablesFile, read_tables
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser, parse_seed


def clusters(argv: Sequence[str]) -> str:
    """Parse the arguments, plan for every number of ranks, and return the table."""
    parser = ArgumentParser(
        prog="sbpflow clusters",
        description="Predict the step time and the communication share for each number of ranks.",
    )
    names = ", ".join(MACHINES)
    parser.add_argument("--tables", type=local_path, required=True, help="tables.json")
    parser.add_argument(
        "--profile",
        type=profile_name,
        help=f"a calibration file, or {names}; default: this machine's calibration",
    )
    parser.add_argument(
        "--link",
        help=f"the links of {names}, or a rate (25gbit); default: the links of the calibration",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, help="number of ranks that share the --link"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--weak", action="store_true", help="keep the batch size per rank")
    parser.add_argument("--planner", default="auto", help=", ".join(PLANNERS))
    parser.add_argument("--seed", type=parse_seed, default=0)
    return _table(parser.parse_args(argv))


def _table(args: Namespace) -> str:
    if bad := [ranks for ranks in args.ranks if ranks < 1]:
        raise ConfigError(f"--ranks must be 1 or more, got {bad[0]}; for example, --ranks 8 16 32")
    profile, tables = _profile(args), read_tables(args.tables)
    costs = [_cost(profile, tables, ranks, args) for ranks in sorted(args.ranks)]
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


def _profile(args: Namespace) -> Profile:
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


def _cost(profile: Profile, tables: TablesFile, ranks: int, args: Namespace) -> TaskCost:
    if args.weak:
        batch = math.ceil(tables.batch_size * ranks / min(args.ranks))
        tables = replace(tables, batch_size=batch)
    limit = memory_of(args.profile)
    task = tables.task(ranks, profile.device_type, device_bytes=limit)
    return TaskCost(profile, replace(task, num_hosts=profile.link.num_hosts(ranks)))

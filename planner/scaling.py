"""``sbpflow clusters``: one model on more and more ranks of a machine, at hand or not.

For each size the best plan, its predicted step, and the share of it that is communication: the
phases in which bytes travel, as they would take one after the other. What of that is measured and
what is assumed is said below the table.
"""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sbpflow.costs.ids import Floats
from sbpflow.errors import ConfigError
from sbpflow.planner.clusters import (
    MACHINES,
    link_of,
    memory_of,
    profile_name,
    profile_of,
    with_link,
)
from sbpflow.planner.costs.cost import CostModel, TaskCost
from sbpflow.planner.costs.profile import Profile
from sbpflow.planner.costs.simulate import KINDS, PHASE
from sbpflow.planner.planners import PLANNERS, PlannerName, make_plan, planner_of
from sbpflow.planner.tables_file import TablesFile, read_tables
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.launch import ArgumentParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A plan for ``ranks``; the samples per second are of all of them."""

    ranks: int
    step_ms: float
    samples_per_s: float
    communication: float
    memory_bytes: int
    fits: bool


def communication_share(phases: Floats) -> float:
    """Of [ranks, P] ms: transfers among all phases, each of its slowest rank."""
    longest = phases.max(0)
    travels = sum(longest[place] for name, place in PHASE.items() if "exchange" in KINDS[name])
    return float(travels / max(float(longest.sum()), 1e-12))


def size_up(cost: TaskCost, planner: PlannerName, seed: int) -> Size:
    """The planner's plan for one size."""
    planned = make_plan(planner, cost, seed=seed)
    found = cost.predict(planned.plan)
    return Size(
        ranks=cost.task.world_size,
        step_ms=found.step_ms,
        samples_per_s=1e3 * cost.task.batch_size / found.step_ms,
        communication=communication_share(found.phases),
        memory_bytes=max(found.memory_bytes),
        fits=planned.priced.feasible,
    )


def clusters(argv: Sequence[str]) -> str:
    """Parse the arguments, plan for every size, and give the table."""
    parser = ArgumentParser(
        prog="sbpflow clusters",
        description="Predict steps and the share of communication as ranks grow.",
    )
    names = ", ".join(MACHINES)
    parser.add_argument("--tables", type=local_path, required=True, help="tables.json")
    parser.add_argument(
        "--profile", type=profile_name, help=f"a calibration, or {names}; this machine's by default"
    )
    parser.add_argument(
        "--link", help=f"links of {names}, or such as 25gbit, in place of the calibration's"
    )
    parser.add_argument("--ranks-per-node", type=int, default=1, help="that share such a link")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--weak", action="store_true", help="as many samples per rank at each size")
    parser.add_argument("--planner", default="auto", help=", ".join(PLANNERS))
    parser.add_argument("--seed", type=int, default=0)
    return _table(parser.parse_args(argv))


def _table(args: Namespace) -> str:
    if bad := [ranks for ranks in args.ranks if ranks < 1]:
        raise ConfigError(f"--ranks: {bad[0]}; use 1 or more, for example --ranks 8 16 32")
    profile, tables = _profile(args), read_tables(args.tables)
    costs = [_cost(profile, tables, ranks, args) for ranks in sorted(args.ranks)]
    name = planner_of(args.planner)  # before the first size takes its time
    sizes = [size_up(cost, name, args.seed) for cost in costs]
    lines = [
        f"{'ranks':>6} {'step ms':>9} {'samples/s':>12} {'communication':>14} {'GB a rank':>10}"
    ]
    for one in sizes:
        fits = "" if one.fits else "  does not fit"
        lines.append(
            f"{one.ranks:>6} {one.step_ms:>9.3f} {one.samples_per_s:>12,.0f} "
            f"{100 * one.communication:>13.0f}% {one.memory_bytes / 1e9:>10.2f}{fits}"
        )
    lines += [f"{key}: {value}" for key, value in {**profile.sources, **_from(profile)}.items()]
    return "\n".join(lines)


def _from(profile: Profile) -> Mapping[str, str]:
    known = ("from", "cpu", "device", "taken")
    return {key: profile.about[key] for key in known if key in profile.about}


def _profile(args: Namespace) -> Profile:
    profile = profile_of(args.profile)
    if args.link is None:
        if args.ranks_per_node != 1:
            raise ConfigError(
                f"--ranks-per-node: {args.ranks_per_node} says who shares the adapters of --link; "
                "give one such as --link 25gbit, or leave it out"
            )
        return profile
    if args.ranks_per_node < 1:
        raise ConfigError(f"--ranks-per-node: {args.ranks_per_node}; use 1 or more, for example 8")
    return with_link(profile, *link_of(args.link, args.ranks_per_node))


def _cost(profile: Profile, tables: TablesFile, ranks: int, args: Namespace) -> TaskCost:
    device = {"nccl": "cuda", "gloo": "cpu"}[profile.backend]
    if args.weak:
        batch = math.ceil(tables.batch_size * ranks / min(args.ranks))
        tables = replace(tables, batch_size=batch)
    limit = memory_of(args.profile)
    return CostModel(profile).of(tables.task(ranks, device, device_bytes=limit))

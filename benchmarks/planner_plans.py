"""Creates the plans for the planner benchmarks: our plans, ablations, and plans from other
planners.

The tasks fit a small machine: their tables are held-out tables from the pool with fewer rows and
fewer ids per sample. All planners use the same profile, and the learned planners are trained on the
same random tasks, priced by this profile.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.peer_torchrec_planner import torchrec_plan
from sbpflow.config.table_layouts import resolve_table_layouts
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.costs.counts import FEATURES
from sbpflow.costs.prices import WORK_MS
from sbpflow.embedding.plan.id_statistics import IdFrequencies
from sbpflow.errors import PlanError
from sbpflow.planner.calibration.design import Law, Sample, dense_work_of
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.features import BIN_SAMPLES, from_histogram
from sbpflow.planner.costs.profile import Link, Profile
from sbpflow.planner.plan_command import to_measure
from sbpflow.planner.planners import GREEDY, make_plan, published
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.auto import search
from sbpflow.planner.search.problem import Assignment, Problem, price_of
from sbpflow.planner.shapes import COPIED, WHOLE, assignment_of, plan_of, problem_of
from sbpflow.planner.task import Plan, Task, choice_of, embedding_plan
from sbpflow.planner.workloads import Drawn, make_task, split_pool
from sbpflow.run.planning.auto_scheme import Rules, candidates, rank_candidates
from sbpflow.runtime.ranks.topology import Link as NetworkLink
from sbpflow.runtime.ranks.topology import Topology

MOST_ROWS, MOST_IDS = 50_000, 20.0
DIMS = (8, 16, 32)
HIDDEN = (16,)  # widths of the dense part's hidden layers
MEASURED = 4  # how many of our plans are measured
DRAWN_AT_RANDOM = 4  # how many random placements are measured
Planner = Callable[[Setting], Assignment]
Named = dict[str, tuple[Plan, float]]  # name -> (plan, predicted ms)


def make_sample(
    number: int, world_size: int, *, num_tables: int, batch_size: int, giant: float = 0.0
) -> Sample:
    """Return held-out tables from the pool, reduced in size, with their id distributions.
    Reproducible.

    If ``giant`` is above 0, the first table has so many rows that they take up this share of all
    tables' bytes.
    """
    random = np.random.default_rng([number, num_tables, 77])
    half = split_pool(held_out=True)
    drawn: list[Drawn] = []
    for place in random.choice(len(half), num_tables, replace=False):
        table = half[int(place)]
        rows, pooling = min(table.num_rows, MOST_ROWS), min(table.pooling, MOST_IDS)
        drawn.append(replace(table, num_rows=rows, active=rows, pooling=pooling))
    dims = [int(d) for d in random.choice(DIMS, num_tables)]
    if giant:
        others = sum(one.num_rows * dim for one, dim in zip(drawn[1:], dims[1:], strict=True))
        rows = int(giant / (1 - giant) * others / dims[0])
        drawn[0] = replace(drawn[0], num_rows=rows, active=rows)
    task = make_task(drawn, dims, world_size=world_size, batch_size=batch_size)
    task = replace(task, dense=dense_work_of(sum(dims), HIDDEN))
    laws = {f"t{n}": Law(s=one.s, q=one.q) for n, one in enumerate(drawn)}
    return Sample(task=task, laws=laws, hidden=HIDDEN)


def planners_of(profile: Profile, like: Task, names: Sequence[str]) -> dict[str, Planner]:
    """Train the other planners once for this number of ranks and this batch size."""
    cost = TaskCost(profile, like)
    planners = {name: published(name, cost, 0) for name in names if name != "torchrec"}
    return {**planners, "torchrec": torchrec_plan} if "torchrec" in names else planners


def plans_of(
    task: Task, profile: Profile, planners: dict[str, Planner], nominal: Link | None = None
) -> Named:
    """Return our best plans, ablations, homogeneous plans, and other planners' plans.

    Planners that find no plan are left out. ``scheme: auto`` and the built-in costs use the link
    ``nominal``, which by default is the link that they assume.
    """
    cost = TaskCost(profile, task)
    ours = make_plan("auto", cost)
    problem, setting = ours.problem, Setting(task, ours.problem)
    measured = to_measure(ours, MEASURED)
    plans: dict[str, Assignment] = {"auto": measured.pop("auto 1")}
    plans |= measured
    for name, planner in planners.items():
        try:
            plans[name] = planner(setting)
        except PlanError as error:
            print(f"{name}: no plan ({str(error).splitlines()[0]})", flush=True)
    for number in range(DRAWN_AT_RANDOM):
        plans[f"random {number + 1}"] = GREEDY["random"](replace(setting, seed=number))
    plans["scheme: auto"] = assignment_of(problem, scheme_auto(task, nominal))
    for name, plan in ablations(task, profile, nominal).items():
        plans[name] = assignment_of(problem, plan)
    return {
        name: (plan_of(task, problem, plan), price_of(problem, plan).ms)
        for name, plan in plans.items()
    }


def scheme_auto(task: Task, nominal: Link | None = None) -> Plan:
    """Return the plan of ``parallel.scheme: auto``, which needs id frequencies only."""
    size = BIN_SAMPLES
    known: dict[str, IdFrequencies] = {}
    for table in task.tables:
        stats, per_sample = task.stats[table.name], task.lookups(table) / task.batch_size
        rows = stats.touched(size * per_sample)
        bins = tuple(
            (round(rows * share), round(size * per_sample * mass))
            for share, mass in zip(stats.bin_rows, stats.bin_lookups, strict=True)
        )
        known[table.features[0]] = IdFrequencies(bins=bins, per_sample=per_sample)

    def plan(rules: Rules) -> Plan:
        layouts = resolve_table_layouts(
            ParallelConfig(tables=rules),
            {table.name: table.shape for table in task.tables},
            {},
            task.world_size,
            task.device_type,
        )
        return {name: choice_of(layout, task.world_size) for name, layout in layouts.items()}

    ranked = rank_candidates(
        candidates(task.tables, task.features, task.world_size, task.batch_size, known),
        lambda rules: embedding_plan(task, plan(rules)),
        batch_size=task.batch_size,
        topology=_topology(task, nominal),
        frequencies=known,
    )
    return plan(ranked[0].rules)


def _topology(task: Task, nominal: Link | None) -> Topology:
    """Return the topology of a run whose topology file contains the link ``nominal``."""
    if nominal is None or not nominal.ranks_per_node:
        return Topology.one_host(task.world_size)
    ranks, each = range(task.world_size), nominal.ranks_per_node
    return Topology(
        hosts=tuple(tuple(ranks[start : start + each]) for start in ranks[::each]),
        memory_bytes=task.device_bytes,
        network_link=NetworkLink(
            gb_per_s=nominal.between_gb_per_s, latency_ms=nominal.between_call_ms
        ),
    )


def unfitted(profile: Profile, nominal: Link | None = None) -> Profile:
    """Return the profile with the constants of ``parallel.scheme: auto`` in place of measured
    prices.
    """
    usual = NetworkLink()
    link = nominal or Link(within_gb_per_s=usual.gb_per_s, within_call_ms=usual.latency_ms)
    return replace(
        profile,
        work_ms={name: float(ms) for name, ms in zip(FEATURES, WORK_MS, strict=True) if ms},
        link=link,
    )


def unsplit(problem: Problem) -> Problem:
    """Return the problem in which each table is whole on one rank or copied to all."""
    options = tuple(
        tuple(option for option in mine if option.shape in (WHOLE, COPIED))
        for mine in problem.options
    )
    return replace(problem, options=options)


def ablations(task: Task, profile: Profile, nominal: Link | None = None) -> dict[str, Plan]:
    """Return the plans that our search finds with one of its parts removed."""
    even = {
        table.name: from_histogram(
            [float(table.num_rows)], [1.0], task.lookups(table) / task.batch_size
        )
        for table in task.tables
    }
    cost = TaskCost(profile, task)
    narrow = unsplit(problem_of(cost))
    whole = search(narrow).assignment
    constants = TaskCost(unfitted(profile, nominal), task)
    return {
        "auto, built-in constants": make_plan("auto", constants).plan,
        "auto, ids taken as even": make_plan(
            "auto", TaskCost(profile, replace(task, stats=even))
        ).plan,
        "auto, whole or copied": plan_of(task, narrow, whole),
    }

"""Reports on a plan: each rank's work, the best alternative for each table, the gap to the lower
bound, and possible changes if no plan fits.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.kernels import StorageKernel, kernels_of
from sbpflow.planner.costs.simulate import KINDS, PHASES
from sbpflow.planner.planners import Planned, make_plan
from sbpflow.planner.search.auto import Effort
from sbpflow.planner.search.bounds import Bound, bound, certified
from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.problem import Floats, Move, State
from sbpflow.planner.task import Choice, Task

KIND_ORDER = ("forward", "forward exchange", "dense", "backward exchange", "backward")
COLORS = ("#4477aa", "#66ccee", "#bbbbbb", "#ee6677", "#aa3377")
SEEDS_SHOWN = 2
STORAGES_SHOWN = 4
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
QUICK = Effort(insertions=60, exact_time=0.0)  # enough to test whether a changed task fits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Describes a table's best other choice; with it, the step takes ``more_ms`` longer.

    All other tables keep their choices. The new choice does not exceed the ranks' memory by more
    than the plan does: if the plan fits, the new choice fits.
    """

    choice: Choice
    more_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Contains a plan with its bounds, alternatives and kernel times, for the writers below."""

    planned: Planned
    cost: TaskCost
    bounds: tuple[Bound, ...]
    runners_up: Mapping[str, RunnerUp]
    kernels: Sequence[StorageKernel]

    def kinds(self) -> Floats:
        """Return [ranks, kinds] ms, in the order of ``KIND_ORDER``."""
        phases = self.planned.priced.phases
        kinds = np.zeros((phases.shape[0], len(KIND_ORDER)))
        for place, name in enumerate(PHASES):
            kinds[:, KIND_ORDER.index(KINDS[name])] += phases[:, place]
        return kinds


def report_of(planned: Planned, cost: TaskCost) -> Report:
    """Compute bounds and alternatives; many tables take a while."""
    problem, assignment = planned.problem, planned.assignment
    low, _ = cost.bounds
    return Report(
        planned=planned,
        cost=cost,
        bounds=(
            bound(problem, assignment),
            certified(problem, assignment, cost.linear, low),
        ),
        runners_up=_runners_up(planned),
        kernels=kernels_of(cost.profile, cost.task, planned.plan),
    )


def _runners_up(planned: Planned) -> dict[str, RunnerUp]:
    problem = planned.problem
    state, inserter = State(problem, planned.assignment), Inserter(problem)
    world = tuple(range(problem.num_ranks))
    runners_up: dict[str, RunnerUp] = {}
    for table, name in enumerate(problem.names):
        current = state.remove(table)
        for other in inserter.ranked(state, table):
            if other.move != current and _fits_as_well(state, table, other.move, planned):
                shape = problem.options[table][other.move.option].shape
                runners_up[name] = RunnerUp(
                    choice=Choice(shape, other.move.ranks or world),  # type: ignore[arg-type]
                    more_ms=other.ms - planned.priced.ms,
                )
                break
        state.add(table, current)
    return runners_up


def _fits_as_well(state: State, table: int, move: Move, planned: Planned) -> bool:
    state.add(table, move)
    excess = float(state.problem.excess(state.totals))
    state.remove(table)
    return excess <= planned.priced.excess_bytes


def as_tree(report: Report) -> dict[str, Any]:
    """Return the report as a tree that ``json.dumps`` accepts."""
    planned, kinds = report.planned, report.kinds()
    prediction = report.cost.predict(planned.plan)
    return {
        "planner": planned.planner,
        "predicted_ms": planned.priced.ms,
        "spread_ms": prediction.spread_ms,
        "feasible": planned.priced.feasible,
        "plan_seconds": planned.seconds,
        "sources": dict(report.cost.profile.sources),
        "bounds": [
            {"ms": bound.ms, "gap": bound.gap if bound.ms > 0 else None, "kind": bound.kind}
            for bound in report.bounds
        ],
        "ranks": [
            {
                "rank": rank,
                "ms": dict(zip(KIND_ORDER, map(float, kinds[rank]), strict=True)),
                "memory_bytes": int(prediction.memory_bytes[rank]),
                "sent_bytes": int(prediction.sent_bytes[rank]),
                "tables": [name for name, choice in planned.plan.items() if rank in choice.ranks],
            }
            for rank in range(planned.problem.num_ranks)
        ],
        "tables": [
            {
                "name": name,
                "layout": str(choice.shape),
                "ranks": list(choice.ranks),
                "runner_up": None
                if (other := report.runners_up.get(name)) is None
                else {
                    "layout": str(other.choice.shape),
                    "ranks": list(other.choice.ranks),
                    "more_ms": other.more_ms,
                },
            }
            for name, choice in planned.plan.items()
        ],
        "storages": [
            {"group": kernel.group, "tables": list(kernel.tables), "kernel_ms": dict(kernel.ms)}
            for kernel in report.kernels
        ],
        "seeds": {}
        if planned.found is None
        else {
            name: priced.ms if priced.feasible else None
            for name, priced in planned.found.seeds.items()
        },
    }


def as_json(report: Report) -> str:
    return json.dumps(as_tree(report), indent=1)


def as_text(report: Report) -> str:
    """Format the ranks, the tables, the kernels, and the seeds of the search as text."""
    tree = as_tree(report)
    lines = [
        f"{tree['planner']}: predicted step {tree['predicted_ms']:.3f} ms "
        f"(+- {tree['spread_ms']:.3f}), planned in {tree['plan_seconds']:.1f} s"
        + ("" if tree["feasible"] else "; DOES NOT FIT"),
        *(
            f"lower bound {bound.ms:.3f} ms, gap {100 * bound.gap:.1f} %: {bound.kind}"
            for bound in report.bounds
        ),
        "",
    ]
    rows: list[tuple[str, ...]] = [("rank", *KIND_ORDER, "memory MB", "sent MB", "tables")]
    for rank in tree["ranks"]:
        times = [f"{rank['ms'][kind]:.3f}" for kind in KIND_ORDER]
        size, sent = rank["memory_bytes"] / 1e6, rank["sent_bytes"] / 1e6
        rows.append(
            (str(rank["rank"]), *times, f"{size:.1f}", f"{sent:.2f}", str(len(rank["tables"])))
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(map(str.rjust, row, widths)) for row in rows]
    lines += ["", "table, layout, ranks; the best other choice and the ms it adds to the step"]
    for table in tree["tables"]:
        text = f"{table['name']}: {table['layout']} on {_ranks(table['ranks'])}"
        if other := table["runner_up"]:
            where = f"{other['layout']} on {_ranks(other['ranks'])}"
            text += f"; {where}: {other['more_ms']:+.4f} ms"
        lines.append(text)
    if storages := tree["storages"]:
        lines += ["", "tables stored together: ms of a batch with each kernel, fastest first"]
        storages = sorted(storages, key=lambda storage: -min(storage["kernel_ms"].values()))
    for storage in storages[:STORAGES_SHOWN]:
        times = ", ".join(f"{name} {ms:.3f}" for name, ms in storage["kernel_ms"].items())
        lines.append(f"{storage['group']}, {len(storage['tables'])} tables: {times}")
    if len(storages) > STORAGES_SHOWN:
        lines.append(f"and {len(storages) - STORAGES_SHOWN} faster ones, in a .json report")
    seeds = {name: ms for name, ms in tree["seeds"].items() if ms is not None}
    if seeds:
        best = sorted(seeds.items(), key=lambda seed: seed[1])[:SEEDS_SHOWN]
        texts = ", ".join(f"{name} {ms:.3f} ms" for name, ms in best)
        lines.append(f"best of the {len(seeds)} plans that the search started from: {texts}")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return ",".join(map(str, ranks))


def as_html(report: Report) -> str:
    """Return a page with a timeline of the step by rank and kind, and the text of ``as_text``.

    Each kind starts when the previous kind has ended on the slowest rank. The timeline does not
    show overlap; the title contains the predicted step with overlap.
    """
    kinds = report.kinds()
    starts = np.concatenate([[0.0], np.cumsum(kinds.max(axis=0))])
    scale = 900.0 / max(float(starts[-1]), 1e-9)
    height = 22
    bars: list[str] = []
    for rank, row in enumerate(kinds):
        y = 30 + rank * height
        bars.append(f'<text x="0" y="{y + 15}" font-size="12">{rank}</text>')
        for place, ms in enumerate(row):
            title = html.escape(f"rank {rank}, {KIND_ORDER[place]}: {ms:.3f} ms")
            bars.append(
                f'<rect x="{40 + scale * starts[place]:.1f}" y="{y}" height="{height - 4}" '
                f'width="{max(scale * ms, 0.5):.1f}" fill="{COLORS[place]}">'
                f"<title>{title}</title></rect>"
            )
    for place, kind in enumerate(KIND_ORDER):
        x = 40 + 170 * place
        bars.append(f'<rect x="{x}" y="4" width="12" height="12" fill="{COLORS[place]}"/>')
        bars.append(f'<text x="{x + 16}" y="15" font-size="12">{kind}</text>')
    total = 40 + height * len(kinds)
    title = html.escape(
        f"{report.planned.planner}: predicted step {report.planned.priced.ms:.3f} ms"
    )
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
        f'<svg width="960" height="{total}" font-family="sans-serif">{"".join(bars)}</svg>'
        f"<pre>{html.escape(as_text(report))}</pre>\n"
    )


def infeasible_text(planned: Planned, cost: TaskCost) -> str:
    """Describe the fullest rank of the plan with the smallest excess, and the changes that would
    help.
    """
    task, memory = cost.task, planned.priced.memory
    limit = float(task.device_bytes or 0)
    rank = int(memory.argmax())
    largest = max(task.tables, key=lambda table: table.num_rows * table.dim)
    lines = [
        f"no plan found fits {_size(limit)} a rank: in the plan with the least excess, rank {rank} "
        f"holds {_size(memory[rank])} ({_size(memory[rank] - limit)} too much), all ranks "
        f"{_size(memory.sum())} of {_size(limit * len(memory))}",
        f"the largest table is {largest.name}, {largest.num_rows:,} rows x {largest.dim}",
        f"it would fit with {_size(float(memory.max()))} a rank",
        *(f"it would fit with {change}" for change in _changes(cost)),
    ]
    return "; ".join(lines)


def _changes(cost: TaskCost) -> list[str]:
    """Return the changes to the task that make a plan fit, each tried alone; list the fewest
    ranks.
    """
    task = cost.task
    tried: list[tuple[str, Task]] = []
    if task.row_dtype.itemsize > 2:
        tried.append(("parallel.table_dtype: bfloat16", replace(task, row_dtype=torch.bfloat16)))
    if task.batch_size >= 4 * task.world_size:
        batch_size = task.batch_size // 2
        tried.append((f"data.batch_size: {batch_size}", replace(task, batch_size=batch_size)))
    if not task.pinned:
        for ranks in (task.world_size * factor for factor in (2, 4, 8)):
            if task.batch_size >= ranks:
                tried.append((f"{ranks} ranks", replace(task, world_size=ranks)))
    changes: list[str] = []
    for text, changed in tried:
        if text.endswith(" ranks") and changes and changes[-1].endswith(" ranks"):
            break
        if make_plan("auto", TaskCost(cost.profile, changed), effort=QUICK).priced.feasible:
            changes.append(text)
    return changes


def _size(num_bytes: float) -> str:
    """Format a size, rounded up so that the printed size is enough."""
    unit, name = next((pair for pair in _UNITS if num_bytes >= pair[0]), _UNITS[-1])
    return f"{math.ceil(100 * num_bytes / unit) / 100:.2f} {name}"

"""A plan for people and programs: what each rank does, why each table is where it is, how far from
the bound; and what to change when nothing fits.
"""

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.kernels import StorageKernel, kernels_of
from sbpflow.planner.costs.simulate import KINDS
from sbpflow.planner.planners import Planned, make_plan
from sbpflow.planner.search.auto import Effort
from sbpflow.planner.search.bounds import Bound, bound, certified
from sbpflow.planner.search.insertion import Inserter
from sbpflow.planner.search.problem import Floats, Move, State
from sbpflow.planner.task import Choice

KIND_ORDER = ("forward", "forward exchange", "dense", "backward exchange", "backward")
COLOURS = ("#4477aa", "#66ccee", "#bbbbbb", "#ee6677", "#aa3377")
SEEDS_SHOWN = 8
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
QUICK = Effort(insertions=60, exact_time=0.0)  # to see whether a changed task fits


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The best other way to lay a table with all others as they are; ``more_ms`` for the step.

    It is no farther beyond the ranks' memory than the plan: where the plan fits, it does.
    """

    choice: Choice
    more_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything there is to say about a plan."""

    planned: Planned
    cost: TaskCost
    bounds: tuple[Bound, ...]
    runners_up: Mapping[str, RunnerUp]
    kernels: Sequence[StorageKernel]

    def kinds(self) -> Floats:
        """[ranks, kinds] ms in the order of ``KIND_ORDER``."""
        phases = self.planned.priced.phases
        found = np.zeros((phases.shape[0], len(KIND_ORDER)))
        for place, name in enumerate(self.cost.phases):
            found[:, KIND_ORDER.index(KINDS[name])] += phases[:, place]
        return found


def report_of(planned: Planned, cost: TaskCost) -> Report:
    """With bounds and runners-up, which take a while for many tables."""
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
    found: dict[str, RunnerUp] = {}
    for table, name in enumerate(problem.names):
        mine = state.remove(table)
        for other in inserter.ranked(state, table):
            if other.move != mine and _fits_as_well(state, table, other.move, planned):
                shape = problem.options[table][other.move.option].shape
                found[name] = RunnerUp(
                    choice=Choice(shape, other.move.ranks or world),  # type: ignore[arg-type]
                    more_ms=other.ms - planned.priced.ms,
                )
                break
        state.add(table, mine)
    return found


def _fits_as_well(state: State, table: int, move: Move, planned: Planned) -> bool:
    state.add(table, move)
    excess = float(state.problem.excess(state.totals))
    state.remove(table)
    return excess <= planned.priced.excess_bytes


def as_tree(report: Report) -> dict[str, Any]:
    """JSON-ready."""
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
            {"ms": one.ms, "gap": one.gap if one.ms > 0 else None, "kind": one.kind}
            for one in report.bounds
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
                "runner_up": _other(report, name),
            }
            for name, choice in planned.plan.items()
        ],
        "storages": [
            {"group": one.group, "tables": list(one.tables), "kernel_ms": dict(one.ms)}
            for one in report.kernels
        ],
        "seeds": {}
        if planned.found is None
        else {
            name: priced.ms if priced.feasible else None
            for name, priced in planned.found.seeds.items()
        },
    }


def _other(report: Report, name: str) -> dict[str, Any] | None:
    other = report.runners_up.get(name)
    if other is None:
        return None
    return {
        "layout": str(other.choice.shape),
        "ranks": list(other.choice.ranks),
        "more_ms": other.more_ms,
    }


def as_json(report: Report) -> str:
    return json.dumps(as_tree(report), indent=1)


def as_text(report: Report) -> str:
    """Ranks, then tables, then what the plan was chosen over."""
    tree = as_tree(report)
    lines = [
        f"{tree['planner']}: {tree['predicted_ms']:.3f} ms a step predicted "
        f"(+- {tree['spread_ms']:.3f}), {tree['plan_seconds']:.1f} s to plan"
        + ("" if tree["feasible"] else "; DOES NOT FIT"),
        *(
            f"lower bound {one.ms:.3f} ms, gap {100 * one.gap:.1f} %: {one.kind}"
            for one in report.bounds
        ),
        "",
        _row("rank", *KIND_ORDER, "memory MB", "sent MB", "tables"),
    ]
    for rank in tree["ranks"]:
        times = [f"{rank['ms'][kind]:.3f}" for kind in KIND_ORDER]
        size, sent = rank["memory_bytes"] / 1e6, rank["sent_bytes"] / 1e6
        lines.append(_row(rank["rank"], *times, f"{size:.1f}", f"{sent:.2f}", len(rank["tables"])))
    lines += ["", "table, layout, ranks; the best other way and what it would add to the step"]
    for table in tree["tables"]:
        text = f"{table['name']}: {table['layout']} on {_ranks(table['ranks'])}"
        if other := table["runner_up"]:
            where = f"{other['layout']} on {_ranks(other['ranks'])}"
            text += f"; {where}: {other['more_ms']:+.4f} ms"
        lines.append(text)
    if tree["storages"]:
        lines += ["", "storage: its fastest kernel by the calibration, and the others, ms a batch"]
    for one in tree["storages"]:
        times = ", ".join(f"{name} {ms:.3f}" for name, ms in one["kernel_ms"].items())
        lines.append(f"{one['group']}, {len(one['tables'])} tables: {times}")
    seeds = {name: ms for name, ms in tree["seeds"].items() if ms is not None}
    if seeds:
        lines += ["", f"best of the {len(seeds)} plans it was searched from, milliseconds:"]
        best = sorted(seeds.items(), key=lambda seed: seed[1])[:SEEDS_SHOWN]
        lines += [f"{ms:10.3f}  {name}" for name, ms in best]
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return "  ".join(f"{cell!s:>17}" for cell in cells)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return ",".join(map(str, ranks))


def as_html(report: Report) -> str:
    """A page with a timeline, ranks by parts of a step: each part starts when the one before has
    ended on the slowest rank. What overlaps is drawn as if it did not; the title has the step.
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
                f'width="{max(scale * ms, 0.5):.1f}" fill="{COLOURS[place]}">'
                f"<title>{title}</title></rect>"
            )
    for place, kind in enumerate(KIND_ORDER):
        x = 40 + 170 * place
        bars.append(f'<rect x="{x}" y="4" width="12" height="12" fill="{COLOURS[place]}"/>')
        bars.append(f'<text x="{x + 16}" y="15" font-size="12">{kind}</text>')
    total = 40 + height * len(kinds)
    title = html.escape(f"{report.planned.planner}: {report.planned.priced.ms:.3f} ms a step")
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
        f'<svg width="960" height="{total}" font-family="sans-serif">{"".join(bars)}</svg>'
        f"<pre>{html.escape(as_text(report))}</pre>\n"
    )


def infeasible_text(planned: Planned, cost: TaskCost) -> str:
    """The tightest rank of the plan of least excess, and the smallest changes that would do."""
    task, memory = cost.task, planned.priced.memory
    limit = float(task.device_bytes or 0)
    rank = int(memory.argmax())
    largest = max(task.tables, key=lambda table: table.num_rows * table.dim)
    lines = [
        f"no plan found fits {_size(limit)} a rank: in the one that lacks least, rank {rank} holds "
        f"{_size(memory[rank])} ({_size(memory[rank] - limit)} too much), all ranks "
        f"{_size(memory.sum())} of {_size(limit * len(memory))}",
        f"the largest table is {largest.name}, {largest.num_rows:,} rows x {largest.dim}",
        f"it would fit with {_size(float(memory.max()))} a rank",
        *(f"it would fit with {what}" for what in _changes(cost)),
    ]
    return "; ".join(lines)


def _changes(cost: TaskCost) -> list[str]:
    """Changes of the task, tried one by one."""
    task = cost.task
    tried: list[tuple[str, Callable[[], TaskCost]]] = []
    if task.row_dtype.itemsize > 2:
        half = replace(task, row_dtype=torch.bfloat16)
        tried.append(
            ("parallel.table_dtype: bfloat16", lambda: TaskCost(cost.profile, half, cost.objective))
        )
    if task.batch_size >= 4 * task.world_size:
        less = replace(task, batch_size=task.batch_size // 2)
        tried.append(
            (
                f"data.batch_size: {less.batch_size}",
                lambda: TaskCost(cost.profile, less, cost.objective),
            )
        )
    if not task.pinned:
        for factor in (2, 4, 8):
            more = replace(task, world_size=task.world_size * factor)
            if more.batch_size >= more.world_size:
                tried.append(
                    (
                        f"{more.world_size} ranks",
                        lambda more=more: TaskCost(cost.profile, more, cost.objective),
                    )
                )
    found: list[str] = []
    for what, changed in tried:
        if what.endswith(" ranks") and found and found[-1].endswith(" ranks"):
            break
        if make_plan("auto", changed(), effort=QUICK).priced.feasible:
            found.append(what)
    return found


def _size(num_bytes: float) -> str:
    """Rounded up: what is said to be enough is."""
    unit, of = next((one for one in _UNITS if num_bytes >= one[0]), _UNITS[-1])
    return f"{math.ceil(100 * num_bytes / unit) / 100:.2f} {of}"

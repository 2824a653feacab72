"""Checks whether any plan fits in memory and, if not, reports changes that would make one fit."""

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape

import numpy as np
import torch

from sbpflow.embedding.cache.slot_layout import RECORD_BYTES
from sbpflow.embedding.plan.row_storage import RowStorage
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.errors import PlanError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import Planned, make_plan
from sbpflow.planner.task import Plan, Task
from sbpflow.run.planning.storage import AUTO_LOOKAHEAD, row_bytes

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
QUICK = 60  # number of insertions; enough to test whether a changed task fits
RANKS = (2, 4, 8)  # numbers of ranks to try, as multiples of the given number
MOST_LISTED = 8  # If more ranks have too little memory, one limit for all ranks is named.
CACHES = (0.5, 0.25, 0.1)  # fractions of the rows to keep on the device
LOOKAHEADS = (AUTO_LOOKAHEAD, 2)  # with a cache; 2 is the least, and takes less memory for ids


def choose(cost: TaskCost, *, seed: int = 0, note: str = "") -> Plan:
    """Return the cheapest plan that the search finds; the result depends only on the arguments.

    Raises PlanError if no plan fits; the message names the rank with the largest excess, the
    smallest changes that would help, and ``note`` on the limits.
    """
    return checked(make_plan("auto", cost, seed=seed), cost, note).plan


def checked(planned: Planned, cost: TaskCost, note: str = "") -> Planned:
    """Return the plan; raise PlanError, with ``note`` at the end, if it does not fit."""
    if not planned.priced.feasible:
        text = infeasible_text(planned, cost)
        raise PlanError(f"{text}; {note}" if note else text)
    return planned


def infeasible_text(planned: Planned, cost: TaskCost) -> str:
    """Describe the rank with the largest excess, and the changes that make a plan fit."""
    task, memory = cost.task, planned.priced.memory
    limits = planned.problem.limit_bytes
    rank = int((memory - limits).argmax())
    equal = limits.min() == limits.max()
    most = _size(limits[rank]) + (" per rank" if equal else f" on rank {rank}")
    enough, over = f"{_size(memory.max())} per rank", np.flatnonzero(memory > limits).tolist()
    if not equal and len(over) <= MOST_LISTED:
        enough = ", ".join(f"{_size(memory[place])} on rank {place}" for place in over)
    largest = max(task.tables, key=lambda table: table.num_rows * table.dim)
    lines = [
        f"no plan found fits in {most}: in the plan with the smallest excess, rank {rank} needs "
        f"{_size(memory[rank])} ({_size(memory[rank] - limits[rank])} too much), and all ranks "
        f"together need {_size(memory.sum())} of {_size(limits.sum())}",
        f"the largest table is {largest.name}, with {largest.num_rows:,} rows of {largest.dim} "
        "columns",
        f"a plan would fit with {enough}",
        *(f"a plan would fit with {change}" for change in _changes(cost, planned.planner)),
    ]
    return "; ".join(lines)


def _changes(cost: TaskCost, planner: str) -> list[str]:
    """Return the changes to the task that make a plan of ``auto`` fit, each tried separately. For
    the number of ranks and for the cache, return only the smallest change that fits. If ``planner``
    is another planner and ``auto`` finds a plan that fits, return only this planner.
    """
    if planner != "auto" and _fits(cost, cost.task):
        return ["--planner auto"]
    first = (
        next((text for text, changed in tried if _fits(cost, changed)), None)
        for tried in _tried(cost)
    )
    needed = "" if planner == "auto" else "--planner auto and "
    return [f"{needed}{text}" for text in first if text is not None]


def _tried(cost: TaskCost) -> list[list[tuple[str, Task]]]:
    """Return the alternatives for each kind of change, smallest change first."""
    task = cost.task
    rows: list[tuple[str, Task]] = []
    if task.row_dtype.itemsize > 2:
        rows.append(("parallel.table_dtype: bfloat16", replace(task, row_dtype=torch.bfloat16)))
    batch, batch_size = list[tuple[str, Task]](), task.batch_size // 2
    if task.batch_size >= 4 * task.world_size:
        batch.append((f"data.batch_size: {batch_size}", replace(task, batch_size=batch_size)))
    # A profile measured on one rank cannot price more ranks.
    can_add = not task.pinned and cost.profile.link.within_gb_per_s
    ranks = [task.world_size * factor for factor in RANKS if can_add]
    more = [
        (f"{count} ranks with as much memory each", _on_more_ranks(task, count))
        for count in ranks
        if task.batch_size >= count
    ]
    caches = [_cached(task, share, number) for number in LOOKAHEADS for share in CACHES]
    return [rows, batch, more, caches]


def _on_more_ranks(task: Task, count: int) -> Task:
    """Return the task on a multiple of its ranks, with limits and speeds repeated."""
    times, limits, speeds = count // task.world_size, task.device_bytes, task.speeds
    return replace(
        task,
        world_size=count,
        device_bytes=None if limits is None else limits * times,
        speeds=None if speeds is None else speeds * times,
    )


def _cached(task: Task, share: float, lookahead: int) -> tuple[str, Task]:
    """Store all rows outside the device, except those of tables that cannot be cached, and cache a
    share of the rows on the device. Cached rows need a longer ``lookahead``.
    """
    kind = "host" if task.device_type == "cuda" else "file"
    storage = RowStorage(kind=kind, share=share, key="parallel.storage.*")
    kept = {table.name for table in task.tables if not _can_be_cached(task, table)}

    def stored(table: TableConfig) -> TableConfig:
        return table if table.name in kept else replace(table, storage=storage)

    outputs = tuple(replace(out, tables=tuple(map(stored, out.tables))) for out in task.outputs)
    rules = [f"'*': {{kind: {kind}, cache: {share:.0%}}}"]
    rules += [f"'{pattern}': {{kind: device}}" for pattern in _patterns(kept, task)]
    text = f"parallel.storage: {{{', '.join(rules)}}} and train.lookahead: {lookahead} (slower)"
    return text, replace(task, outputs=outputs, lookahead=lookahead)


def _can_be_cached(task: Task, table: TableConfig) -> bool:
    """Return whether a run accepts a cache for this table."""
    pinned = task.pinned.get(table.name)
    if pinned is not None and pinned.shape.copied and task.world_size > 1:
        return False
    row = row_bytes(table.dim, task.optimizer_of(table), task.row_dtype, task.dtype)
    return row > RECORD_BYTES


def _patterns(names: set[str], task: Task) -> list[str]:
    """Return patterns that match exactly these tables: one for all tables of an output if possible
    (such as ``wide.*``), and otherwise the names.
    """
    others = [table.name for table in task.tables if table.name not in names]
    patterns: dict[str, None] = {}
    for name in sorted(names):
        output, dot, _ = name.partition(".")
        together = f"{escape(output)}.*"
        apart = not dot or any(fnmatchcase(other, together) for other in others)
        patterns[escape(name) if apart else together] = None
    return list(patterns)


def _fits(cost: TaskCost, task: Task) -> bool:
    return make_plan("auto", TaskCost(cost.profile, task), insertions=QUICK).priced.feasible


def _size(num_bytes: float) -> str:
    """Format a size, rounded up so that the printed size is enough."""
    unit, name = next((pair for pair in _UNITS if num_bytes >= pair[0]), _UNITS[-1])
    return f"{math.ceil(100 * num_bytes / unit) / 100:.2f} {name}"

"""Compares the predicted memory of plans with what ranks allocate.

    python -m benchmarks.planner_memory [--ranks 2 4]

All tables of a task have the same layout. For the rows and optimizer state, each rank measures how
much its process grows; the lower of two measurements counts, because messages that wait in shared
memory on a busy machine increase the growth. For ids, vectors, and gradients, each rank measures
the peak of the memory that it has allocated and not freed. The process grows by more than this
peak, because it keeps freed memory; the record also contains this growth.
"""

import ctypes
import gc
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.network import ranks_parser, result_of_ranks
from benchmarks.proc import reset_peak, status_bytes
from benchmarks.record import Results
from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.costs.counts import BUFFERS
from sbpflow.embedding.storage import huge_pages
from sbpflow.planner.calibration.design import Law, Sample, draw_plans
from sbpflow.planner.calibration.measure import measure_in_turns
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost, count_work
from sbpflow.planner.task import Plan
from sbpflow.planner.workloads import Drawn, make_task
from sbpflow.runtime.ranks.world import World

# {task: (tables, rows, columns, ids per sample, batch size)}
ROWS = "rows"
TASKS = {
    ROWS: (8, 400_000, 32, 1, 2048),
    "eight IDs": (26, 20_000, 32, 8, 16_384),
    "one ID": (26, 200_000, 32, 1, 16_384),
    "wide": (26, 20_000, 128, 1, 8192),
    "twenty IDs": (16, 50_000, 16, 20, 8192),
    "large tables": (8, 1_000_000, 32, 4, 16_384),
    "small tables": (40, 5000, 64, 1, 8192),
}
S, Q = 0.9, 5.0
SAMPLED_S = 3e-4  # interval between two samples of the allocated memory


def make_sample(shape: tuple[int, int, int, int, int], world_size: int) -> Sample:
    """Return a task with a shape like those in ``TASKS``."""
    tables, rows, dim, ids, batch = shape
    table = Drawn(num_rows=rows, active=rows, pooling=ids, s=S, q=Q)
    task = make_task([table] * tables, [dim] * tables, world_size=world_size, batch_size=batch)
    return Sample(task=task, laws={one.name: Law(s=S, q=Q) for one in task.tables})


def growth_bytes(boxing: Boxing, sample: Sample, plan: Plan) -> int:
    """Return the peak of this process's memory while the plan runs, above the memory before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return memory that earlier plans freed
    reset_peak()
    before = status_bytes("VmRSS")
    measure_in_turns(boxing, sample, [plan], rounds=1)
    return status_bytes("VmHWM") - before


class _MallocInfo(ctypes.Structure):
    """The result of glibc's ``mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the allocated memory during ``run``, minus the memory allocated before.
    Rows and optimizer state, which get mappings of their own, are not counted.
    """
    info = ctypes.CDLL("libc.so.6").mallinfo2
    info.restype = _MallocInfo

    def used() -> int:
        found = info()
        return found.hblkhd + found.uordblks

    gc.collect()
    before, ended = used(), threading.Event()
    peak = [before]

    def watch() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], used())
            time.sleep(SAMPLED_S)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with patch.object(huge_pages, "LEAST_BYTES", 1):
            run()
    finally:
        ended.set()
        watching.join()
    return peak[0] - before


def measured(world: World, boxing: Boxing, name: str) -> list[dict[str, Any]]:
    """Return one row per layout of a task."""
    sample = make_sample(TASKS[name], world.size)
    rows: list[dict[str, Any]] = []
    cost = TaskCost(described("h100-dgx"), sample.task)
    for layout, plan in draw_plans(sample, 0, 64):
        if not layout.startswith("all "):
            continue
        growth_bytes(boxing, sample, plan)  # trigger one-time allocations
        grown = [growth_bytes(boxing, sample, plan) for _ in range(2)]
        growth = np.array(gather_values(boxing, grown)).min(axis=1)
        if name == ROWS:
            peaks, predicted = growth, np.array(cost.predict(plan).memory_bytes)
        else:
            # A new ``Boxing`` has no buffers of earlier plans.
            run = partial(measure_in_turns, Boxing(world), sample, [plan], rounds=1)
            mine = allocated_bytes(run)
            peaks = np.array(gather_values(boxing, mine))
            predicted = count_work(sample.task, plan)[:, BUFFERS]
        ratio = predicted / peaks
        rows.append(
            {
                "task": name,
                "layout": layout.removeprefix("all "),
                "peak_mb": (peaks / 1e6).round(1).tolist(),
                "growth_mb": (growth / 1e6).round(1).tolist(),
                "predicted_over_peak": ratio.round(3).tolist(),
            }
        )
    return rows


def work(output: Path) -> None:
    torch.set_num_threads(1)
    with World.start("cpu") as world:
        boxing = Boxing(world)
        rows = [row for name in TASKS for row in measured(world, boxing, name)]
        if world.rank == 0:
            output.write_text(json.dumps(rows))


def main() -> None:
    parser = ranks_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    if args.worker:
        work(args.output)
        return
    results = Results("planner_memory", recorded=args.ranks == [2, 4])
    for ranks in args.ranks:
        rows = result_of_ranks("benchmarks.planner_memory", ranks, link=None)
        for row in rows:
            results.add(benchmark="planner_memory", ranks=ranks, **row)
        ratios = [ratio for row in rows for ratio in row["predicted_over_peak"]]
        results.add(
            benchmark="planner_memory_summary",
            ranks=ranks,
            lowest=min(ratios),
            highest=max(ratios),
            within_10_percent=round(float(np.mean([abs(r - 1) <= 0.1 for r in ratios])), 2),
        )


if __name__ == "__main__":
    main()

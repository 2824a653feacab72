"""Compares the predicted memory of plans with the peak that ranks reach.

    python -m benchmarks.planner_memory [--ranks 2]

All tables of a task have the same layout. In one task, most of the memory is for rows and optimizer
state; in the other, batches are large, and most of it is for ids, vectors, and gradients in flight.
Each rank measures how much its process grows. The lower of two measurements counts, because
messages that wait in shared memory on a busy machine increase the growth.
"""

import argparse
import ctypes
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.network import start_ranks
from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.planner.calibration.design import Law, Sample, draw_plans
from sbpflow.planner.calibration.measure import from_all_ranks, measure_in_turns
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.task import Plan
from sbpflow.planner.workloads import Drawn, make_task
from sbpflow.runtime.ranks.world import World

# {task: (tables, rows, columns, ids per sample, batch size)}
TASKS = {"rows": (8, 400_000, 32, 1, 2048), "batches": (26, 20_000, 32, 8, 16_384)}
S, Q = 0.9, 5.0


def make_sample(name: str, world_size: int) -> Sample:
    tables, rows, dim, ids, batch = TASKS[name]
    table = Drawn(num_rows=rows, active=rows, pooling=ids, s=S, q=Q)
    task = make_task([table] * tables, [dim] * tables, world_size=world_size, batch_size=batch)
    return Sample(task=task, laws={one.name: Law(s=S, q=Q) for one in task.tables})


def growth_bytes(boxing: Boxing, sample: Sample, plan: Plan) -> int:
    """Return the peak of this process's memory while the plan runs, above the memory before."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return memory that earlier plans freed
    Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak to the present size
    before = _status_bytes("VmRSS")
    measure_in_turns(boxing, sample, [plan], rounds=1)
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{name}:\s+(\d+)", text)
    if match is None:
        raise SystemExit(f"/proc/self/status has no {name}")
    return 1024 * int(match[1])


def work(output: Path) -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with World.start("cpu") as world:
        boxing = Boxing(world)
        for name in TASKS:
            sample = make_sample(name, world.size)
            plans = {n: p for n, p in draw_plans(sample, 0, 64) if n.startswith("all ")}
            cost = TaskCost(described("h100-dgx"), sample.task)
            for layout, plan in plans.items():
                growth_bytes(boxing, sample, plan)  # trigger one-time allocations
                grown = [growth_bytes(boxing, sample, plan) for _ in range(2)]
                peaks = np.array(from_all_ranks(boxing, grown)).min(axis=1)
                predicted = np.array(cost.predict(plan).memory_bytes)
                ratio = predicted / peaks
                rows.append(
                    {
                        "task": name,
                        "layout": layout,
                        "peak_mb": [round(float(peak) / 1e6, 1) for peak in peaks],
                        "predicted_over_peak": [round(float(r), 3) for r in ratio],
                    }
                )
        if world.rank == 0:
            output.write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "rows.json")
        start_ranks("benchmarks.planner_memory", args.ranks, ["--output", str(output)], link=None)
        rows = json.loads(output.read_text())
    results = Results("planner_memory", recorded=args.ranks == 2)
    for row in rows:
        results.add(benchmark="planner_memory", ranks=args.ranks, **row)
    ratios = [ratio for row in rows for ratio in row["predicted_over_peak"]]
    results.add(
        benchmark="planner_memory_summary",
        ranks=args.ranks,
        lowest=min(ratios),
        highest=max(ratios),
    )


if __name__ == "__main__":
    main()

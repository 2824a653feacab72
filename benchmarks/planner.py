"""Measures the time that our planner takes, and compares its plans with those of other planners.

    python -m benchmarks.planner steps [--link 1gbit] [--profile FILE] [--tasks 6]
    python -m benchmarks.planner speed [--profile FILE]

``steps`` runs plans alternately on --ranks ranks (``benchmarks/planner_steps.py``). ``speed``
reports the planning time in seconds and the gap to the lower bound, for tasks of several sizes.
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np

from benchmarks.planner_steps import run_steps
from benchmarks.record import Results
from sbpflow.planner.clusters import MACHINES, described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import default_path, load
from sbpflow.planner.planners import GREEDY, make_plan
from sbpflow.planner.search.bounds import bound
from sbpflow.planner.task import Task
from sbpflow.planner.workloads import DIMS, Drawn, make_task, random_task, split_pool

GIANT = Drawn(num_rows=200_000_000, active=20_000_000, pooling=50.0, s=0.8, q=10.0)


def speed(args: argparse.Namespace) -> None:
    """Measure the planning time in seconds and the gap to the bound."""
    name = args.profile
    profile = described(name) if name in MACHINES else load(Path(name) if name else default_path())
    results = Results("planner_speed", recorded=args.recorded)
    for num_tables, size, batch, giants in (
        (26, 2, 8192, 0),
        (50, 4, 8192, 0),
        (200, 16, 8192, 0),
        (50, 64, 65536, 3),
        (300, 64, 65536, 0),
        (1000, 128, 65536, 0),
        (5000, 128, 65536, 0),
    ):
        if giants:
            task = _task_with_giants(giants, num_tables, size, batch)
        else:
            task = random_task(
                0, num_tables=num_tables, world_size=size, held_out=True, batch_size=batch
            )
        start, busy = time.perf_counter(), time.process_time()
        planned = make_plan("auto", TaskCost(profile, task))
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        limit = bound(planned.problem, planned.priced.ms)
        results.add(
            benchmark="speed",
            tables=num_tables,
            ranks=size,
            giants=giants,
            seconds=round(seconds, 2),
            cpu_seconds=round(busy, 2),
            predicted_ms=planned.priced.ms,
            gap=round(limit.gap, 4),
            memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        )


def _task_with_giants(giants: int, num_tables: int, world_size: int, batch_size: int) -> Task:
    """Return a task with tables from the pool, except that the first ``giants`` tables are giant
    tables.
    """
    random = np.random.default_rng([0, num_tables, world_size, 7])
    half = split_pool(held_out=True)
    tables = [half[int(n)] for n in random.choice(len(half), num_tables, replace=False)]
    dims = [int(dim) for dim in random.choice(DIMS, num_tables)]
    tables[:giants], dims[:giants] = [GIANT] * giants, [max(DIMS)] * giants
    return make_task(tables, dims, world_size=world_size, batch_size=batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["steps", "speed"])
    parser.add_argument("--profile")
    parser.add_argument("--tasks", type=int, default=6, help="number of tasks (steps)")
    parser.add_argument(
        "--planners",
        nargs="+",
        default=[*GREEDY, "embark", "torchrec", "neuroshard", "dreamshard", "autoshard"],
        help="the planners to compare (steps)",
    )
    parser.add_argument("--recorded", action="store_true", help="write to benchmarks/results")
    parser.add_argument("--link", help="a rate in tc's notation, such as 1gbit (steps)")
    parser.add_argument("--seconds", type=float, default=240.0, help="total time (steps)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (steps)")
    parser.add_argument("--tables", type=int, nargs="+", help="numbers of tables to try (steps)")
    args = parser.parse_args()
    (run_steps if args.what == "steps" else speed)(args)


if __name__ == "__main__":
    main()

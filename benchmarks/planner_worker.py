"""Runs one rank of a comparison in which plans take turns.

Tasks and their plans are read from a file, and rank 0 writes the times of every plan. Each round
uses a different order, because the state of the caches depends on the previous plan. A plan runs
until the time limit, or until its difference from the first plan is known precisely enough.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.planner_plans import make_sample
from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.planner.calibration.design import Rows, draw_batches
from sbpflow.planner.calibration.measure import make_trainer
from sbpflow.planner.task import plan_of_tree
from sbpflow.runtime.ranks.world import World
from sbpflow.training.trainer import Trainer

# After this many rounds, plans are dropped once their difference from the first plan is settled.
FIRST_ROUNDS = 3
LEAST_ROUNDS, MOST_ROUNDS = 8, 200
STEPS = 4  # per turn
# Half-widths of a 95 % interval (Student's t), in units of the standard error, for 1, 2, 3, ...
# degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
TOLD_APART = 0.03


def work(args: argparse.Namespace) -> None:
    """Measure all tasks, one after another."""
    torch.set_num_threads(1)
    tasks = json.loads(Path(args.tasks).read_text())
    results: list[list[list[float]]] = []
    with World.start("cpu") as world:
        boxing = Boxing(world)
        for task in tasks:
            plans = [plan_of_tree(tree) for tree in task.pop("plans")]
            sample = make_sample(world_size=world.size, **task)
            batches = draw_batches(sample, world.rank, 2, world.device)
            trainers = [make_trainer(boxing, sample.task, plan, sample.hidden) for plan in plans]
            results.append(_rounds(boxing, trainers, batches, args))
        if world.rank == 0:
            Path(args.output).write_text(json.dumps(results))


def _rounds(
    boxing: Boxing, trainers: Sequence[Trainer], batches: Sequence[Rows], args: argparse.Namespace
) -> list[list[float]]:
    """Return the ms per step, indexed by [plan][round]. The first plan runs in all rounds; other
    plans run until they drop out.
    """
    times: list[list[float]] = [[] for _ in trainers]
    stop = time.monotonic() + args.seconds
    racing = list(range(len(trainers)))
    for number in range(MOST_ROUNDS + 1):
        order = random.Random(1000 * args.seed + number)
        for place in order.sample(racing, len(racing)):
            ms = _timed(boxing.world, trainers[place], batches)
            if number:
                times[place].append(ms)
        if number >= FIRST_ROUNDS:
            racing = _still_racing(boxing, times, racing, stop)
        if len(racing) < 2:
            break
    return times


def _timed(world: World, trainer: Trainer, batches: Sequence[Rows]) -> float:
    """Return the ms per step over four steps, each of which sends the ids of the next batch in
    advance. A warm-up step before them receives no ids in advance, and one after them sends none.
    """
    losses = trainer.train_on([batches[step % 2] for step in range(STEPS + 2)])
    next(losses)
    world.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        next(losses)
    world.barrier()
    elapsed_s = time.perf_counter() - start
    for _ in losses:
        pass
    return 1e3 * elapsed_s / STEPS


def _still_racing(
    boxing: Boxing, times: list[list[float]], racing: list[int], stop: float
) -> list[int]:
    """Return the plans to keep running: the first, and those whose difference from it is not
    settled; none after the time limit. Rank 0 decides for all ranks.
    """
    left = [place for place in racing if place == 0 or not settled(times[place], times[0])]
    return gather_values(boxing, [] if time.monotonic() > stop else left)[0]


def settled(theirs: Sequence[float], ours: Sequence[float]) -> bool:
    """Return whether the interval of the difference is narrow, or farther from 0 than it is wide. A
    few rounds may agree by chance, so a narrow interval counts only after ``LEAST_ROUNDS``.
    """
    mean, half = difference(theirs, ours)
    narrow = half < TOLD_APART and len(theirs) >= LEAST_ROUNDS
    return narrow or abs(mean) > 2 * half


def difference(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """Return the mean difference and half of the 95 % interval, as fractions, computed from paired
    logarithms.

    The interval uses Student's t, because there are few rounds. If a plan dropped out, only its own
    rounds are compared.
    """
    logs = [math.log(a / b) for a, b in zip(theirs, ours, strict=False)]
    if len(logs) < 2:
        return math.expm1(logs[0]), math.inf
    return math.expm1(statistics.mean(logs)), half_interval(logs)


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of two or more values."""
    freedom = len(values) - 1
    errors = _T[freedom - 1] if freedom <= len(_T) else 1.96
    return errors * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument(
        "--tasks", help="a JSON file with each task's plans and the arguments of ``make_sample``"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="seconds of rounds per task")
    parser.add_argument("--seed", type=int, default=0, help="for the order of the plans")
    parser.add_argument("--output")
    parser.add_argument("--cores", type=int, nargs="+", help="the core of each rank")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, {args.cores[int(os.environ["RANK"])]})
    work(args)


if __name__ == "__main__":
    main()

"""Plans of different planners as steps of the engine on 2 ranks, in turns: paired differences.

Each task is small enough for two ranks of a small machine. The plans of a task run one after
another in every round, a round's order turned by one; the difference of a plan with ours is taken
round by round. Rounds go on until every 95 % interval is below 3 %, or the time is over: then
plans are "not told apart" where the interval holds 0. The rank correlation of what the model
predicts with what the clock says is over the plans of a task.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.network import start_ranks
from benchmarks.peer_torchrec_planner import torchrec_plan
from benchmarks.record import Results
from planner.calibrate import plan_of_tree, plan_tree
from planner.cost import CostModel
from planner.design import Law, Sample, draw_batches
from planner.measure import dense_work_of, make_trainer
from planner.planners import make_plan, published
from planner.profile import Profile, load
from planner.published.setting import Setting
from planner.ranks import gather_texts
from planner.search.problem import Assignment, price_of
from planner.search.seeds import families
from planner.shapes import plan_of
from planner.task import DenseWork, Plan, Task
from planner.workloads import Drawn, make_task, split_pool
from sbpflow.boxing.executor import Boxing
from sbpflow.runtime.world import World
from sbpflow.training.step_schedule import OVERLAPPED

BATCH = 4096
MOST_ROWS, MOST_IDS = 50_000, 20.0
LEAST_ROUNDS, MOST_ROUNDS = 5, 60
TOLD_APART = 0.03


def make_sample(number: int, world_size: int) -> Sample:
    """10 to 60 held-out tables of the pool, cut to what two ranks hold, with their laws."""

    random = np.random.default_rng([number, 77])
    half = split_pool(held_out=True)
    count = int(random.choice([10, 26, 40]))
    drawn: list[Drawn] = []
    for place in random.choice(len(half), count, replace=False):
        one = half[int(place)]
        rows = min(one.num_rows, MOST_ROWS)
        pooling = min(one.pooling, MOST_IDS)
        drawn.append(replace(one, num_rows=rows, active=rows, pooling=pooling))
    dims = [int(d) for d in random.choice([8, 16, 32], count)]
    task = make_task(drawn, dims, world_size=world_size, batch_size=BATCH)
    macs, parameters = dense_work_of(sum(dims))
    task = replace(task, dense=DenseWork(macs_per_sample=macs, parameters=parameters))
    laws = {f"t{n}": Law(s=one.s, q=one.q) for n, one in enumerate(drawn)}
    return Sample(task=task, laws=laws)


def planners_of(
    profile: Profile, names: Sequence[str]
) -> dict[str, Callable[[Setting], Assignment]]:
    """Everyone else, trained once for two ranks and this batch."""
    cost = CostModel(profile).of(make_sample(0, 2).task)
    found = {name: published(name, [cost], 0) for name in names if name != "torchrec"}
    return {**found, "torchrec": torchrec_plan} if "torchrec" in names else found


def plans_of(
    task: Task, profile: Profile, planners: dict[str, Callable[[Setting], Assignment]]
) -> dict[str, tuple[Plan, float]]:
    """name -> (plan, predicted ms): ours, its next best, everyone else's, all tables alike."""
    cost = CostModel(profile).of(task)
    ours = make_plan("auto", cost)
    problem, found = ours.problem, ours.found
    assert found is not None
    setting = Setting(task, problem)
    plans: dict[str, Assignment] = {"auto": ours.assignment}
    for place, other in enumerate(found.others[:3]):
        plans[f"auto {place + 2}"] = other
    for name, planner in planners.items():
        plans[name] = planner(setting)
    for shape in families(problem):
        if f"all {shape}" in found.plans:
            plans[f"all {shape}"] = found.plans[f"all {shape}"]
    return {
        name: (plan_of(task, problem, plan), price_of(problem, plan).ms)
        for name, plan in plans.items()
    }


def run_steps(
    profile: str | None,
    link: str | None,
    names: Sequence[str],
    *,
    tasks: int,
    seconds: float,
    recorded: bool,
) -> None:
    results = Results(f"planner_steps_{link or 'loopback'}", recorded=recorded)
    correlations: list[float] = []
    prices = load(Path(profile) if profile else None)
    planners = planners_of(prices, names)
    for number in range(tasks):
        sample = make_sample(number, 2)
        plans = plans_of(sample.task, prices, planners)
        distinct: dict[str, str] = {}  # plan as JSON -> the first name that has it
        for name, (plan, _) in plans.items():
            distinct.setdefault(json.dumps(plan_tree(plan), sort_keys=True), name)
        with tempfile.TemporaryDirectory() as folder:
            asked, answer = Path(folder, "plans.json"), Path(folder, "times.json")
            asked.write_text(json.dumps([json.loads(text) for text in distinct]))
            words = ["--task", str(number), "--plans", str(asked), "--output", str(answer)]
            words += ["--seconds", str(seconds / tasks)]
            start_ranks("benchmarks.planner_steps", 2, words, link=link)
            times = dict(zip(distinct.values(), json.loads(answer.read_text()), strict=True))
        same = {
            name: distinct[json.dumps(plan_tree(plans[name][0]), sort_keys=True)] for name in plans
        }
        row = _compared(plans, times, same)
        correlations.append(row["spearman"])
        results.add(
            benchmark="steps",
            number=number,
            tables=len(sample.task.tables),
            link=link or "loopback",
            rounds=len(times["auto"]),
            **row,
        )
    results.add(
        benchmark="summary",
        link=link or "loopback",
        spearman=round(statistics.mean(correlations), 3),
    )


def _compared(
    plans: dict[str, tuple[Plan, float]], times: dict[str, list[float]], same: dict[str, str]
) -> dict[str, object]:
    """Of every plan: predicted and median ms, and how much slower than ours, with the interval."""
    found: dict[str, object] = {}
    medians = {name: statistics.median(times[same[name]]) for name in plans}
    for name, (_, predicted) in plans.items():
        mean, half = difference(times[same[name]], times[same["auto"]])
        found[name] = {
            "predicted_ms": round(predicted, 3),
            "ms": round(medians[name], 3),
            "slower_than_auto": round(mean, 4),
            "plus_minus": round(half, 4),
            "told_apart": abs(mean) > half,
        }
    best = min(medians, key=lambda name: medians[name])
    names = list(times)
    return {
        "plans": found,
        "fastest": best,
        "auto_over_fastest": round(medians["auto"] / medians[best] - 1, 4),
        "spearman": spearman([plans[n][1] for n in names], [medians[n] for n in names]),
    }


def difference(theirs: list[float], ours: list[float]) -> tuple[float, float]:
    """Mean of the paired logarithms, and half of its 95 % interval, as shares."""
    logs = [math.log(a / b) for a, b in zip(theirs, ours, strict=True)]
    if len(logs) < 2:
        return math.expm1(logs[0]), math.inf
    return math.expm1(statistics.mean(logs)), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))


def spearman(one: list[float], other: list[float]) -> float:
    """Rank correlation."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda n: values[n])
        found = [0.0] * len(values)
        for rank, n in enumerate(order):
            found[n] = float(rank)
        return found

    return round(statistics.correlation(ranks(one), ranks(other)), 3) if len(one) > 2 else 0.0


def work(args: argparse.Namespace) -> None:
    """One rank: all plans of a task in turns."""
    torch.set_num_threads(1)
    sample = make_sample(args.task, 2)
    plans = [plan_of_tree(tree) for tree in json.loads(Path(args.plans).read_text())]
    with World.start("cpu") as world:
        boxing = Boxing(world)
        batches = draw_batches(sample, world.rank, 2, world.device)
        trainers = [make_trainer(boxing, sample.task, plan) for plan in plans]
        for trainer in trainers:
            trainer.schedule = OVERLAPPED
        times: list[list[float]] = [[] for _ in plans]
        stop = time.monotonic() + args.seconds
        for number in range(MOST_ROUNDS + 1):
            for turn in range(len(plans)):
                place = (turn + number) % len(plans)
                ms = _timed(world, trainers[place], batches)
                if number:
                    times[place].append(ms)
            if number >= LEAST_ROUNDS and _enough(boxing, times, stop):
                break
        if world.rank == 0:
            Path(args.output).write_text(json.dumps(times))


def _timed(world: World, trainer: object, batches: list) -> float:
    """ms of a step, of four with the next batch's ids ahead."""
    world.barrier()
    start = time.perf_counter()
    for step in range(4):
        trainer.step(batches[step % 2], batches[(step + 1) % 2] if step < 3 else None)
    world.barrier()
    return 1e3 * (time.perf_counter() - start) / 4


def _enough(boxing: Boxing, times: list[list[float]], stop: float) -> bool:
    """Whether all are told apart or the time is over; rank 0 decides."""
    widest = max(difference(mine, times[0])[1] for mine in times[1:]) if len(times) > 1 else 0.0
    over = widest < TOLD_APART or time.monotonic() > stop
    return gather_texts(boxing, str(over))[0] == "True"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--task", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--plans")
    parser.add_argument("--output")
    work(parser.parse_args())


if __name__ == "__main__":
    main()

"""Compares ``scheme: auto`` with plans that give all tables the same layout.

    python -m benchmarks.schemes [--tasks dcnv2 even random0 ..] [--link 1gbit] [--all]

"All B" is data parallelism, "all S(1)" is scheme 1, "all reduce" is scheme 2, and "all unique" is
scheme 3. The plans alternately look up and update the same batches on two ranks, without a dense
part. A task's line contains the times of all plans, and how much slower the plan with the lowest
price is than the fastest plan. ``--all`` adds all other plans that ``auto`` compares, including
mixtures.
"""

import argparse
import json
import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.engine import Shape, tables_of
from benchmarks.network import ranks_parser, result_of_ranks
from benchmarks.record import Results
from benchmarks.stages import make_ids, make_shape, ranked_plans
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.runtime.ranks.topology import Link, Topology
from sbpflow.runtime.ranks.world import World

BATCH = 4096
TASKS = ("even", "dcnv2", "t180", "t510", *(f"random{n}" for n in range(10)))
GB_PER_S = {None: Link().gb_per_s, "1gbit": 0.12}


def task(name: str) -> Shape:
    """Return the tables and features of a named task; the number in a name seeds random tables."""
    if not name.startswith(("even", "random")):
        return make_shape(name)
    if name == "even":
        rows, dims, hotness = [200_000] * 26, [16] * 26, [1] * 26
    else:
        random = np.random.default_rng(int(name.removeprefix("random")))
        count = int(random.integers(4, 40))
        rows = np.exp(random.uniform(2, 13, count)).astype(int).tolist()
        dims = [int(random.choice([8, 16, 32, 64]))] * count
        hotness = np.clip(random.geometric(0.4, count), 1, 20).tolist()
    return tables_of(rows, dims, hotness)


def work(args: argparse.Namespace) -> None:
    """Run all plans of a task alternately on one rank."""
    torch.set_num_threads(1)
    shape = task(args.tasks[0])
    with World.start("cpu") as world:
        topology = Topology.one_host(world.size).with_link(GB_PER_S[args.link])
        plans = ranked_plans(shape, BATCH, topology)
        if not args.all:
            plans = plans[:1] + [plan for plan in plans[1:] if plan.name.startswith("all ")]
        boxing = Boxing(world)
        ids = make_ids(shape, BATCH // world.size, world.rank, skew=3)  # as the price assumes
        made = [EmbeddingCollection(one.plan, boxing, seed=1) for one in plans]
        times: list[list[float]] = [[] for _ in made]
        busy: list[list[float]] = [[] for _ in made]
        for repeat in range(args.repeats + 1):
            for number, tables in enumerate(made):
                world.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                for step in range(args.steps):
                    (out,) = tables.forward(ids, BATCH, training=True).values()
                    out.grad = torch.full_like(out, 1e-4)
                    tables.apply_gradients(repeat * args.steps + step + 1)
                cpu = time.process_time() - cpu
                world.barrier()
                if repeat:
                    busy[number].append(1e3 * cpu / args.steps)
                    times[number].append(1e3 * (time.perf_counter() - start) / args.steps)
        least = torch.tensor([min(cpu) for cpu in busy])
        dist.all_reduce(least, op=dist.ReduceOp.MAX)
        if world.rank == 0:
            found = [
                {
                    "plan": one.name,
                    "priced_ms": round(one.price.ms, 1),
                    "ms": round(statistics.median(ms), 1),
                    "cpu_ms": round(cpu, 1),  # on the busiest rank, the minimum over the repeats
                }
                for one, ms, cpu in zip(plans, times, least.tolist(), strict=True)
            ]
            args.output.write_text(json.dumps(found))


def main() -> None:
    parser = ranks_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--link", choices=["1gbit"])
    parser.add_argument("--all", action="store_true", help="add mixtures")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    for name in args.tasks:
        results = Results(f"schemes_{args.link or 'loopback'}", f"schemes {name}")
        record = result_of_ranks("benchmarks.schemes", 2, "--tasks", name, link=args.link)
        best = min(record, key=lambda one: one["ms"])
        results.add(
            task=name,
            link=args.link or "loopback",
            auto=record[0]["plan"],
            fastest=best["plan"],
            slower_by=round(record[0]["ms"] / best["ms"] - 1, 3),
            plans=record,
            load=round(os.getloadavg()[0], 1),
        )


if __name__ == "__main__":
    main()

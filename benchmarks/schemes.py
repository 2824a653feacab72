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
from torch import Tensor

from benchmarks.network import ranks_parser, result_of_ranks
from benchmarks.record import Results
from benchmarks.stages import Shape, make_shape
from sbpflow.boxing.executor import Boxing
from sbpflow.config.table_layouts import resolve_table_layouts
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, plan_embeddings
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.measure import spread_of
from sbpflow.run.planning.auto_scheme import Candidate, Rules, candidates, rank_candidates
from sbpflow.runtime.ranks.topology import Link, Topology
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.placement import Placement

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
    tables = [
        TableConfig(name=f"t{n}", features=(f"f{n}",), num_rows=int(r), dim=d)
        for n, (r, d) in enumerate(zip(rows, dims, strict=True))
    ]
    return tables, [FeatureConfig(name=f"f{n}", hotness=int(h)) for n, h in enumerate(hotness)]


def ranked(shape: Shape, world: Placement, gb_per_s: float) -> list[Candidate]:
    """Return all plans, starting with the plan with the lowest price."""
    tables, features = shape
    shapes = {table.name: table.shape for table in tables}

    def plan(rules: Rules) -> EmbeddingPlan:
        schemes = {"auto": rules}
        parallel = ParallelConfig(scheme="auto")
        return plan_embeddings(
            [OutputConfig(name="deep", tables=tuple(tables))],
            resolve_table_layouts(parallel, shapes, schemes, world.size),
            features=features,
            optimizer=sparse_optimizer("rowwise_adagrad", lr=0.05),
            dtype=torch.float32,
            world=world,
            backend="gloo",
            batch_size=BATCH,
        )

    rules = candidates(tables, features, world.size, BATCH)
    topology = Topology.one_host(world.size).with_link(gb_per_s)
    return rank_candidates(rules, plan, batch_size=BATCH, topology=topology)


def make_ids(shape: Shape, samples: int, rank: int) -> Tensor:
    """Return ids ([samples, columns]) with the skew that the price assumes."""
    tables, features = shape
    random = np.random.default_rng(rank)
    columns = [
        (random.random((samples, f.hotness)) ** 3 * t.num_rows).astype(np.int64)
        * spread_of(t.num_rows)
        % t.num_rows
        for t, f in zip(tables, features, strict=True)
    ]
    return torch.from_numpy(np.concatenate(columns, 1).astype(np.int32))


def work(args: argparse.Namespace) -> None:
    """Run all plans of a task alternately on one rank."""
    torch.set_num_threads(1)
    shape = task(args.tasks[0])
    with World.start("cpu") as world:
        plans = ranked(shape, Placement.line("cpu", world.size), GB_PER_S[args.link])
        if not args.all:
            plans = plans[:1] + [plan for plan in plans[1:] if plan.name.startswith("all ")]
        boxing = Boxing(world)
        ids = make_ids(shape, BATCH // world.size, world.rank)
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

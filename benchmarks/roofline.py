"""Compares a training step with the time that this machine needs for the step's work alone.

    python -m benchmarks.roofline [--hidden 64] [--repeats 7]

The worker measures this machine's rates: the fastest matrix product, random row reads with and
without prefetch, memory bandwidth, deduplication, and messages between the two ranks. These rates
and the amounts of work in the batches determine the limit: the time of a step without Python,
waits, or overhead per operation. Rates and steps are measured alternately in the same processes,
with one thread per rank.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.click_model import SHAPES, Shape, make_batches
from benchmarks.network import ranks_parser, result_of_ranks
from benchmarks.record import Results
from sbpflow.runtime.ranks.world import World

SEED = 11
GEMM_SIDE = 1024
COPY_ELEMENTS = 1 << 24  # 64 MiB, larger than the caches
MESSAGE_ELEMENTS = 1 << 18  # 1 MiB, like the vectors of a step


def cpu_ms(call: Callable[[], object], calls: int) -> float:
    """Return the mean CPU time of this process per call in ms."""
    call()
    start = time.process_time()
    for _ in range(calls):
        call()
    return 1e3 * (time.process_time() - start) / calls


def make_rates(
    shape: Shape, addresses: Tensor, world: World
) -> dict[str, tuple[Callable[[], object], int, float]]:
    """Return, for each rate, a function, its number of calls, and the work of one call."""
    from sbpflow.boxing import pairs
    from sbpflow.embedding.storage import compiled
    from sbpflow.embedding.storage.numba_storage import Indexer

    onednn = torch.ops.mkldnn._linear_pointwise
    square = torch.randn(GEMM_SIDE, GEMM_SIDE)
    tall = torch.randn(shape.rows_per_rank, GEMM_SIDE)
    source, target = torch.ones(COPY_ELEMENTS), torch.ones(COPY_ELEMENTS)
    num_rows = shape.num_tables * shape.table_rows // world.size
    block = torch.ones(num_rows, shape.dim)
    at = torch.from_numpy(np.random.default_rng(5).permutation(num_rows).astype(np.int32))
    at = at[: addresses.unique().numel()]
    out = torch.empty(at.numel(), shape.dim)
    indexer = Indexer(shape.num_tables * shape.table_rows)
    link = world.link(range(world.size), "roofline")
    sent, received = torch.ones(2 * MESSAGE_ELEMENTS), torch.empty(2 * MESSAGE_ELEMENTS)
    sizes = [MESSAGE_ELEMENTS] * 2

    def message() -> None:
        pairs.all_to_all(received, sent, (sizes, sizes), link).wait()

    flops, rows = 2.0 * GEMM_SIDE**2, float(at.numel())
    return {
        "square_gflop_per_s": (lambda: square @ square, 10, GEMM_SIDE * flops / 1e6),
        "onednn_gflop_per_s": (
            lambda: onednn(square, square, None, "none", [], ""),
            10,
            GEMM_SIDE * flops / 1e6,
        ),
        "tall_gflop_per_s": (lambda: tall @ square, 5, shape.rows_per_rank * flops / 1e6),
        "copy_gb_per_s": (lambda: target.copy_(source), 10, 8.0 * COPY_ELEMENTS / 1e6),
        "random_row_ns": (lambda: block.index_select(0, at), 20, rows / 1e6),
        "prefetched_row_ns": (
            lambda: compiled.take_rows(block.numpy(), at.numpy(), out.numpy()),
            20,
            rows / 1e6,
        ),
        "deduplication_ms": (lambda: indexer.index(addresses), 20, 1.0),
        # bytes that a rank sends and receives at the same time
        "message_gb_per_s": (message, 20, 8.0 * MESSAGE_ELEMENTS / 1e6),
    }


def limit_ms(rates: dict[str, float], counts: dict[str, float], shape: Shape) -> dict[str, float]:
    """Return how many ms each kind of work in a step takes on one rank at the measured rates."""
    row_mb = 4e-6 * shape.dim
    vectors_mb = counts["lookups"] * row_mb
    peak = max(rate for name, rate in rates.items() if name.endswith("_gflop_per_s"))
    gb_per_s, row_ms = rates["copy_gb_per_s"], 1e-6 * rates["prefetched_row_ns"]
    # three products per layer: the output and the gradients of the input and of the weight
    mflop = 6e-6 * shape.rows_per_rank * (shape.width * shape.hidden + shape.hidden)
    served = counts["served_rows"]
    return {
        "products": mflop / peak,
        "deduplication": rates["deduplication_ms"],
        "row_reads": served * row_ms,
        "expansion": 2.0 * vectors_mb / gb_per_s,  # read rows, write vectors
        "segment_sum": 2.0 * vectors_mb / gb_per_s,  # read gradients, update sums
        "update": 2.0 * counts["updated_rows"] * row_ms,  # weights and optimizer state
        # vectors and gradients, and the ids of the rows
        "transfers": counts["sent_rows"] * (2.0 * row_mb + 4e-6) * 2.0 / rates["message_gb_per_s"],
    }


def counts_of(shape: Shape, world: World) -> tuple[Tensor, dict[str, float]]:
    """Return the addresses of this rank's first batch, and this rank's mean counts per batch."""
    own: list[Tensor] = []
    others: list[Tensor] = []
    first = torch.arange(shape.num_tables, dtype=torch.int32) * shape.table_rows
    for rank, addresses in ((world.rank, own), (1 - world.rank, others)):
        for batch in make_batches(shape, rank, world.size):
            addresses.append((batch.ids + first).reshape(-1))
    half = shape.table_rows // world.size  # each rank stores half of every table
    sent, served, updated = [], [], []
    for mine, theirs in zip(own, others, strict=True):
        wanted, theirs_wanted = mine.unique(), theirs.unique()
        is_mine = (wanted % shape.table_rows < half) == (world.rank == 0)
        is_mine_too = (theirs_wanted % shape.table_rows < half) == (world.rank == 0)
        sent.append(int((~is_mine).sum()))
        here = torch.cat([wanted[is_mine], theirs_wanted[is_mine_too]])
        served.append(here.numel())
        updated.append(here.unique().numel())
    means = {"sent_rows": sent, "served_rows": served, "updated_rows": updated}
    counts = {name: float(statistics.mean(values)) for name, values in means.items()}
    return own[0], counts | {"lookups": float(own[0].numel())}


def work(args: argparse.Namespace) -> None:
    """Measure the rates and steps of one rank alternately."""
    from benchmarks.click_trainer import ClickTrainer
    from benchmarks.gate_worker import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    shape = replace(SHAPES["usual"], hidden=args.hidden)
    with World.start("cpu") as world:
        addresses, counts = counts_of(shape, world)
        batches = make_batches(shape, world.rank, world.size)
        trainer = ClickTrainer(
            shape, batches, world, seed=SEED, comm_dtype="float32", layout="unique"
        )
        rates = make_rates(shape, addresses, world)
        values: dict[str, list[float]] = {name: [] for name in (*rates, "step_ms", "step_cpu_ms")}
        for turn in range(args.repeats + 1):
            found: dict[str, float] = {}
            for name, (call, calls, amount) in rates.items():
                world.barrier()
                ms = cpu_ms(call, calls)
                found[name] = amount / ms if name.endswith("per_s") else ms / amount
            world.barrier()
            start, busy = time.perf_counter(), time.process_time()
            trainer.pipelined(args.steps)
            world.barrier()
            found["step_ms"] = 1e3 * (time.perf_counter() - start) / args.steps
            found["step_cpu_ms"] = 1e3 * (time.process_time() - busy) / args.steps
            for name, value in found.items() if turn else ():
                values[name].append(value)
        if world.rank == 0:
            medians = {name: statistics.median(series) for name, series in values.items()}
            limit = limit_ms(medians, counts, shape)
            record = {"rates": medians, "counts": counts, "limit": limit}
            args.output.write_text(json.dumps(record))


def main() -> None:
    parser = ranks_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=SHAPES["usual"].hidden)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    results = Results("roofline", recorded=args.hidden == SHAPES["usual"].hidden)
    record = result_of_ranks("benchmarks.roofline", 2, link=None)
    rates, limit = record["rates"], sum(record["limit"].values())
    for name, value in rates.items():
        results.add(benchmark="roofline_rate", name=name, value=round(value, 2))
    for name, value in record["limit"].items():
        results.add(benchmark="roofline_limit", work=name, ms=round(value, 3))
    results.add(
        benchmark="roofline",
        hidden=args.hidden,
        counts={name: round(value) for name, value in record["counts"].items()},
        limit_ms=round(limit, 2),
        step_ms=round(rates["step_ms"], 2),
        step_cpu_ms=round(rates["step_cpu_ms"], 2),
        times_limit_by_cpu=round(rates["step_cpu_ms"] / limit, 2),
        times_limit_by_clock=round(rates["step_ms"] / limit, 2),
    )


if __name__ == "__main__":
    main()

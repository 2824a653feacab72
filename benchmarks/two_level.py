"""Compares the flat and the two-level exchange of unique rows on two hosts with two ranks each.

    python -m benchmarks.two_level [--links 100mbit 1gbit] [--simulate]

The hosts are network namespaces, and the ranks of a host share memory. Both layouts alternately
train the same model on the same batches in the same processes. ``--simulate`` only counts the
distinct ids of generated batches for larger worlds, and compares the counts with those that the
price formulas predict.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.click_model import SHAPES, Shape, make_batches, zipf_ids
from benchmarks.click_trainer import ClickTrainer
from benchmarks.gate_worker import keep_freed_memory
from benchmarks.network import INTERFACE, start_ranks
from benchmarks.record import Results
from sbpflow.runtime.ranks.world import World

RANKS = 4
# 8,192 samples per rank and about 1,700 distinct ids per table: 45 MB per host and step
SHAPE = replace(SHAPES["d128"], table_rows=50_000, rows_per_rank=8192, num_batches=6)
LAYOUTS = ("unique", "two_level")
MBIT = 1e6 / 8  # bytes per second
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IPv4, and TCP with timestamps
ROW_BYTES = 4 + 2 * 4 * SHAPE.dim  # an id, a row, and its gradient
WORLDS = ((2, 2, 8192), (2, 8, 2048), (8, 8, 1024), (8, 8, 8192), (64, 8, 8192))


def far_rows(shape: Shape, hosts: int, width: int, step: int) -> tuple[float, float]:
    """Return the mean numbers of rows that a host requests from other hosts in a step: distinct per
    rank (flat), and distinct per host (two levels).
    """
    flat = merged = 0
    for host in range(hosts):
        of_host: list[set[tuple[int, int]]] = []
        for rank in range(host * width, (host + 1) * width):
            ids = zipf_ids(shape, shape.rows_per_rank, np.random.default_rng((17, step, rank)))
            columns = [np.unique(column) for column in ids.T]
            flat += sum(map(len, columns))
            of_host.append({(n, int(row)) for n, column in enumerate(columns) for row in column})
        merged += len(set.union(*of_host))
    # The permutation of the ids spreads rows evenly over the hosts.
    return flat / hosts * (hosts - 1) / hosts, merged / hosts * (hosts - 1) / hosts


def sent() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return how many bytes, and how many of these without headers, this host has sent so far."""
    folder = Path(f"/sys/class/net/{INTERFACE}/statistics")
    size, packets = (int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return np.array([size, size - HEADER_BYTES * packets])


def work(args: argparse.Namespace) -> None:
    """Train both layouts alternately on one rank; rank 0 records the results of a link."""
    torch.set_num_threads(1)
    keep_freed_memory()
    (link,) = args.links
    rate = float(link.removesuffix("mbit")) * MBIT if "mbit" in link else 1e3 * MBIT
    with World.start("cpu") as world:
        batches = make_batches(SHAPE, world.rank, world.size)
        trainers = {
            layout: ClickTrainer(
                SHAPE, batches, world, seed=11, comm_dtype="float32", layout=layout
            )
            for layout in LAYOUTS
        }
        losses = {layout: trainers[layout].pipelined(args.steps) for layout in LAYOUTS}
        wall = {layout: list[float]() for layout in LAYOUTS}
        wire = {layout: list[Any]() for layout in LAYOUTS}
        busy = {layout: list[float]() for layout in LAYOUTS}
        for turn in range(args.turns):
            for layout in LAYOUTS[:: 1 if turn % 2 else -1]:
                world.barrier()
                start, cpu, before = time.perf_counter(), time.process_time(), sent()
                losses[layout] += trainers[layout].pipelined(args.steps)
                busy[layout].append((time.process_time() - cpu) / args.steps)
                world.barrier()
                wall[layout].append((time.perf_counter() - start) / args.steps)
                wire[layout].append((sent() - before) / args.steps)
        if world.rank:
            return
        difference = np.abs(np.subtract(*losses.values())).max()
        flat_s, two_s = (statistics.median(wall[layout]) for layout in LAYOUTS)
        flat_bytes, two_bytes = (np.median(wire[layout], 0) for layout in LAYOUTS)
        rows = [far_rows(SHAPE, 2, 2, step) for step in range(SHAPE.num_batches)]
        expected = [ROW_BYTES * float(np.mean(side)) for side in zip(*rows, strict=True)]
        # In the ring that sums the dense gradients, only one rank of each host sends to the other
        # host.
        parameters = trainers["unique"].job.model.parameters.values()
        dense = 2 * (RANKS - 1) / RANKS * 4 * sum(p.part.numel() for p in parameters)
        Results("two_level", link).add(
            layout="2 hosts of 2 ranks, dim 128, 8,192 samples per rank, 26 tables, Zipf 1.2",
            flat_ms=[round(1e3 * s, 1) for s in wall["unique"]],
            two_level_ms=[round(1e3 * s, 1) for s in wall["two_level"]],
            speedup=round(flat_s / two_s, 3),
            flat_host_bytes=round(flat_bytes[1]),
            two_level_host_bytes=round(two_bytes[1]),
            formula_flat_bytes=round(expected[0] + dense),
            formula_two_level_bytes=round(expected[1] + dense),
            cpu_ms=[round(1e3 * statistics.median(busy[layout]), 1) for layout in LAYOUTS],
            realised=round((flat_s - two_s) * rate / (flat_bytes[0] - two_bytes[0]), 3),
            largest_loss_difference=float(difference),
            losses=[losses["two_level"][0], losses["two_level"][-1]],
        )


def simulate() -> None:
    """Record the bytes that a host sends to other hosts, both counted and computed by the
    formula.
    """
    from sbpflow.planner.costs.features import zipf_mandelbrot

    results = Results("two_level", "simulated")
    for hosts, width, samples in WORLDS:
        shape = replace(SHAPE, rows_per_rank=samples)
        law = zipf_mandelbrot(shape.table_rows, shape.zipf, 0.0, 1)
        far, tables = (hosts - 1) / hosts, shape.num_tables
        formula = [
            ROW_BYTES * tables * far * width * law.touched(samples),
            ROW_BYTES * tables * far * law.touched(samples * width),
        ]
        sampled = min(hosts, 4)  # up to four hosts suffice as a sample, because all hosts are alike
        counted = [rows * far / ((sampled - 1) / sampled) for rows in
                   far_rows(shape, sampled, width, 0)]  # fmt: skip
        results.add(
            hosts=hosts,
            ranks_per_host=width,
            samples_per_rank=samples,
            counted_flat_mb=round(ROW_BYTES * counted[0] / 1e6, 1),
            counted_two_level_mb=round(ROW_BYTES * counted[1] / 1e6, 1),
            formula_flat_mb=round(formula[0] / 1e6, 1),
            formula_two_level_mb=round(formula[1] / 1e6, 1),
            fewer=round(counted[0] / counted[1], 2),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--simulate", action="store_true")
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if args.simulate:
        simulate()
        return
    for link in args.links:
        words = ["--links", link, "--steps", str(args.steps), "--turns", str(args.turns)]
        start_ranks("benchmarks.two_level", RANKS, words, link=link)


if __name__ == "__main__":
    main()

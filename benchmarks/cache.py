"""Measures the costs and savings of ``sbpflow/embedding/cache`` for tables larger than memory.

    python -m benchmarks.cache fetches    rows fetched per step, against MIN, LRU, LFU, Bagpipe
    python -m benchmarks.cache planning   CPU time of slot planning, and on which thread it runs
    python -m benchmarks.cache store      training on a storage with a limited rate
    python -m benchmarks.cache limit      a model four times as large as a memory limit, on 2 ranks
    python -m benchmarks.cache servers    training with rows on servers, in network namespaces
    python -m benchmarks.cache matrix     cached tables equal uncached ones, over 1, 2, 4 ranks

``store`` and ``servers`` also compare the losses with those of training without a cache.
``fetches``, ``store``, and ``servers`` use real rows, from ``--input train.txt`` or the file that
SBPFLOW_CRITEO_ROWS names; ``fetches`` also uses generated rows.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from benchmarks import cache_limit, cache_matrix, cache_servers, cache_store
from benchmarks.cache_policies import Array, Fetches, Trace, bagpipe, belady, lfu, lru, planned
from benchmarks.click_model import Shape, zipf_ids
from benchmarks.record import Results
from sbpflow.data import load_manifest
from sbpflow.data.read.loader import open_loader
from sbpflow.embedding.cache.slot_planner import SlotPlanner

Result = TypeVar("Result")
Rows = tuple[list[Array], list[int]]
BATCH = 1024
KNOWN = (1, 4, 16, 64)


@contextmanager
def prepared(given: str | None) -> Iterator[Path | None]:
    """Yield the folder of the real rows, prepared as train rows with one id per value, or ``given``
    if it is a prepared set; yield None if ``given`` is None.
    """
    if given is None:
        yield None
        return
    if Path(given).is_dir():
        yield Path(given)
        return
    with tempfile.TemporaryDirectory() as scratch:
        words = ["prepare", "--input", given, "--output", f"{scratch}/set", "--min-count", "1"]
        words += ["--split", "time:1,0,0"]
        subprocess.run([sys.executable, "-m", "data", *words], check=True, stdout=sys.stderr)
        yield Path(scratch) / "set"


def genuine_rows(folder: Path, batch_size: int, epochs: int = 1) -> Rows:
    """Return the row numbers of real samples, shuffled as in a run, and the number of rows of each
    table.
    """
    manifest = load_manifest(folder)
    loader = open_loader(manifest, batch_size=batch_size, shuffle="runs", tail="drop")
    sizes = [field.rows for field in manifest.sparse]
    starts = np.cumsum([0, *sizes[:-1]])
    batches = (batch for epoch in range(epochs) for batch in loader.epoch(epoch))
    return [batch.ids.numpy()[:, : len(sizes)] + starts for batch in batches], sizes


def generated_rows(shape: Shape) -> Rows:
    """Return row numbers that follow Zipf's law, and the number of rows of each table."""
    starts = np.arange(shape.num_tables, dtype=np.int64) * shape.table_rows
    generator = np.random.default_rng(1)
    batches = [
        zipf_ids(shape, shape.rows_per_rank, generator) + starts for _ in range(shape.num_batches)
    ]
    return batches, [shape.table_rows] * shape.num_tables


def fetches(results: Results, folder: Path | None) -> None:
    """Measure the rows that each policy fetches per step; raise SystemExit if the planner misses
    its bounds.
    """
    zipf = Shape(table_rows=100_000, zipf=1.1, rows_per_rank=BATCH, num_batches=200)
    if folder is not None:
        for epochs in (1, 3):
            rows = genuine_rows(folder, BATCH, epochs)
            for capacity in (22_000, 45_000):
                name = f"genuine, {epochs} epoch{'s' * (epochs > 1)}"
                _compare_policies(results, name, rows, capacity)
    rows = generated_rows(zipf)
    for capacity in (45_000, 100_000):
        _compare_policies(results, "generated, Zipf 1.1", rows, capacity)


def _compare_policies(results: Results, name: str, rows: Rows, capacity: int) -> None:
    batches, sizes = rows
    trace, num_rows = [np.unique(batch) for batch in batches], sum(sizes)
    best = belady(trace, num_rows, capacity)
    unique = float(np.mean([rows.size for rows in trace]))

    def add(policy: str, found: Fetches, **more: object) -> None:
        results.add(
            trace=name, batches=len(trace), rows=num_rows, unique_per_step=unique,
            capacity=capacity, policy=policy, fetched_per_step=found.fetched,
            read_per_step=found.read, times_min=found.fetched / best.fetched, **more,
        )  # fmt: skip

    add("MIN", best)
    add("LRU", lru(trace, num_rows, capacity))
    add("LFU", lfu(trace, num_rows, capacity))
    ttl, lookahead = bagpipe(trace, num_rows, capacity)
    add("Bagpipe", ttl, lookahead=lookahead)
    everything, _ = planned(trace, num_rows, capacity, known=len(trace), ahead=0)
    if everything.fetched != best.fetched:
        raise SystemExit(
            f"{name}: with all batches known, the planner fetches {everything.fetched:.7g} rows "
            f"per step, but the optimal policy, MIN, fetches {best.fetched:.7g}"
        )
    add("ours", everything, known=len(trace), ahead=0)
    for ahead in (0, 1):
        for known in KNOWN:
            found, shrunk = planned(trace, num_rows, capacity, known=known, ahead=ahead)
            add("ours", found, known=known, ahead=ahead, batches_not_ahead=shrunk)
    if capacity >= 5 * unique:
        enough = int(np.ceil(3 * capacity / best.fetched))
        found, shrunk = planned(trace, num_rows, capacity, known=enough, ahead=1)
        add("ours", found, known=enough, ahead=1, batches_not_ahead=shrunk)
        if found.fetched > 1.03 * best.fetched:
            raise SystemExit(
                f"{name}: the planner fetches {found.fetched:.7g} rows per step, more than 1.03 "
                f"times the {best.fetched:.7g} rows that the optimal policy, MIN, fetches"
            )


def planning(results: Results) -> None:
    """Measure the CPU time of slot planning per unique row, for batches with and without
    duplicates. Raise SystemExit if slot planning runs on the training thread.
    """
    small = Shape(rows_per_rank=1024, num_batches=140)
    large = replace(small, table_rows=1_000_000, rows_per_rank=16_384, num_batches=104)
    for shape, capacity in ((small, 45_000), (large, 1_000_000), (large, 200_000)):
        drawn, sizes = generated_rows(shape)
        num_rows = sum(sizes)
        for duplicates in (False, True):
            trace = [rows.reshape(-1) if duplicates else np.unique(rows) for rows in drawn]
            for known in (16, 64):
                times = _planning_times(trace, num_rows, capacity, known)
                results.add(
                    rows=num_rows, capacity=capacity, known=known, ahead=1,
                    lookups_per_batch=trace[0].size, **times,
                )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        results.add(threads=_planning_threads(Path(scratch)))


def _planning_times(trace: Trace, num_rows: int, capacity: int, known: int) -> dict[str, float]:
    """Return the CPU time of each part, in us per unique row, measured after the cache is full."""
    planner = SlotPlanner(num_rows, capacity)
    spent = dict.fromkeys(("announce", "admit", "release", "translate"), 0.0)
    unique, first = 0, 0
    slots = np.empty(max(rows.size for rows in trace), np.int64)

    def timed(name: str, call: Callable[[], Result]) -> Result:
        start = time.thread_time()
        value = call()
        spent[name] += time.thread_time() - start
        return value

    steps = len(trace) - known
    for step in range(steps):
        if step == steps // 4:  # warm-up: loads the compiled loops and fills the cache
            spent, unique, first = dict.fromkeys(spent, 0.0), 0, step
        while planner.num_announced < min(step + known + 1, len(trace)):
            rows = trace[planner.num_announced]
            count = timed("announce", lambda rows=rows: planner.announce(rows))
            unique += count if step > first else 0
        while planner.num_admitted <= step + 1:
            if isinstance(timed("admit", planner.admit), int):
                raise SystemExit(f"{capacity} slots are too few for two batches")
        rows = trace[step]
        timed("translate", lambda rows=rows: planner.translate(rows, slots[: rows.size]))
        timed("release", planner.release)
    per_batch = unique / (steps - first - 1)
    micros = {name: 1e6 * s / (steps - first) / per_batch for name, s in spent.items()}
    plan = sum(micros[name] for name in ("announce", "admit", "release"))
    return {
        "unique_per_batch": per_batch,
        "plan_us_per_row": plan,
        **{f"{name}_us_per_row": value for name, value in micros.items()},
        "bytes_per_row": planner.num_bytes / num_rows,
    }


def _planning_threads(folder: Path) -> int:
    """Return the number of threads that planned slots in a training run, excluding the training
    thread.
    """
    threads: set[int] = set()
    with ExitStack() as patches:
        for name in ("announce", "admit", "release"):
            method: Callable[..., Any] = getattr(SlotPlanner, name)

            def recorded(*args: object, method: Callable[..., object] = method) -> object:
                threads.add(threading.get_ident())
                return method(*args)

            patches.enter_context(patch.object(SlotPlanner, name, recorded))
        cache_store.train_generated(folder, steps=12)
    if not threads or threading.get_ident() in threads:
        raise SystemExit(f"slots are not planned on a separate thread: {threads}")
    return len(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "question",
        nargs="?",
        choices=("fetches", "planning", "store", "servers", "limit", "matrix"),
    )
    parser.add_argument(
        "--input", default=os.environ.get("SBPFLOW_CRITEO_ROWS"), help="rows, or a prepared set"
    )
    parser.add_argument("--part", choices=cache_store.PARTS, help="store: measure one part")
    parser.add_argument(
        "--count", type=int, default=0, help="matrix: number of cases to sample; 0 for all"
    )
    parser.add_argument("--seed", type=int, default=1, help="matrix: seed of the sample")
    parser.add_argument(
        "--folder",
        type=Path,
        help="limit and matrix: folder on a disk; matrix keeps finished work there",
    )
    args = parser.parse_args()
    if args.question == "fetches":
        with prepared(args.input) as folder:
            fetches(Results("cache_fetches", recorded=folder is not None), folder)
    elif args.question == "planning":
        planning(Results("cache_planning"))
    elif args.question in ("store", "servers"):
        with prepared(args.input) as folder:
            if folder is None:
                print("skipped: no real rows; use --input or set SBPFLOW_CRITEO_ROWS")
            elif args.question == "servers":
                cache_servers.measure(folder)
            else:
                for part in (args.part,) if args.part else cache_store.PARTS:
                    cache_store.measure(Results("cache_store", part), folder, part)
    elif args.question == "limit":
        cache_limit.measure(Results("cache_limit"), args.folder)
    elif args.question == "matrix":
        cache_matrix.measure(args.count, args.seed, args.folder)
    else:
        parser.error("name the part to measure")


if __name__ == "__main__":
    main()

"""Runs one process of the speed gate: the training steps of a rank, or a loader.

``benchmarks.gate`` copies this file into each checkout and runs it there, so the same code measures
both commits. This file must work with old and new commits, so it imports only a few modules, inside
the functions that need them.
"""

import argparse
import ctypes
import importlib
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

SEED = 11
LOSS_STEPS = 10  # warm-up steps, whose losses are compared


def measure_steps(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return this rank's wall-clock and CPU ms per step for the model of ``vs_torchrec``, and the
    first losses.
    """
    import torch

    from benchmarks.click_model import SHAPES, make_batches
    from benchmarks.click_trainer import ClickTrainer
    from sbpflow import World

    torch.set_num_threads(1)
    keep_freed_memory()
    shape, steps, turns = SHAPES["usual"], 30, 5
    if args.quick:
        shape = replace(shape, table_rows=20_000, rows_per_rank=1024, num_batches=4)
        steps, turns = 10, 2
    # The name of the keyword for the exchange precision depends on the commit.
    known = inspect.signature(ClickTrainer).parameters
    precision: dict[str, Any] = {"wire" if "wire" in known else "comm_dtype": "float32"}
    with World.start("cpu") as world:
        batches = make_batches(shape, world.rank, world.size)
        trainer = ClickTrainer(shape, batches, world, seed=SEED, layout=args.layout, **precision)
        losses = trainer.pipelined(LOSS_STEPS)

        def one_turn() -> None:
            trainer.pipelined(steps)
            world.barrier()

        world.barrier()
        wall, cpu = in_turns(one_turn, turns)
    return {
        "figures": {"step_ms": 1e3 * wall / steps, "step_cpu_ms": 1e3 * cpu / steps},
        "work": {f"loss of step {step}": loss for step, loss in enumerate(losses, 1)},
    }


def keep_freed_memory() -> None:
    """Keep freed memory in the process, as ``sbpflow train`` does, for both commits.

    Otherwise, glibc adapts its thresholds to the sizes that are freed first, and each benchmark run
    gets a random number of page faults per step, between 0 and 2,700. This effect exceeds the
    differences that the gate should detect.
    """
    mallopt = ctypes.CDLL(None).mallopt
    arena_max, mmap_threshold, trim_threshold = (-8, 1), (-3, 1 << 30), (-1, 1 << 30)
    for parameter, value in (arena_max, mmap_threshold, trim_threshold):
        if not mallopt(parameter, value):
            raise RuntimeError(f"mallopt({parameter}, {value}) failed")


def measure_loader(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return how many rows of a shuffled set are read into torch tensors, per second and per CPU
    second.
    """
    package = importlib.import_module(args.data_package)
    manifest = package.load_manifest(Path(args.set))
    reader = package.open_loader(manifest, batch_size=16_384, shuffle="rows", tail="drop")
    epoch, rows, clicks = -1, 0, 0.0

    def one_epoch() -> None:
        nonlocal epoch, rows, clicks
        epoch, rows, clicks = epoch + 1, 0, 0.0
        for batch in reader.epoch(epoch):
            rows += len(batch.labels)
            clicks += float(batch.labels.sum())

    one_epoch()  # warms up
    work = {"rows": float(rows), "clicks": clicks}
    wall, cpu = in_turns(one_epoch, 2 if args.quick else 10)
    return {"figures": {"rows_per_s": rows / wall, "rows_per_cpu_s": rows / cpu}, "work": work}


def in_turns(call: Callable[[], object], turns: int) -> tuple[float, float]:
    """Return the medians of wall-clock seconds and of this process's CPU seconds."""
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(turns):
        began, busy = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    return statistics.median(wall), statistics.median(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--question", choices=("steps", "loader"), required=True)
    parser.add_argument("--output", required=True, help="a folder for one JSON file per rank")
    parser.add_argument("--layout", help="the layout of all tables: unique or whole")
    parser.add_argument("--set", help="the prepared set of the loader")
    parser.add_argument("--data-package", help="the package of the loader in this checkout")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    measured = measure_steps(args) if args.question == "steps" else measure_loader(args)
    rank = os.environ.get("RANK", "0")
    (Path(args.output) / f"{rank}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()

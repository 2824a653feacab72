"""Compares steps with tables on the GPU, behind a cache, and growing, on one GPU.

The model is that of the DLPerf sweep in TF32, with ``--rows`` rows in its deep tables and as many
in its wide tables. Cached deep tables have their rows in host memory, and a tenth of them on the
GPU; wide rows, which are small, stay on the GPU. Every batch has new random ids, uniform numbers to
the power of 4, so nearly half of the lookups miss such a cache. Growing tables are compared with
tables of an eighth of the rows: they get the ids as keys, and these numbers of rows as limits.

TorchRec has its tables on the GPU, or FBGEMM's cache of a tenth (UVM caching), with three loops.
Before timing, the losses with and without our cache are compared; they must be equal.
``gpu_torchrec`` compares our losses with TorchRec's.

    python -m benchmarks.gpu_tables [--rows N] [--only NAME ...] [key=value ...]
"""

import argparse
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from benchmarks.device_timer import timed_ms
from benchmarks.gpu_dlperf import Rows, fields_of, random_rows
from benchmarks.gpu_torchrec import Peer, as_torchrec
from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.config.load import load_config
from sbpflow.config.schema import Config
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.models.registry import MODELS
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World

ROWS = 25_600_000
SHARE = 0.1
WARM_UP, STEPS, REPEATS, CHECKED_STEPS = 60, 20, 5, 6
DEVICE, CACHED, SMALL, GROWING = "device", "cached", "small", "growing"
SETTINGS = {
    DEVICE: [],
    CACHED: [f'parallel.storage={{"deep.*": {{kind: host, cache: {SHARE:.0%}}}}}'],
    SMALL: [],
    GROWING: [],  # see ``keyed``
}
# TorchRec's loops, and whether its tables are cached.
PEERS = {
    "torchrec device": ("pipelined", False),
    "torchrec cached": ("plain", True),
    "torchrec cached, pipelined": ("pipelined", True),
    "torchrec cached, prefetched": ("prefetched", True),
}


def keyed(fields: Fields) -> tuple[Fields, str]:
    """Return the fields with keys instead of ids, and the setting that limits their rows."""
    rules = ", ".join(
        f"{field.name}: {{vocabulary: dynamic, evict: {{max_rows: {max(field.rows, 1 << 16)}}}}}"
        for field in fields.ids
    )
    both = [
        tuple(replace(field, rows=0, keyed=True) for field in some)
        for some in (fields.sparse, fields.crosses)
    ]
    return replace(fields, sparse=both[0], crosses=both[1]), f"model.fields={{{rules}}}"


def batches(count: int, rows: int, batch_size: int, device: torch.device) -> list[Rows]:
    """Return ``count`` batches, each with new ids."""
    return list(islice(random_rows(fields_of(rows), batch_size, device), count))


def with_keys(rows: Rows) -> Rows:
    """Return the batch with its ids as keys in host memory."""
    if not isinstance(rows.ids, BatchIds):
        raise TypeError(f"ids are {type(rows.ids).__name__}, expected BatchIds")
    return replace(rows, ids=rows.ids.matrix.long().cpu())


def make_job(kind: str, rows: int, overrides: Sequence[str], world: World) -> Job:
    fields, more = fields_of(rows), [*SETTINGS[kind]]
    if kind == GROWING:
        fields, limits = keyed(fields)
        more.append(limits)
    config = load_config("configs/dlperf.yaml", [*overrides, *more], models=MODELS)
    spec, plan = plan_run(config, fields, world_size=world.size, device_type=world.device.type)
    return build_job(config, spec, plan, Boxing(world))


def check(rows: int, overrides: Sequence[str], world: World) -> None:
    """Raise SystemExit unless the losses with and without the cache are equal."""
    losses = []
    for kind in (DEVICE, CACHED):
        job = make_job(kind, rows, [*overrides, "parallel.cuda_graph=false"], world)
        made = batches(CHECKED_STEPS, rows, job.plan.batch_size, world.device)
        losses.append([float(loss) for loss in job.trainer.train_on(made)])
        torch.cuda.synchronize()  # the id stream uses memory of the job
        del job
        gc.collect()
    if losses[0] != losses[1]:
        raise SystemExit(f"the losses differ: {losses[0]} and, cached, {losses[1]}")


def measure(step: Callable[[], Any]) -> dict[str, float]:
    for _ in range(WARM_UP):
        step()
    times = timed_ms(step, steps=STEPS, repeats=REPEATS)
    return {f"{name.removesuffix('ms')}step_ms": round(value, 3) for name, value in times.items()}


def ours(kind: str, rows: int, overrides: Sequence[str], world: World) -> dict[str, object]:
    """Return ms per step, and, of cached tables, the rows moved per step and the ms of waiting."""
    job = make_job(kind, rows, overrides, world)
    trainer = job.trainer
    count = WARM_UP + 2 + STEPS * REPEATS + trainer.lookahead
    made = batches(count, rows, job.plan.batch_size, world.device)
    if kind == GROWING:
        made = list(map(with_keys, made))  # copied from the GPU before timing
    losses = trainer.train_on(made)
    figures: dict[str, object] = dict(measure(lambda: next(losses)))
    if not bool(torch.isfinite(next(losses))):
        raise SystemExit(f"{kind}: the loss is not finite")
    steps = trainer.num_steps
    if (counts := trainer.embeddings.cache_counts()) is not None:
        figures |= {
            "fetched": round(counts.fetched / steps),
            "written": round(counts.written / steps),
            "wait_ms": round(1e3 * counts.wait_s / steps, 2),
        }
    trainer.drain()
    torch.cuda.synchronize()
    return {
        "kernels": sorted({choice.name for choice in job.embeddings.kernels.values()}),
        **figures,
    }


def peer(name: str, rows: int, config: Config, world: World) -> dict[str, float]:
    """Return ms per step of one of TorchRec's loops."""
    loop, cached = PEERS[name]
    made = Peer(rows, config, world.device, share=SHARE if cached else None, loop=loop)
    count = WARM_UP + 4 + STEPS * REPEATS
    fields = fields_of(rows)
    inputs = [
        as_torchrec(one, fields)
        for one in batches(count, rows, config.data.batch_size, world.device)
    ]
    made.source = iter(inputs)
    return measure(made.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[*SETTINGS, *PEERS],
        choices=[*SETTINGS, *PEERS],
        metavar="NAME",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = Results("gpu_tables", recorded=args.rows == ROWS and not args.overrides)
    overrides = ["parallel.device=cuda", "parallel.tf32=true", *args.overrides]
    with World.start("cuda") as world:
        torch.backends.cuda.matmul.allow_tf32 = True
        check(args.rows // 4, overrides, world)
        for name in args.only:
            begin = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            rows = args.rows // 8 if name in (SMALL, GROWING) else args.rows
            if name in SETTINGS:
                figures = ours(name, rows, overrides, world)
            else:
                config = load_config("configs/dlperf.yaml", overrides, models=MODELS)
                figures = peer(name, rows, config, world)
            peak = torch.cuda.max_memory_allocated() - begin
            results.add(
                benchmark="tables", tables=name, rows=rows, peak_memory_bytes=peak, **figures
            )
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

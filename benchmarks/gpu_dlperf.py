"""Runs DLPerf's vocabulary sweep on one GPU: ms per iteration and memory, from 3.2M rows up.

The setting is that of OneFlow's DLPerf report (Wide & Deep, batch 16384, d 16, 7 x 1024, Adam on
touched rows), which gives 56.6 to 57.0 ms on one V100-16GB for every size up to 51.2M rows; see
docs/benchmarks.md. The sweep doubles the size until memory is exhausted. The random batches are on
the device, so only the step is timed; the ids are Zipf-like over whole tables.

    python -m benchmarks.gpu_dlperf [--max-rows N] [parallel.cuda_graph=false]
"""

import argparse
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from benchmarks.device_timer import timed_ms
from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.config.load import load_config
from sbpflow.config.schema import Config
from sbpflow.embedding.ids.batch_ids import BatchIds, IdBounds
from sbpflow.models.registry import MODELS
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.sbp import balanced_sizes

FIRST_ROWS = 3_200_000
WARM_UP, STEPS, REPEATS = 5, 20, 5


@dataclass
class Rows:
    labels: Tensor
    dense: Tensor
    ids: BatchIds | Tensor
    batch_size: int


def fields_of(vocabulary: int) -> Fields:
    """Return the fields of 26 deep and 2 wide tables; the deep tables have ``vocabulary`` rows in
    total, and so do the wide tables.
    """
    return Fields.of(
        [f"I{n}" for n in range(1, 14)],
        {f"C{n}": vocabulary // 26 for n in range(1, 27)},
        {"C1xC2": vocabulary // 2, "C3xC4": vocabulary // 2},
    )


def make_job(vocabulary: int, config: Config, world: World) -> tuple[Job, Fields]:
    """Build the model over the fields of ``vocabulary``; return the job and the fields."""
    fields = fields_of(vocabulary)
    spec, plan = plan_run(config, fields, world_size=world.size, device_type=world.device.type)
    return build_job(config, spec, plan, Boxing(world)), fields


def batches(
    config: Config, fields: Fields, device: torch.device, *, rank: int = 0, size: int = 1
) -> Iterator[Rows]:
    """Yield batches endlessly, cycling through a few prepared ones. Each contains only the rows of
    rank ``rank``, out of ``size`` ranks.
    """
    count = config.data.batch_size
    mine = balanced_sizes(count, size)
    rows = slice(sum(mine[:rank]), sum(mine[: rank + 1]))
    made = list(islice(random_rows(fields, count, device, rows), 8))
    while True:
        yield from made


def random_rows(
    fields: Fields, count: int, device: torch.device, part: slice = slice(None)
) -> Iterator[Rows]:
    """Yield part of a new random batch of ``count`` rows, endlessly. Ids are uniform numbers to the
    power of 4, a Zipf-like concentration, and are marked as checked, like the ids of a loader.
    """
    bounds = IdBounds(tuple(field.rows for field in fields.ids), (), ())
    generator = torch.Generator(device).manual_seed(1)
    sizes = torch.tensor([field.rows for field in fields.ids], device=device)
    while True:
        uniform = torch.rand(count, len(sizes), generator=generator, device=device)
        yield Rows(
            torch.randint(0, 2, (count,), generator=generator, device=device).float()[part],
            torch.rand(count, len(fields.dense), generator=generator, device=device)[part],
            BatchIds((uniform**4 * sizes).int()[part], None, bounds),
            count,
        )


def measure(vocabulary: int, config: Config, world: World) -> dict[str, float]:
    """Measure the median and spread of the ms per step, and the peak memory."""
    job, fields = make_job(vocabulary, config, world)
    source = batches(config, fields, world.device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        loss = job.trainer.step(next(source))
    if not bool(torch.isfinite(loss)):
        raise SystemExit(f"{vocabulary} rows: the loss is {float(loss)}, not a finite number")
    times = timed_ms(lambda: job.trainer.step(next(source)), steps=STEPS, repeats=REPEATS)
    return {
        "step_ms": times["ms"],
        "min_ms": times["min_ms"],
        "max_ms": times["max_ms"],
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "table_and_state_bytes": job.embeddings.memory_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-rows", type=int, default=1 << 40)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    config = load_config(
        "configs/dlperf.yaml", ["parallel.device=cuda", *args.overrides], models=MODELS
    )
    graphed = config.parallel.cuda_graph is not False
    name = "dlperf_vocabulary_cuda_graph" if graphed else "dlperf_vocabulary"
    results = Results("gpu_dlperf", name)
    with World.start("cuda") as world:
        vocabulary = FIRST_ROWS
        while vocabulary <= args.max_rows:
            try:
                figures = measure(vocabulary, config, world)
            except torch.OutOfMemoryError:
                results.add(rows=vocabulary, out_of_memory=True)
                break
            results.add(
                rows=vocabulary,
                batch_size=config.data.batch_size,
                embedding_dim=config.model.embedding_dim,
                hidden=list(config.model.hidden),
                sparse=config.optimizer.sparse.name,
                cuda_graph=graphed,
                world_size=1,
                **figures,
            )
            gc.collect()  # a job with a graph contains reference cycles
            torch.cuda.empty_cache()
            vocabulary *= 2


if __name__ == "__main__":
    main()

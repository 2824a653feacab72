"""Tests a small collective on several NCCL ranks, on one GPU if necessary, and measures overlap.

NCCL's documentation says that two ranks on one device are not supported. Each rank therefore gets
its own host name, as in the tests, and the small collective shows whether NCCL accepts this. On one
GPU, the overlap is measured with loopback traffic, not with a network.

    python -m benchmarks.gpu_ranks collective|overlap [--ranks N] [--rows N] [key=value ...]
"""

import argparse
import os
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
import torch.multiprocessing as mp

from benchmarks.gpu_dlperf import FIRST_ROWS, batches, make_job
from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.config.load import load_config
from sbpflow.config.schema import Config
from sbpflow.models.registry import MODELS
from sbpflow.runtime.ranks.rendezvous import Rendezvous
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial
from sbpflow.training.overlap import FIRST_STEP, MIN_RUN_STEPS, OverlapWatch

TIMEOUT_S = 60.0
WATCHED_STEPS = 60  # steps 11 to 50 are timed


def collective(world: World) -> dict[str, object]:
    """Run one all-reduce of four numbers and check the result."""
    line = Placement.line("cuda", world.size)
    src, dst = Layout(line, (Partial(),)), Layout(line, (Broadcast(),))
    steps = plan_boxing(src, dst, (4,), torch.float32, id="small", backend="nccl")
    start = time.perf_counter()
    mine = torch.full((4,), float(world.rank + 1), device=world.device)
    out = Boxing(world).run(steps, mine)
    expected = float(sum(range(1, world.size + 1)))
    if out is None or not bool((out == expected).all()):
        raise RuntimeError(f"an all-reduce over {world.size} ranks returned {out}, not {expected}")
    return {"first_all_reduce_s": time.perf_counter() - start}


def overlap(world: World, rows: int, config: Config) -> dict[str, object]:
    """Return the report of ``OverlapWatch`` for steps 11 to 50."""
    job, fields = make_job(rows, config, world)
    source = batches(config, fields, world.device, rank=world.rank, size=world.size)
    watch = OverlapWatch(job.trainer, world.size, MIN_RUN_STEPS, world.device)
    losses = job.trainer.train_on(islice(source, WATCHED_STEPS))
    for _ in range(WATCHED_STEPS):
        with watch.step():
            next(losses)
    return {"rows": rows, "first_step": FIRST_STEP, "overlap": watch.summary()}


def _rank(rank: int, args: argparse.Namespace, store: str) -> None:
    os.environ["NCCL_HOSTID"] = f"sbpflow-{rank}"
    meeting = Rendezvous(
        init_method=f"file://{store}",
        rank=rank,
        size=args.ranks,
        local_rank=rank % torch.cuda.device_count(),
    )
    with World.start("cuda", timeout_s=TIMEOUT_S, rendezvous=meeting) as world:
        if args.what == "collective":
            figures = collective(world)
        else:
            overrides = ["parallel.device=cuda", *args.overrides]
            config = load_config("configs/dlperf.yaml", overrides, models=MODELS)
            figures = overlap(world, args.rows, config)
        if rank == 0:
            results = Results(f"gpu_{args.what}", recorded=args.rows == FIRST_ROWS)
            cards = torch.cuda.device_count()
            results.add(benchmark=args.what, world_size=args.ranks, cards=cards, **figures)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("collective", "overlap"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=FIRST_ROWS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (args, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()

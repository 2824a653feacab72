"""Compares the training speed of sbpflow and TorchRec.

    python -m benchmarks.vs_torchrec [--ranks 2] [--link 1gbit] [--wire float32 bfloat16]

Both systems use the same ids, weights, optimizers, precision, and ranks. First their losses are
compared. Then the systems run alternately, and medians are reported. TorchRec makes its own plan,
and the faster of its two loops (plain, pipelined) counts. ``--link`` puts each half of the ranks
into its own network namespace, connected by a link of that rate (needs root). ``--shape`` and
``--hot`` select other tables, widths, and numbers of ids. ``--ddp`` also times plain torch:
EmbeddingBag(sparse=True) in DistributedDataParallel, and the same model in one process with a
thread per rank, which trains the global batches while the other ranks wait. ``--model dlrm`` and
``dcnv2`` train TorchRec's own models and also time only the dense part, because this time is common
to both systems and dilutes the ratio.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.click_model import EARLY, HOTNESS, LATE, SHAPES, make_batches
from benchmarks.network import ranks_parser, result_of_ranks
from benchmarks.record import Results
from benchmarks.torchrec_models import MODELS
from sbpflow.runtime.ranks.world import World

SEED = 11
LOSS_STEPS = 10
LOSS_TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-3}


def work(args: argparse.Namespace) -> None:
    """Run both systems in the process of one rank: compare the losses, then time the systems
    alternately.
    """
    from benchmarks.click_trainer import ClickTrainer
    from benchmarks.peer_ddp import DdpPeer, OneProcess
    from benchmarks.peer_torchrec import TorchRecPeer
    from sbpflow.embedding.plan.tables import INITIAL_RANGE

    torch.set_num_threads(1)
    # With 214 ids per sample, the loss diverges at the learning rate used for one id per field.
    shape = SHAPES[args.shape]
    if args.hot != "one":
        shape = replace(shape, hotness=HOTNESS[args.hot], lr=0.005, num_batches=8)
    with World.start("cpu") as world, torch.random.fork_rng():
        batches = make_batches(shape, world.rank, world.size)
        wire = getattr(torch, args.wire)
        peer = TorchRecPeer(
            shape, batches, seed=SEED, bound=INITIAL_RANGE, wire=wire, model=args.model
        )
        made = {
            layout: ClickTrainer(
                shape,
                batches,
                world,
                seed=SEED,
                comm_dtype=args.wire,
                layout=layout,
                kernel=args.kernel,
                model=args.model,
                profile=args.profile,
            )
            for layout in (args.layout, *args.compare)
        }
        ours = made.pop(args.layout)
        ddp = DdpPeer(shape, batches, seed=SEED, bound=INITIAL_RANGE) if args.ddp else None
        alone = None
        if args.ddp and world.rank == 0:
            alone = OneProcess(shape, world.size, seed=SEED, bound=INITIAL_RANGE)
        mean = _mean_over_ranks(peer.plain(LOSS_STEPS))
        mine = ours.pipelined(LOSS_STEPS)
        apart = _apart("TorchRec", mean, mine, args.wire)
        if ddp is not None:
            _apart("plain torch", _mean_over_ranks(ddp.plain(LOSS_STEPS)), mine, args.wire)
        if alone is not None:
            _apart("plain torch", alone.plain(LOSS_STEPS), mine, args.wire)
        loops: dict[str, Callable[[int], object]] = {
            "torchrec plain": peer.plain,
            "torchrec pipelined": peer.pipelined,
            "sbpflow": ours.pipelined,
            "sbpflow, no overlap": ours.plain,
        }
        loops |= {f"sbpflow, {layout}": trainer.pipelined for layout, trainer in made.items()}
        if ddp is not None:
            loops["plain torch, DDP"] = ddp.plain
            loops["plain torch, one process"] = (lambda _: None) if alone is None else alone.plain
        if args.model != "wdl":
            loops["torchrec, dense part alone"] = peer.dense_alone
            loops["sbpflow, dense part alone"] = ours.dense_alone
        times, cpu = in_turns(world, loops, args.steps, args.repeats)
        if world.rank == 0:
            found = {"apart": apart, "times": times, "cpu": cpu}
            found |= {"predicted_ms": ours.predicted_ms, "tables": ours.layouts}
            args.output.write_text(json.dumps(found))


def in_turns(
    world: World, loops: Mapping[str, Callable[[int], object]], steps: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return wall-clock ms and this process's CPU ms per step: for each loop, one value per repeat
    after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(repeats + 1):
        for name, loop in loops.items():
            world.barrier()
            start, busy = time.perf_counter(), time.process_time()
            loop(steps)
            world.barrier()
            if repeat:
                times[name].append(1e3 * (time.perf_counter() - start) / steps)
                cpu[name].append(1e3 * (time.process_time() - busy) / steps)
    return times, cpu


def _apart(system: str, losses: list[float], ours: list[float], wire: str) -> float:
    """Return the largest difference of the losses; raise SystemExit if it is too large."""
    apart = max(abs(a - b) for a, b in zip(losses, ours, strict=True))
    if apart > LOSS_TOLERANCE[wire]:
        raise SystemExit(f"losses differ by {apart}: {system} {losses}, sbpflow {ours}")
    return apart


def _mean_over_ranks(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def compare(args: argparse.Namespace, wire: str, results: Results) -> None:
    """Start the ranks for one precision and report the results."""
    load = round(os.getloadavg()[0], 1)  # mean number of runnable processes in the last minute
    record = result_of_ranks("benchmarks.vs_torchrec", args.ranks, "--wire", wire, link=args.link)
    ranks, rows = args.ranks, SHAPES[args.shape].rows_per_rank
    medians = {name: statistics.median(values) for name, values in record["times"].items()}
    peers = {name: medians[name] for name in ("torchrec plain", "torchrec pipelined")}
    faster = min(peers, key=peers.__getitem__)
    times_faster, *spread = _times_faster(record["times"][faster], record["times"]["sbpflow"])
    for name, value in medians.items():
        results.add(
            benchmark="vs_torchrec",
            system=name,
            ranks=ranks,
            model=args.model,
            link=args.link or "loopback",
            shape=args.shape,
            hot=args.hot,
            wire=wire,
            step_ms=round(value, 2),
            # the value is the CPU time of all threads of rank 0
            cpu_ms=round(statistics.median(record["cpu"][name]), 2),
            samples_per_s=round(1e3 * ranks * rows / value),
            load=load,
        )
    dense = [medians.get(f"{name}, dense part alone", 0.0) for name in ("torchrec", "sbpflow")]
    results.add(
        benchmark="vs_torchrec_ratio",
        model=args.model,
        link=args.link or "loopback",
        ranks=ranks,
        shape=args.shape,
        hot=args.hot,
        wire=wire,
        layout=args.layout,
        kernel=args.kernel,
        against=faster,
        times_faster=round(times_faster, 2),
        spread=[round(ratio, 2) for ratio in spread],
        # How much faster lookups, transfers, and updates are: the dense part's time is subtracted.
        times_faster_beside_the_dense_part=round(
            (medians[faster] - dense[0]) / (medians["sbpflow"] - dense[1]), 2
        ),
        losses_apart=record["apart"],
        tables=record["tables"],
        predicted_ms=record["predicted_ms"],
        beside={
            name: [round(ratio, 3) for ratio in _times_faster(times, record["times"]["sbpflow"])]
            for name, times in record["times"].items()
            if name.startswith(("sbpflow, ", "plain torch")) and not name.endswith("alone")
        },
        load=load,
    )


def _times_faster(theirs: list[float], ours: list[float]) -> list[float]:
    """Return the median, the minimum, and the maximum ratio of paired runs."""
    pairs = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    return [statistics.median(pairs), pairs[0], pairs[-1]]


def main() -> None:
    parser = ranks_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link")
    parser.add_argument("--wire", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--layout",
        default="unique",
        choices=["unique", EARLY, LATE, "reduce", "columns", "unique_columns", "whole", "auto"],
    )
    parser.add_argument(
        "--profile", help="a calibration for --layout auto; default: this machine's calibration"
    )
    parser.add_argument("--compare", nargs="*", default=[], help="additional layouts to time")
    parser.add_argument("--kernel", default="auto", choices=["auto", "torch", "fbgemm", "numba"])
    parser.add_argument("--shape", default="usual", choices=SHAPES, help="tables, widths, batch")
    parser.add_argument("--hot", default="one", choices=sorted(HOTNESS), help="ids per table")
    parser.add_argument("--model", default="wdl", choices=MODELS, help="TorchRec's own, except wdl")
    parser.add_argument("--ddp", action="store_true", help="add plain torch (all tables B)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.worker:
        (args.wire,) = args.wire
        args.ddp = args.ddp and args.wire == "float32"
        work(args)
        return
    where = args.link or "loopback"
    if args.hot != "one" and len(SHAPES[args.shape].hotness) != len(HOTNESS[args.hot]):
        parser.error(
            f"--hot {args.hot} has ids of {len(HOTNESS[args.hot])} tables; use another --shape"
        )
    if args.ddp and (args.hot != "one" or args.model != "wdl"):
        parser.error("--ddp: plain torch needs --hot one and --model wdl")
    usual = (
        ("model", "wdl"),
        ("shape", "usual"),
        ("layout", "unique"),
        ("hot", "one"),
        ("kernel", "auto"),
    )
    kinds = [chosen for key, value in usual if (chosen := getattr(args, key)) != value]
    kinds += [f"{args.ranks}ranks"] if args.ranks != 2 else []
    kinds += ["early_rows"] if EARLY in args.compare else []
    kinds += ["late_gradients"] if LATE in args.compare else []
    results = Results("_".join([f"vs_torchrec_{where}", *kinds]))
    for wire in args.wire:
        compare(args, wire, results)


if __name__ == "__main__":
    main()

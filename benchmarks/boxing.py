"""Times layout conversions, the bare collectives that they use, and ``DTensor.redistribute``.

Where the ranks share memory, the same collectives through shared memory are timed, too.

    python -m benchmarks.boxing --ranks 2 --output out/boxing.jsonl
    python -m benchmarks.boxing --link 1gbit --sizes "16 MiB" --repeats 5

Every variant allocates its own result. Values are checked before timing. Repeats alternate between
the variants, so that machine drift affects all of them equally; results are medians over the
repeats, on the slowest rank. The output has one JSON line per conversion and size, and, without
--link, one line per conversion for the Python overhead.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.network import start_ranks
from benchmarks.record import provenance
from sbpflow.boxing import collectives, pairs
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.runtime.ranks.world import World, all_gather_single, reduce_scatter_single
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import parse_nd_sbp
from sbpflow.tensor.dtensor import to_mesh, to_theirs

CONVERSIONS = [
    ("S(0)", "B"),
    ("S(1)", "B"),
    ("S(0)", "S(1)"),
    ("S(1)", "S(0)"),
    ("P", "S(0)"),
    ("P", "S(1)"),
    ("P", "B"),
    ("B", "S(0)"),
    ("B", "S(1)"),
    ("S(0)", "P"),
    ("B", "P"),
]
SIDES = {"64 KiB": 128, "1 MiB": 512, "16 MiB": 2048}  # float32, square
WARM_UP = 5

Variant = Callable[[], torch.Tensor | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--output", type=Path, default=Path("out/boxing.jsonl"))
    parser.add_argument(
        "--link", choices=["1gbit"], help="join two namespaces with a link of this rate"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _measure(options)
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    start_ranks("benchmarks.boxing", options.ranks, sys.argv[1:], link=options.link)
    print(options.output.read_text(), end="")


def _measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with World.start(options.device, timeout_s=120) as world:
        lines = [
            _conversion(world, src, dst, size, options.repeats)
            for size in options.sizes
            for src, dst in CONVERSIONS
        ]
        if not options.link:
            lines += [_python_part(world, src, dst) for src, dst in CONVERSIONS]
        if world.rank == 0:
            facts = {"link": options.link or "loopback", "ranks": world.size,
                     "backend": world.backend, **provenance()}  # fmt: skip
            options.output.write_text("".join(json.dumps(x | facts) + "\n" for x in lines))


def _conversion(world: World, src: str, dst: str, size: str, repeats: int) -> dict[str, object]:
    side = SIDES[size]
    line = Placement.line(world.device.type, world.size)
    layouts = [Layout(line, parse_nd_sbp(text)) for text in (src, dst)]
    steps = _plan(layouts, side)
    full = torch.arange(side * side, device=world.device).remainder(251).float().view(side, side)
    part = _part(world, full, layouts[0])
    runner = Boxing(world)
    variants: dict[str, Variant] = {"ours": lambda: runner.run(steps, part)}
    variants |= _bare(world, steps, part) | _bare_shared(world, steps, part)
    if dst != "P":  # DTensor cannot convert to partial sums
        variants["dtensor"] = _dtensor(layouts, part)
    for name in [name for name in variants if name in ("ours", "dtensor")]:
        _check(world, variants[name](), full, layouts[1], name)
    times = _time_in_turn(world, variants, repeats)
    line_out: dict[str, object] = {
        "benchmark": "boxing",
        "conversion": f"{src} -> {dst}",
        "size": size,
        "shape": [side, side],
        "dtype": "float32",
        "collective": steps[0].collective if steps else "none",
        "bytes_total": sum(step.total_bytes for step in steps),
        "unit": "ms",
    }
    for name, values in times.items():
        line_out[name] = round(statistics.median(values), 4)
        line_out[f"{name}_spread"] = round(_spread(values), 4)
    for name in times.keys() - {"ours"}:
        line_out[f"ratio_to_{name}"] = round(
            statistics.median(times["ours"]) / statistics.median(times[name]), 3
        )
    return line_out


def _plan(layouts: list[Layout], side: int) -> tuple[BoxingStep, ...]:
    return plan_boxing(*layouts, (side, side), torch.float32, id="bench")


def _part(world: World, full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a rank's part, computed without the code under test; for P, the first rank has the
    value and the others have zeros.
    """
    if str(layout.nd_sbp[0]) == "P":
        return full.clone() if world.rank == 0 else torch.zeros_like(full)
    return full[layout.part_slices(tuple(full.shape), world.rank)].contiguous()


def _bare(world: World, steps: tuple[BoxingStep, ...], part: torch.Tensor) -> dict[str, Variant]:
    """Return functions that only call a collective, on buffers of the same size: the collective of
    the first step and, if that is an all-to-all for partial sums, the backend's reduce-scatter.
    """
    if not steps or not steps[0].groups:
        return {}
    group = world.link(range(world.size), "bare").group
    size = world.size
    flat = part.reshape(-1)

    def all_gather() -> torch.Tensor:
        out = flat.new_empty(flat.numel() * size)
        all_gather_single(out, flat, group=group)
        return out

    def all_to_all() -> torch.Tensor:
        out = torch.empty_like(flat)
        dist.all_to_all_single(out, flat, group=group)
        return out

    def all_reduce() -> torch.Tensor:
        out = flat.clone()
        dist.all_reduce(out, group=group)
        return out

    def reduce_scatter() -> torch.Tensor:
        out = flat.new_empty(flat.numel() // size)
        reduce_scatter_single(out, flat, group=group)
        return out

    bare = {
        "all_gather": all_gather,
        "all_to_all": all_to_all,
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
    }
    chosen: dict[str, Variant] = {"bare": bare[steps[0].collective]}
    if "P@" in str(steps[0].src) and steps[0].collective == "all_to_all":
        by_columns = "S(1)@" in str(steps[0].dst)

        def backend_reduce_scatter() -> torch.Tensor:
            """Call the collective directly, after packing columns if necessary."""
            pieces = torch.cat([c.reshape(-1) for c in part.chunk(size, 1)]) if by_columns else flat
            out = flat.new_empty(flat.numel() // size)
            reduce_scatter_single(out, pieces, group=group)
            return out

        chosen["backend_reduce_scatter"] = backend_reduce_scatter
    return chosen


def _bare_shared(
    world: World, steps: tuple[BoxingStep, ...], part: torch.Tensor
) -> dict[str, Variant]:
    """Return the collective of the first step through shared memory, on flat buffers of the same
    size; an all-to-all of partial sums includes the addition, which makes it a reduce-scatter.
    """
    link = world.link(range(world.size), "bare messages")
    if not steps or not steps[0].groups or link.shared is None:
        return {}
    flat = part.reshape(-1)
    even = [flat.numel() // world.size] * world.size
    adds = "P@" in str(steps[0].src)

    def all_gather() -> torch.Tensor:
        out = flat.new_empty(flat.numel() * world.size)
        return _waited(pairs.all_gather(out, flat, link), out)

    def all_to_all() -> torch.Tensor:
        out = torch.empty_like(flat)
        _waited(pairs.all_to_all(out, flat, (even, even), link), out)
        return out.view(world.size, -1).sum(0) if adds else out

    def all_reduce() -> torch.Tensor:
        out = flat.clone()
        return _waited(pairs.all_reduce(out, "sum", link), out)

    bare = {"all_gather": all_gather, "all_to_all": all_to_all, "all_reduce": all_reduce}
    return {"bare_shared": bare[steps[0].collective]}


def _waited(messages: pairs.Messages | pairs.AllReduce | None, out: torch.Tensor) -> torch.Tensor:
    assert messages is not None
    messages.wait()
    return out


def _dtensor(layouts: list[Layout], part: torch.Tensor) -> Variant:
    mesh = to_mesh(layouts[0].placement)
    source, target = ([to_theirs(sbp) for sbp in layout.nd_sbp] for layout in layouts)
    tensor = DTensor.from_local(part, mesh, source, run_check=False)

    def redistribute() -> torch.Tensor:
        with torch.no_grad():
            return tensor.redistribute(mesh, target).to_local()

    return redistribute


def _check(
    world: World, part: torch.Tensor | None, full: torch.Tensor, layout: Layout, name: str
) -> None:
    assert part is not None
    if str(layout.nd_sbp[0]) == "P":
        total = part.clone()
        dist.all_reduce(total, group=world.link(range(world.size), "check").group)
        assert torch.allclose(total, full, rtol=1e-6), name
    else:
        assert torch.equal(part, _part(world, full, layout)), name


def _time_in_turn(
    world: World, variants: dict[str, Variant], repeats: int
) -> dict[str, list[float]]:
    """Return the ms per call on the slowest rank.

    Because each variant leaves the caches and the allocator in a different state, each repeat runs
    the variants in a different random order, which is the same on all ranks.
    """
    for variant in variants.values():
        for _ in range(WARM_UP):
            variant()
    measured = torch.zeros(len(variants), repeats)
    calls = list(enumerate(variants.values()))
    for repeat in range(repeats):
        for number, variant in random.Random(repeat).sample(calls, len(calls)):
            world.barrier()
            start = time.perf_counter()
            variant()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            measured[number, repeat] = (time.perf_counter() - start) * 1e3
    dist.all_reduce(
        measured, dist.ReduceOp.MAX, group=world.link(range(world.size), "control").group
    )
    return dict(zip(variants, measured.tolist(), strict=True))


def _python_part(world: World, src: str, dst: str) -> dict[str, object]:
    """Measure the CPU microseconds of ``Boxing.run`` on 16 x 16 elements, with empty collectives of
    c10d; messages in shared memory are sent.
    """
    line = Placement.line(world.device.type, world.size)
    layouts = [Layout(line, parse_nd_sbp(text)) for text in (src, dst)]
    steps = _plan(layouts, 16)
    part = _part(world, torch.ones(16, 16, device=world.device), layouts[0])
    runner = Boxing(world)
    runner.run(steps, part)
    real = dist.all_to_all_single, dist.all_reduce, collectives.all_gather_single
    done = _Done()
    dist.all_to_all_single = dist.all_reduce = lambda *_, **__: done
    collectives.all_gather_single = lambda *_, **__: done
    values: list[float] = []
    try:
        for _ in range(30):
            start = time.thread_time()  # CPU time excludes other processes
            for _ in range(100):
                runner.run(steps, part)
            values.append((time.thread_time() - start) * 1e4)
    finally:
        dist.all_to_all_single, dist.all_reduce, collectives.all_gather_single = real
    return {
        "benchmark": "boxing_python",
        "conversion": f"{src} -> {dst}",
        "unit": "us",
        "ours": round(statistics.median(values), 2),
        "ours_spread": round(_spread(values), 2),
    }


class _Done:
    """A collective that completes immediately."""

    def wait(self) -> None:
        return None


def _spread(values: list[float]) -> float:
    """Return half of the interquartile range."""
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


if __name__ == "__main__":
    main()

"""Compares the bare engine with its kernel, plain torch, and the bandwidth limit.

    python -m benchmarks.engine kernel        one rank: bare FBGEMM, EmbeddingBag(sparse), the floor
    python -m benchmarks.engine vocabulary    3.2M to 102.4M rows: ms per step, bytes per row
    python -m benchmarks.engine tables        510 tables on 4 ranks: start-up, step, Python calls
    python -m benchmarks.engine rows          the torch kernel's step on 100k and on 10M rows

No job has a dense part. ``kernel`` compares values before timing. Times are medians, and ratios
compare alternating runs.
"""

import argparse
import cProfile
import io
import pstats
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.click_model import Shape as ClickShape
from benchmarks.click_model import zipf_ids
from benchmarks.network import start_ranks
from benchmarks.proc import status_bytes
from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, plan_embeddings
from sbpflow.embedding.plan.tables import (
    FeatureConfig,
    OutputConfig,
    TableConfig,
    TableLayout,
)
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.fbgemm_storage import Tbe
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split

RULE = sparse_optimizer("rowwise_adagrad", lr=0.05)
SEED = 3
Shape = tuple[list[TableConfig], list[FeatureConfig]]


def turns(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Run the jobs alternately, and return each job's times in ms, excluding three warm-up
    rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 3):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if repeat >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def halves(jobs: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return the result of ``turns`` and the ms of "NAME, lookup" and "NAME, update"; each job
    returns the clock time between its lookup and its update.
    """
    names = [f"{name}{part}" for name in jobs for part in ("", ", lookup", ", update")]
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 3):
        for name, job in jobs.items():
            start = time.perf_counter()
            middle = job()
            end = time.perf_counter()
            if repeat >= 3:
                times[name].append(1e3 * (end - start))
                times[f"{name}, lookup"].append(1e3 * (middle - start))
                times[f"{name}, update"].append(1e3 * (end - middle))
    return times


def ratio(times: dict[str, list[float]], one: str, other: str) -> list[float]:
    """Return [lower quartile, median, upper quartile] of the per-round time ratios of two jobs."""
    pairs = sorted(a / b for a, b in zip(times[one], times[other], strict=True))
    at = [len(pairs) // 4, len(pairs) // 2, 3 * len(pairs) // 4]
    return [round(pairs[place], 3) for place in at]


def tables_of(rows: Iterable[int], dims: Iterable[int], hotness: Iterable[int]) -> Shape:
    """Return a table and a feature for each of ``rows``, ``dims`` and ``hotness``."""
    tables = [
        TableConfig(name=f"t{n}", features=(f"f{n}",), num_rows=int(r), dim=int(d))
        for n, (r, d) in enumerate(zip(rows, dims, strict=True))
    ]
    return tables, [FeatureConfig(name=f"f{n}", hotness=int(h)) for n, h in enumerate(hotness)]


def plan_tables(
    shape: Shape, layouts: Mapping[str, TableLayout], size: int, batch_size: int
) -> EmbeddingPlan:
    """Plan tables that form one output, on ``size`` ranks with gloo."""
    tables, features = shape
    return plan_embeddings(
        [OutputConfig(name="deep", tables=tuple(tables))],
        layouts,
        features=features,
        optimizer=RULE,
        dtype=torch.float32,
        world=Placement.line("cpu", size),
        backend="gloo",
        batch_size=batch_size,
    )


def collect(
    world: World, shape: Shape, layouts: Mapping[str, TableLayout], batch_size: int
) -> EmbeddingCollection:
    plan = plan_tables(shape, layouts, world.size, batch_size)
    return EmbeddingCollection(plan, Boxing(world), seed=SEED)


STEP = 1  # step number of every update; these optimizers ignore it


def engine_step(
    collection: EmbeddingCollection, ids: Tensor, batch_size: int, grad: Tensor
) -> float:
    """Run a lookup, and an update with a constant gradient; return the clock time between them."""
    (output,) = collection.forward(ids, batch_size, training=True).values()
    middle = time.perf_counter()
    output.grad = grad
    collection.apply_gradients(STEP)
    return middle


def copy_bandwidth() -> float:
    """Return the total bytes per second that a large copy reads and writes."""
    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    best = min(turns({"copy": lambda: target.copy_(source)}, 7)["copy"])
    return 2 * source.numel() * 4 / (best / 1e3)


def kernel(results: Results, repeats: int) -> None:
    shape = ClickShape()
    batch = shape.rows_per_rank
    tables = [
        TableConfig(name=n, features=(n,), num_rows=shape.table_rows, dim=shape.dim)
        for n in shape.names
    ]
    ids = torch.from_numpy(zipf_ids(shape, batch, np.random.default_rng(1)))
    grad = torch.randn(batch, shape.num_tables * shape.dim) * 1e-3
    with World.start("cpu") as world:
        line = Placement.line("cpu", 1)
        layouts = {
            t.name: TableLayout(layout=Layout(line, (Broadcast(),)), exchange="local")
            for t in tables
        }
        features = [FeatureConfig(name=name) for name in shape.names]
        ours = collect(world, (tables, features), layouts, batch)
        bare = _bare_fbgemm(shape)
        bags, optimizer = _plain_torch(shape)
        for stored, table, bag in zip(
            ours.stored(), bare.split_embedding_weights(), bags, strict=True
        ):
            table.data.copy_(stored.weights)
            bag.weight.data.copy_(stored.weights)
        by_feature = ids.t().contiguous().view(-1).long()
        offsets = torch.arange(by_feature.numel() + 1)
        columns = [column.long() for column in ids.t().contiguous()]

        def bare_step() -> float:
            out = bare(by_feature, offsets)
            middle = time.perf_counter()
            out.backward(grad)
            return middle

        def plain_step() -> float:
            optimizer.zero_grad(set_to_none=True)
            out = torch.cat([bag(c.unsqueeze(1)) for bag, c in zip(bags, columns, strict=True)], 1)
            middle = time.perf_counter()
            out.backward(grad)
            optimizer.step()
            return middle

        jobs: dict[str, Callable[[], float]] = {
            "engine": lambda: engine_step(ours, ids, batch, grad),
            "bare FBGEMM": bare_step,
            "EmbeddingBag(sparse), SGD": plain_step,
        }
        for _ in range(2):
            jobs["engine"]()
            bare_step()
        for stored, table in zip(ours.stored(), bare.split_embedding_weights(), strict=True):
            torch.testing.assert_close(stored.weights, table.data, rtol=0, atol=1e-6)
        times = halves(jobs, repeats)
    _report_kernel(results, times, ids, shape.dim)


def _report_kernel(results: Results, times: dict[str, list[float]], ids: Tensor, dim: int) -> None:
    """Report times and ratios, in total and by stage, and the lower limit: the time that the
    necessary bytes take at copy bandwidth.
    """
    lookups, width = ids.numel(), dim * 4
    unique = sum(len(column.unique()) for column in ids.t())
    # A lookup reads ids and unique rows and writes the output. An update reads the ids and the
    # gradient, and reads and writes the rows and their state.
    floor = {
        "lookup": lookups * 4 + unique * width + lookups * width,
        "update": lookups * 4 + lookups * width + 2 * unique * width + 2 * unique * 4,
    }
    bandwidth = copy_bandwidth()
    for name, values in times.items():
        results.add(
            benchmark="engine_kernel", system=name, step_ms=round(statistics.median(values), 3)
        )
    for stage, size in floor.items():
        least = 1e3 * size / bandwidth
        results.add(
            benchmark="engine_kernel_stage",
            stage=stage,
            engine_over_bare_fbgemm=ratio(times, f"engine, {stage}", f"bare FBGEMM, {stage}"),
            plain_torch_over_engine=ratio(
                times, f"EmbeddingBag(sparse), SGD, {stage}", f"engine, {stage}"
            ),
            floor_bytes=size,
            floor_ms=round(least, 3),
            engine_over_floor=round(statistics.median(times[f"engine, {stage}"]) / least, 2),
        )
    floor_ms = 1e3 * sum(floor.values()) / bandwidth
    results.add(
        benchmark="engine_kernel_ratios",
        unique_share=round(unique / lookups, 3),
        engine_over_bare_fbgemm=ratio(times, "engine", "bare FBGEMM"),
        plain_torch_over_engine=ratio(times, "EmbeddingBag(sparse), SGD", "engine"),
        floor_bytes=sum(floor.values()),
        floor_ms=round(floor_ms, 3),
        engine_over_floor=round(statistics.median(times["engine"]) / floor_ms, 2),
    )


def _bare_fbgemm(shape: ClickShape) -> Tbe:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        BoundsCheckMode,
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    make: Any = SplitTableBatchedEmbeddingBagsCodegen
    spec = (shape.table_rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
    return make(
        [spec] * shape.num_tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RULE.lr,
        eps=RULE.eps,
        bounds_check_mode=BoundsCheckMode.NONE,
    )


def _plain_torch(shape: ClickShape) -> tuple[list[nn.EmbeddingBag], torch.optim.Optimizer]:
    """Return the bags and the optimizer of a plain torch job: SGD, the cheapest sparse optimizer of
    ``torch.optim`` because it has no state.
    """
    bags = [
        nn.EmbeddingBag(shape.table_rows, shape.dim, mode="sum", sparse=True) for _ in shape.names
    ]
    return bags, torch.optim.SGD([bag.weight for bag in bags], lr=RULE.lr)


def vocabulary(results: Results, repeats: int, largest: int) -> None:
    """Time one table with 26 features and a wide table with the same number of rows; the ids follow
    Zipf's law with exponent 1.2 over all rows.

    All sizes are in memory at the same time and run alternately, eight steps per turn, so that
    machine drift affects all of them equally.
    """
    sizes = [3_200_000]
    while 2 * sizes[-1] <= largest:
        sizes.append(2 * sizes[-1])
    with World.start("cpu") as world:
        grown = [_Grown(world, rows) for rows in sizes]
        for one in grown:
            one.time_round()
        times = {engine.rows: list[float]() for engine in grown}
        for repeat in range(repeats):
            for one in random.Random(repeat).sample(grown, len(grown)):
                times[one.rows].append(one.time_round())
    first_ms = statistics.median(times[sizes[0]])
    for one in grown:
        found = sorted(times[one.rows])
        ms = statistics.median(found)
        results.add(
            benchmark="engine_vocabulary",
            rows=one.rows,
            step_ms=round(ms, 2),
            spread_ms=[round(found[repeats // 10], 2), round(found[-1 - repeats // 10], 2)],
            over_first=round(ms / first_ms, 3),
            unique_rows=one.unique_rows,
            bytes_per_row=round(one.collection.memory_bytes() / one.rows, 3),
            resident_bytes_per_row=round(one.resident_bytes / one.rows, 1),
            formula_bytes_per_row=4 * (16 + 1) + 4 * 2,
        )


class _Grown:
    """Runs the engine on tables of ``rows`` rows, with eight batches of ids."""

    def __init__(self, world: World, rows: int) -> None:
        self.rows, self._batch = rows, 4096
        names = tuple(f"C{n + 1}" for n in range(26))
        tables = [
            TableConfig(name=name, features=names, num_rows=rows, dim=dim)
            for name, dim in (("deep", 16), ("wide", 1))
        ]
        layout = TableLayout(
            layout=Layout(Placement.line("cpu", 1), (Broadcast(),)), exchange="local"
        )
        features = [FeatureConfig(name=name) for name in names]
        before = status_bytes("VmRSS")
        layouts = {table.name: layout for table in tables}
        self.collection = collect(world, (tables, features), layouts, self._batch)
        self.resident_bytes = status_bytes("VmRSS") - before
        self._batches = [_whole_table_ids(rows, self._batch, seed) for seed in range(8)]
        self.unique_rows = len(self._batches[0].unique())
        self._grad = torch.randn(self._batch, 26 * 17) * 1e-3

    def time_round(self) -> float:
        """Return the ms per step over the eight batches."""
        start = time.perf_counter()
        for ids in self._batches:
            engine_step(self.collection, ids, self._batch, self._grad)
        return 1e3 * (time.perf_counter() - start) / len(self._batches)


def _whole_table_ids(rows: int, batch: int, seed: int) -> Tensor:
    """Return ids that follow Zipf's law with exponent 1.2, computed by inverting the continuous
    law. The ids are then spread over the table by a multiplication, which permutes them, because
    the multiplier is a prime that does not divide the number of rows.
    """
    random = np.random.default_rng(seed).random((batch, 26))
    exponent = -0.2
    top = float(rows + 1) ** exponent
    rank = ((1.0 - random * (1.0 - top)) ** (1.0 / exponent)).astype(np.int64) - 1
    ids = (np.minimum(rank, rows - 1) * 2_654_435_761 + 12345) % rows
    return torch.from_numpy(ids.astype(np.int32))


def rows(results: Results, repeats: int) -> None:
    """Time the torch kernel on tables of two sizes. The kernel reads only a batch's rows, so a
    larger table costs nothing but additional cache misses.
    """
    jobs: dict[str, Callable[[], object]] = {}
    generator = torch.Generator().manual_seed(0)
    for size in (100_000, 10_000_000):
        storage = TorchStorage(
            size, 16, dim=16, optimizer=RULE, dtype=torch.float32, device=torch.device("cpu")
        )
        addresses = torch.randperm(size, generator=generator)[:16384]
        grads = torch.randn(16384, 16, generator=generator)

        def step(
            storage: TorchStorage = storage, addresses: Tensor = addresses, grads: Tensor = grads
        ) -> None:
            lookup = Lookup(addresses)
            storage.lookup(lookup)
            storage.update(lookup, grads, 0.05, STEP)

        jobs[f"{size:,} rows"] = step
    times = turns(jobs, repeats)
    for name, values in times.items():
        results.add(
            benchmark="engine_rows", table=name, step_ms=round(statistics.median(values), 3)
        )
    results.add(benchmark="engine_rows_ratio", large_over_small=ratio(times, *reversed(list(jobs))))


def many_tables(num_tables: int) -> Shape:
    """Return tables and features like those of EMBark's T510 with 5.2 ids per sample, with dims
    scaled by 1/8 and rows by 1/1000.
    """
    random = np.random.default_rng(510)
    dims = random.choice([4, 8, 16, 32], num_tables)
    sizes = np.exp(random.normal(5.8, 1.8, num_tables)).astype(int) + 2
    hotness = np.clip(random.geometric(1 / 5.2, num_tables), 1, 40)
    return tables_of(sizes, dims, hotness)


def tables_worker(num_tables: int, steps: int) -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    batch = 1024
    with World.start("cpu") as world:
        tables, features = many_tables(num_tables)
        whole = Placement.line("cpu", world.size)
        layouts: dict[str, TableLayout] = {}
        order = sorted(tables, key=lambda t: -t.num_rows * t.dim)
        for n, table in enumerate(order):
            kind: str = "columns"
            layout = Layout(Placement.of("cpu", (n % world.size,)), (Broadcast(),))
            if n < num_tables // 10:
                kind, layout = "reduce", Layout(whole, (Split(0),))
            elif n > num_tables // 2:
                kind, layout = "local", Layout(whole, (Broadcast(),))
            layouts[table.name] = TableLayout(layout=layout, exchange=kind)
        collection = collect(world, (tables, features), layouts, batch)
        generator = torch.Generator().manual_seed(world.rank)
        columns = [
            (
                torch.rand(batch // world.size, f.hotness, generator=generator) ** 3 * t.num_rows
            ).int()
            for t, f in zip(tables, features, strict=True)
        ]
        ids = torch.cat(columns, 1)
        width = collection.plan.outputs[0].width
        grad = torch.randn(batch // world.size, width, generator=generator) * 1e-3
        engine_step(collection, ids, batch, grad)
        world.barrier()
        start_up = time.perf_counter() - started
        times: list[float] = []
        for _ in range(steps):
            start = time.perf_counter()
            engine_step(collection, ids, batch, grad)
            times.append(1e3 * (time.perf_counter() - start))
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(5):
            engine_step(collection, ids, batch, grad)
        profile.disable()
        if world.rank == 0:
            text = io.StringIO()
            stats = pstats.Stats(profile, stream=text)
            stats.sort_stats("ncalls").print_stats(12)
            results = Results("engine_tables")
            calls = sum(entry.callcount for entry in profile.getstats())
            results.add(
                benchmark="engine_tables",
                tables=num_tables,
                ranks=world.size,
                groups=len(collection.plan.groups),
                stacks=sum(len(group.stacks) for group in collection.plan.groups),
                start_up_s=round(start_up, 2),
                step_ms=round(statistics.median(times), 2),
                python_calls_per_step=calls // 5,
                python_calls_per_table=round(calls / 5 / num_tables, 2),
            )
            print(text.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["kernel", "vocabulary", "tables", "rows"])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--largest", type=int, default=102_400_000)
    parser.add_argument("--tables", type=int, default=510)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    if args.worker:
        tables_worker(args.tables, 10)
        return
    torch.set_num_threads(1)
    if args.what == "tables":
        words = ["tables", "--tables", str(args.tables)]
        start_ranks("benchmarks.engine", args.ranks, words, link=None)
        return
    results = Results(f"engine_{args.what}")
    if args.what == "kernel":
        kernel(results, args.repeats)
    elif args.what == "vocabulary":
        vocabulary(results, args.repeats, args.largest)
    else:
        rows(results, args.repeats)


if __name__ == "__main__":
    main()

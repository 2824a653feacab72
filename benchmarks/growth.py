"""Measures growing tables: the key map, a batch's admissions and evictions, and whole training
steps.

    python -m benchmarks.growth map [--keys N]
    python -m benchmarks.growth decisions
    python -m benchmarks.growth evictions
    python -m benchmarks.growth steps
    python -m benchmarks.growth deltas [--keys 1000000]

``decisions`` and ``steps`` use 26 fields at batch 16,384, with ids as skewed as Criteo's. The keys
of large fields drift, so keys are admitted, evicted, and forgotten in every step. ``decisions``
also measures the time after the largest tables are full, and how much of the time it takes to
transpose the keys and the rows. ``evictions`` announces only new keys to one full field, so every
key is admitted and evicts another. ``steps`` trains a Wide & Deep model on fitted ids and on keys,
alternately. ``deltas`` saves tables of dims 16 and 1 for one field, with LazyAdam. Between saves,
5% of the keys are trained; a tenth of these are new.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from torch import nn

from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.exchange.key_exchange import KeyExchange
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, plan_embeddings
from sbpflow.embedding.plan.growth import NUM_BUCKETS, TOTALS, Eviction, Growth
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.vocabulary import counting_loops, requests, undo_loops
from sbpflow.embedding.vocabulary.vocabulary import Vocabulary
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.compute.malloc import keep_freed_memory
from sbpflow.runtime.random.streams import mix
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split

BATCH = 16_384
MAP_SIZES = 10**7, 10**8
FULL_SIZES = 2**18, 2**22, 2**24
NO_COUNTS = np.empty(0, np.int64)
# The number of distinct values in each of Criteo's 26 categorical fields; the five largest are
# reduced to 400,000.
SIZES = (
    1460, 583, 400_000, 400_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 400_000, 3194, 27, 14_992,
    400_000, 10, 5652, 2173, 4, 400_000, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
MAX_ROWS = 2**18
WINDOW = 3_000
SKEW = 3.0  # an id is size * u^SKEW for uniform u


def measure(work: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def batches(count: int, *, drift: bool) -> Iterator[np.ndarray]:
    """Yield ids ([batch, fields]).

    With ``drift``, a fifth of the ids in the ten large fields come from a moving window of new ids.
    Such a batch contains 0.8 new ids per sample; the first batches contain more.
    """
    random = np.random.default_rng(5)
    sizes = np.array(SIZES)
    for step in range(count):
        ids = (random.random((BATCH, sizes.size)) ** SKEW * sizes).astype(np.int64)
        if drift:
            new = sizes + step * WINDOW // 2 + random.integers(0, WINDOW, ids.shape)
            is_new = (random.random(ids.shape) < 0.2) & (sizes > 10_000)
            ids = np.where(is_new, new, ids)
        yield ids


def measure_map(num_keys: int, results: Results) -> None:
    growth = Growth(evict=Eviction(max_rows=num_keys * 5 // 4))
    random = np.random.default_rng(1)
    keys = random.integers(-(2**63), 2**63 - 1, num_keys)
    addresses, zeros = np.empty_like(keys), np.zeros(num_keys, np.int32)
    counting_loops.addresses_of(keys, addresses)

    def new() -> Vocabulary:
        return Vocabulary(growth, growth.evict.max_rows, 0, NUM_BUCKETS)

    small = new()  # compiles the loops
    small.announce(keys[:10], NO_COUNTS, 1)
    undo_loops.load_rows(new().arrays, addresses[:10], zeros, zeros)
    part = new()
    part.reserve(num_keys)
    insert_s = measure(lambda: undo_loops.load_rows(part.arrays, addresses, zeros, zeros))
    order = random.permutation(num_keys)[: 4 * 10**6]
    # Filling the array maps its memory pages before timing.
    found, out = keys[order], np.full(order.size, -1)
    hit_s = measure(lambda: counting_loops.find_all(part.arrays, found, out, None))
    if not (out == order + 1).all():
        raise RuntimeError("the map returned wrong rows")
    part, longest = new(), 0.0
    start = time.process_time()
    for first in range(0, num_keys, BATCH):
        begin = time.perf_counter()
        part.announce(keys[first : first + BATCH], NO_COUNTS, BATCH)
        longest = max(longest, time.perf_counter() - begin)
        part.release()
    admit_s = time.process_time() - start
    results.add(
        keys=num_keys,
        inserts_m_per_s=round(num_keys / insert_s / 1e6, 2),
        hits_m_per_s=round(order.size / hit_s / 1e6, 2),
        admissions_m_per_s=round(num_keys / admit_s / 1e6, 2),
        longest_batch_ms=round(longest * 1e3, 1),
        bytes_per_key=round(part.num_bytes / num_keys, 2),
    )


def make_plan(*, grows: bool) -> EmbeddingPlan:
    growth = Growth(
        evict=Eviction(max_rows=MAX_ROWS, idle_samples=20 * BATCH),
        admit_count=3,
        forget_after_samples=10 * BATCH,
    )

    def tables(kind: str, dim: int) -> tuple[TableConfig, ...]:
        return tuple(
            TableConfig(
                name=f"{kind}.C{n}",
                features=(f"C{n}",),
                num_rows=MAX_ROWS if grows else size,
                dim=dim,
                growth=growth if grows else None,
            )
            for n, size in enumerate(SIZES)
        )

    outputs = [
        OutputConfig(name="deep", tables=tables("deep", 16)),
        OutputConfig(name="wide", tables=tables("wide", 1), combine="sum"),
    ]
    features = [FeatureConfig(name=f"C{n}") for n in range(len(SIZES))]
    return plan_of(outputs, features, sparse_optimizer("rowwise_adagrad", lr=0.05))


def plan_of(
    outputs: Sequence[OutputConfig], features: Sequence[FeatureConfig], optimizer: SparseOptimizer
) -> EmbeddingPlan:
    """Return the plan in which all tables are S(0) on one rank."""
    world = Placement.line("cpu", 1)
    layout = TableLayout(layout=Layout(world, (Split(0),)), exchange="reduce")
    return plan_embeddings(
        outputs,
        {table.name: layout for output in outputs for table in output.tables},
        features=features,
        optimizer=optimizer,
        dtype=torch.float32,
        world=world,
        backend="gloo",
        batch_size=BATCH,
    )


def measure_decisions(world: World, results: Results) -> None:
    exchange = KeyExchange(make_plan(grows=True), Boxing(world), [])
    times, transposing = list[float](), list[float]()
    columns = requests.empty_columns(len(SIZES), BATCH)
    for ids in batches(160, drift=True):
        keys = BatchIds(mix(torch.from_numpy(ids)), None)
        times.append(measure(lambda keys=keys: exchange.rows_of(keys, BATCH, True, True)))
        exchange.release()
        transposing.append(measure(lambda ids=ids: requests.write_columns(ids, columns)))
        transposing[-1] += measure(lambda ids=ids: requests.read_columns(columns, ids))
    lookups = BATCH * len(SIZES)
    early, full = times[20:60], times[120:]
    totals = exchange.totals().sum((0, 1)).tolist()
    results.add(
        ns_per_lookup=round(statistics.median(early) / lookups * 1e9, 2),
        ns_per_lookup_in_full_tables=round(statistics.median(full) / lookups * 1e9, 2),
        transposing_ns_per_lookup=round(statistics.median(transposing[20:]) / lookups * 1e9, 2),
        longest_ms=round(max(times[20:]) * 1e3, 2),
        median_ms=round(statistics.median(early) * 1e3, 2),
        totals=dict(zip(TOTALS, totals, strict=True)),
    )


def measure_evictions(results: Results) -> None:
    for policy in ("lru", "lfu"):
        for num_rows in FULL_SIZES:
            growth = Growth(evict=Eviction(max_rows=num_rows, policy=policy))
            part = Vocabulary(growth, num_rows, 0, NUM_BUCKETS)
            part.reserve(num_rows * 6 // 5)
            random = np.random.default_rng(1)

            def announce(count: int, part: Vocabulary = part, random: Generator = random) -> float:
                keys = random.integers(-(2**63), 2**63 - 1, count)
                seconds = measure(lambda: part.announce(keys, NO_COUNTS, BATCH))
                part.release()
                return seconds

            for _ in range(0, num_rows * 9 // 8, 4 * BATCH):
                announce(4 * BATCH)
            before = part.totals.evicted
            times = [announce(BATCH) for _ in range(60)]
            results.add(
                policy=policy,
                rows=num_rows,
                ns_per_key=round(statistics.median(times) / BATCH * 1e9),
                evicted=round((part.totals.evicted - before) / (len(times) * BATCH), 3),
            )


def measure_deltas(world: World, num_keys: int, results: Results) -> None:
    """Save one full checkpoint and four deltas; measure the time to save and to read each."""
    growth = Growth(evict=Eviction(max_rows=num_keys * 5 // 4))
    outputs = [
        OutputConfig(
            name=name,
            tables=(
                TableConfig(
                    name=f"{name}.f",
                    features=("f",),
                    num_rows=growth.evict.max_rows,
                    dim=dim,
                    growth=growth,
                ),
            ),
        )
        for name, dim in (("deep", 16), ("wide", 1))
    ]
    plan = plan_of(outputs, [FeatureConfig(name="f")], sparse_optimizer("lazy_adam", lr=0.01))
    boxing = Boxing(world)
    tables = EmbeddingCollection(plan, boxing, seed=1)
    random = np.random.default_rng(3)
    step, new, changed = 0, num_keys, num_keys // 20

    def train(keys: np.ndarray) -> None:
        nonlocal step
        for first in range(0, keys.size, BATCH):
            step += 1
            ids = mix(torch.from_numpy(keys[first : first + BATCH]).unsqueeze(1))
            outputs = tables.forward(ids, len(ids), training=True)
            torch.stack([value.sum() for value in outputs.values()]).sum().backward()
            tables.apply_gradients(step)

    train(np.arange(num_keys))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saver = Saver(
            folder,
            boxing,
            tables.state,
            run="r",
            deadline_s=600.0,
            stores=tables.stores,
            num_deltas=4,
        )
        for number in range(5):
            begin = time.perf_counter()
            path = saver.save(step, {})
            save_s = time.perf_counter() - begin
            saved = open_checkpoint(path)
            begin = time.perf_counter()
            rows = saved.tensor("tables/deep.f")
            results.add(
                delta=number,
                keys=len(rows) - 1,
                mb=round(saved.num_bytes / 1e6, 2),
                save_s=round(save_s, 3),
                read_s=round(time.perf_counter() - begin, 3),
            )
            old = random.choice(new, changed * 9 // 10, replace=False)
            train(np.concatenate([old, np.arange(new, new + changed // 10)]))
            new += changed // 10


class Trained:
    """A model and its tables, trained in one process."""

    def __init__(self, world: World, *, grows: bool) -> None:
        self.tables = EmbeddingCollection(make_plan(grows=grows), Boxing(world), seed=1)
        self.dense = nn.Sequential(
            nn.Linear(16 * len(SIZES), 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 1),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.dense.parameters(), lr=1e-3, foreach=True)
        self.grows, self.step = grows, 0

    def train(self, ids: np.ndarray) -> float:
        """Train one step and return the seconds."""
        self.step += 1
        given = torch.from_numpy(ids)
        given = mix(given) if self.grows else given.to(torch.int32)
        labels = (given[:, 0] & 1).to(torch.float32).unsqueeze(1)
        start = time.perf_counter()
        outputs = self.tables.forward(given, BATCH, training=True)
        logits = self.dense(outputs["deep"]) + outputs["wide"]
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        self.tables.apply_gradients(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def measure_steps(world: World, results: Results) -> None:
    fitted, growing = Trained(world, grows=False), Trained(world, grows=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    pairs = zip(batches(50, drift=False), batches(50, drift=True), strict=True)
    for ids, drifting in pairs:
        times[False].append(fitted.train(ids))
        times[True].append(growing.train(drifting))
    medians = {grows: statistics.median(values[15:]) for grows, values in times.items()}
    results.add(
        fitted_ms=round(medians[False] * 1e3, 2),
        growing_ms=round(medians[True] * 1e3, 2),
        ratio=round(medians[True] / medians[False], 4),
        longest_over_median=round(max(times[True][15:]) / medians[True], 3),
        longest_over_median_fitted=round(max(times[False][15:]) / medians[False], 3),
    )


def main() -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=["map", "decisions", "evictions", "steps", "deltas"])
    parser.add_argument("--keys", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does
    num_keys = arguments.keys or 10**6
    results = Results("growth", arguments.benchmark, recorded=arguments.keys is None)
    if arguments.benchmark == "map":
        for size in [arguments.keys] if arguments.keys else MAP_SIZES:
            measure_map(size, results)
        return
    if arguments.benchmark == "evictions":
        measure_evictions(results)
        return
    with World.start("cpu") as world:
        if arguments.benchmark == "deltas":
            measure_deltas(world, num_keys, results)
            return
        work = measure_decisions if arguments.benchmark == "decisions" else measure_steps
        work(world, results)


if __name__ == "__main__":
    main()

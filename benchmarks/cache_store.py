"""Measures training on storage with a limited rate: fetching on demand, LRU, and lookahead.

All systems must compute the same losses. ``evaluation`` compares evaluations with and without
reading the rows of the next batch in advance. ``cpu`` compares CPU times with those of training
without a cache. Computation is slower after a pause, so in this comparison a run without a cache
also pauses, in every step, for as long as lookahead waits for rows. The rows are in a mapped file.
``PacedRecords`` adds the time that a full-duplex link would take; reads and writes do not slow each
other down. Paced threads sleep, so their waits are exact even on a busy machine; step times are
not.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cache_paced import MBIT, DemandStore, PacedRecords
from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config, DataConfig, OptimizerConfig
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.read.loaders import open_loaders
from sbpflow.embedding.cache.records import RecordLayout, RecordStore, file_records
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.embedding.storage.store import RowStore, StoreRequest, device_store
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.compute.malloc import keep_freed_memory
from sbpflow.runtime.ranks.world import World

PARTS = ("systems", "rates", "capacities", "lookaheads", "cpu", "evaluation")
BATCH, CAPACITY, LOOKAHEAD = 1024, 22_000, 64
WARM_UP, MEASURED = 25, 40
EVALUATED = 40  # batches
CPU_ROUNDS = 7  # per rate
CPU_RATES = (100.0, 400.0)  # Mbit/s; training waits for rows only at the first rate
UNDISTURBED = 1.03  # maximum ratio of a step's time, excluding waits, to its CPU time
Array = np.ndarray[Any, Any]
Batches = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the deep tables are stored; ``system`` is device, uncached, LRU, or lookahead."""

    system: str
    pause_ms: float = 0.0  # after each step
    rate: float = 100.0  # Mbit/s
    capacity: int = CAPACITY
    lookahead: int = LOOKAHEAD
    buffered: bool = True
    duplex: bool = True


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Means over the measured steps, and the ``losses`` of all steps."""

    losses: list[float] = field(repr=False)
    step_ms: float
    cpu_ms: float  # of the process
    training_cpu_ms: float  # the training thread's part of ``cpu_ms``
    mover_cpu_ms: float  # the row-moving threads' part of ``cpu_ms``
    wait_ms: float
    fetched: float
    read_ms: float  # how long the link is busy per step
    write_ms: float


RecordsOf = Callable[[int, RecordLayout], RecordStore]


class Stores:
    """Creates the stores of a setup; ``own`` creates records without simulated delays."""

    def __init__(self, setup: Setup, folder: Path, own: RecordsOf | None = None) -> None:
        self._setup, self._folder, self._own = setup, folder, own
        self.made: list[CachedStore | DemandStore] = []
        self.links: list[PacedRecords] = []

    def __call__(self, request: StoreRequest) -> RowStore:
        setup = self._setup
        deep = bool(request.shards) and request.shards[0].table.name.startswith("deep.")
        if setup.system == "device" or not deep:
            return device_store(request)

        def records(num_rows: int, layout: RecordLayout) -> RecordStore:
            if self._own is not None:
                return self._own(num_rows, layout)
            return file_records(num_rows, layout, self._folder, "benchmark")

        store: CachedStore | DemandStore
        slots = min(setup.capacity, request.num_rows)
        if setup.system == "lookahead":
            store = CachedStore(
                request, lambda num, layout: self._paced(records(num, layout), layout), slots
            )
        else:
            keeps = setup.system == "LRU"
            store = DemandStore(request, records, self._paced, slots, keeps=keeps)
        self.made.append(store)
        return store

    def _paced(self, inner: RecordStore, layout: RecordLayout) -> RecordStore:
        setup = self._setup
        if self._own is not None:
            return inner
        link = PacedRecords(
            inner, layout.num_bytes, setup.rate * MBIT, duplex=setup.duplex, buffered=setup.buffered
        )
        self.links.append(link)
        return link

    def figures(self) -> tuple[float, float, float, float]:
        """Return the totals so far: the ms that training waited, the fetched rows, and the ms that
        the link was busy in each direction.
        """
        waits = sum(s.counts.wait_s if isinstance(s, CachedStore) else s.wait_s for s in self.made)
        fetched = sum(
            s.counts.fetched if isinstance(s, CachedStore) else s.fetched for s in self.made
        )
        read, write = (sum(link.busy_s[d] for link in self.links) for d in ("read", "write"))
        return 1e3 * waits, fetched, 1e3 * read, 1e3 * write


def make_job(
    world: World, fields: Fields, setup: Setup, folder: Path, own: RecordsOf | None = None
) -> tuple[Job, Stores]:
    """Create a Wide & Deep job with 16 columns and lazy Adam: 192 bytes per row of the deep
    tables.
    """
    config = Config(
        data=DataConfig(batch_size=BATCH, tail="drop"),
        model=WdlConfig(
            embedding_dim=16, hidden=(400, 400), dropout=0.2, wide=WideConfig(crosses=())
        ),
        parallel=ParallelConfig(device="cpu", scheme="3"),
        optimizer=OptimizerConfig(sparse=LazyAdam(lr=1e-3)),
    )
    lookahead = 1 if setup.system == "device" else setup.lookahead
    config = replace(config, train=replace(config.train, lookahead=lookahead))
    spec, plan = plan_run(config, fields, world_size=world.size, device_type="cpu")
    stores = Stores(setup, folder, own)
    return build_job(config, spec, plan, Boxing(world), stores=stores), stores


def train(
    job: Job, stores: Stores, batches: Batches, warm_up: int, measured: int, pause_ms: float = 0.0
) -> Measured:
    """Train and measure; the first ``warm_up`` steps fill the cache."""
    losses: list[float] = []
    times: list[float] = []
    begin, cpu, before = 0.0, _cpu_s(), stores.figures()
    for step, loss in enumerate(job.trainer.train_on(iter(batches)), 1):
        losses.append(float(loss))
        time.sleep(pause_ms / 1e3)
        now = time.perf_counter()
        times.append(now - begin)
        begin = now
        if step == warm_up:
            cpu, before = _cpu_s(), stores.figures()
        if step == warm_up + measured:
            break
    process, training, mover = (
        1e3 * (b - a) / measured for a, b in zip(cpu, _cpu_s(), strict=True)
    )
    after = stores.figures()
    job.trainer.drain()
    wait, fetched, read, write = ((b - a) / measured for a, b in zip(before, after, strict=True))
    return Measured(
        losses=losses,
        step_ms=1e3 * statistics.mean(times[warm_up:]),
        cpu_ms=process,
        training_cpu_ms=training,
        mover_cpu_ms=mover,
        wait_ms=wait,
        fetched=fetched,
        read_ms=read,
        write_ms=write,
    )


def _cpu_s() -> tuple[float, float, float]:
    """Return the CPU time of the process, of this thread, and of the threads that move rows."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name == "row mover"]
    clocks = [time.pthread_getcpuclockid(ident) for ident in threads if ident is not None]
    return time.process_time(), time.thread_time(), sum(map(time.clock_gettime, clocks))


def run(world: World, folder: Path, batches: Batches, fields: Fields, setup: Setup) -> Measured:
    """Build a job for this setup and train it."""
    job, stores = make_job(world, fields, setup, folder)
    return train(job, stores, batches, WARM_UP, MEASURED, setup.pause_ms)


def genuine_batches(folder: Path, world: World) -> tuple[list[Any], Fields]:
    """Return as many batches of real rows as the longest lookahead needs, and their columns."""
    manifest = load_manifest(folder)
    config = DataConfig(batch_size=BATCH, tail="drop", loader="memmap")
    loaders = open_loaders(manifest, config, world.rank, world.size, seed=1, device=world.device)
    needed = WARM_UP + MEASURED + LOOKAHEAD + 1
    batches: list[Any] = []
    for epoch in range(3):
        batches += list(loaders["train"].epoch(epoch))
    if len(batches) < needed:
        raise SystemExit(
            f"{folder}: 3 epochs have {len(batches)} batches, but the longest lookahead needs "
            f"{needed}"
        )
    return batches[:needed], fields_of(manifest)


def train_generated(folder: Path, steps: int) -> list[float]:
    """Return the losses of a few steps on generated rows with a cached store."""
    generator = torch.Generator().manual_seed(1)
    fields = Fields.of(("I1",), {f"C{n}": 5000 for n in range(4)})

    class Rows:
        def __init__(self) -> None:
            self.ids = (torch.rand(BATCH, 4, generator=generator) ** 3 * 5000).int()
            self.dense = torch.randn(BATCH, 1, generator=generator)
            self.labels = (torch.rand(BATCH, generator=generator) < 0.3).float()
            self.batch_size = BATCH

    setup = Setup(system="lookahead", rate=1e6, capacity=6000, lookahead=4)
    with World.start("cpu") as world:
        job, stores = make_job(world, fields, setup, folder)
        batches = [Rows() for _ in range(steps)]
        return train(job, stores, batches, 1, steps - 1).losses


def _setups(part: str) -> list[Setup]:
    ours, lru = Setup(system="lookahead"), Setup(system="LRU")
    uncached = Setup(system="uncached", capacity=12_000)
    if part == "systems":
        return [
            replace(uncached, buffered=False), uncached, lru, ours,
            replace(lru, duplex=False), replace(ours, duplex=False),
        ]  # fmt: skip
    if part == "rates":
        pair = (lru, ours)
        return [replace(one, rate=rate) for rate in (50, 200, 400, 1000, 10_000) for one in pair]
    if part == "capacities":
        sizes = (12_000, 16_000, 45_000, 90_000)
        return [replace(one, capacity=size) for size in sizes for one in (lru, ours)]
    return [lru, *(replace(ours, lookahead=known) for known in (2, 4, 8, 16, 32))]


def _measure_evaluation(
    results: Results, world: World, folder: Path, batches: Batches, fields: Fields
) -> None:
    """Measure the time per batch of evaluations after training; raise SystemExit if any logit
    differs.
    """
    compute_ms, logits = 0.0, list[Tensor]()
    setups = [Setup(system="lookahead", rate=rate) for rate in (50, 100, 200, 400, 1000)]
    for setup in (Setup(system="device"), *setups):
        job, stores = make_job(world, fields, setup, folder)
        train(job, stores, batches, WARM_UP, MEASURED)
        times: dict[str, float] = {}
        for name in ("one_by_one", "pipelined"):
            for _ in job.trainer.predict_all(batches[:3]):
                pass
            before, begin = stores.figures(), time.perf_counter()
            given = batches[:EVALUATED]
            if name == "pipelined":
                found = [logits for _, logits in job.trainer.predict_all(given)]
            else:
                found = [job.trainer.predict(batch) for batch in given]
            times[f"{name}_ms"] = 1e3 * (time.perf_counter() - begin) / EVALUATED
            read_ms = (stores.figures()[2] - before[2]) / EVALUATED
            logits = logits or found
            if not all(map(torch.equal, logits, found)):
                raise SystemExit(f"{setup}: logits differ from those with all rows on the device")
        if setup.system == "device":
            compute_ms = times["pipelined_ms"]
            results.add(system="device", batches=EVALUATED, **times)
            continue
        results.add(
            system=setup.system, mbit_per_s=setup.rate, capacity=setup.capacity,
            batches=EVALUATED, logits_equal=True, compute_ms=compute_ms, read_ms=read_ms,
            times_ideal=times["pipelined_ms"] / max(compute_ms, read_ms), **times,
        )  # fmt: skip


def _measure_cpu(
    results: Results, world: World, folder: Path, batches: Batches, fields: Fields
) -> None:
    """Measure the CPU times of alternating runs; raise SystemExit if any loss differs."""
    losses: list[float] = []
    number = 0
    while number < len(CPU_RATES) * CPU_ROUNDS:
        rate = CPU_RATES[number % len(CPU_RATES)]
        wait_ms, runs = 0.0, list[dict[str, object]]()
        for name in ("device", "lookahead", "paused"):
            paused = Setup(system="device", pause_ms=wait_ms)
            setup = paused if name == "paused" else Setup(system=name, rate=rate)
            found = run(world, folder, batches, fields, setup)
            losses, wait_ms = losses or found.losses, found.wait_ms
            if found.losses != losses:
                raise SystemExit(f"{setup}: losses differ from those with all rows on the device")
            runs.append(
                dict(
                    system=name, mbit_per_s=rate, round=number,
                    step_ms=found.step_ms, pause_ms=setup.pause_ms,
                    exposed_wait_ms=found.wait_ms, cpu_ms=found.cpu_ms,
                    training_cpu_ms=found.training_cpu_ms, mover_cpu_ms=found.mover_cpu_ms,
                )
            )  # fmt: skip
            own_ms = found.step_ms - found.wait_ms - setup.pause_ms
            if own_ms > UNDISTURBED * found.training_cpu_ms:
                print(
                    f"round {number} again: a step took {own_ms:.1f} ms without waits, but only "
                    f"{found.training_cpu_ms:.1f} ms of CPU time"
                )
                time.sleep(2)
                break
        else:
            number += 1
            for one in runs:
                results.add(**one)


def _measure_training(
    results: Results, world: World, folder: Path, batches: Batches, fields: Fields, part: str
) -> None:
    """Measure the step times of a part's setups; raise SystemExit if any loss differs."""
    device = run(world, folder, batches, fields, Setup(system="device"))
    results.add(system="device", step_ms=device.step_ms, cpu_ms=device.cpu_ms)
    serial: Measured | None = None
    for setup in _setups(part):
        found = run(world, folder, batches, fields, setup)
        if found.losses != device.losses:
            raise SystemExit(f"{setup}: losses differ from those with all rows on the device")
        if setup.system == "uncached" and not setup.buffered:
            serial = found
        busy = (found.read_ms, found.write_ms)
        link_ms = max(busy) if setup.duplex else sum(busy)
        ideal: dict[str, float] = {}
        if serial is not None and setup.system == "lookahead":
            sync_ms = serial.read_ms + serial.write_ms
            ideal["times_faster"] = serial.step_ms / found.step_ms
            ideal["ideal"] = (device.step_ms + sync_ms) / max(device.step_ms, link_ms)
        results.add(
            system=setup.system, mbit_per_s=setup.rate, capacity=setup.capacity,
            lookahead=setup.lookahead if setup.system == "lookahead" else None,
            full_duplex=setup.duplex, writes_buffered=setup.buffered,
            losses_equal=len(found.losses), step_ms=found.step_ms, cpu_ms=found.cpu_ms,
            added_cpu_ms=found.cpu_ms - device.cpu_ms, mover_cpu_ms=found.mover_cpu_ms,
            exposed_wait_ms=found.wait_ms,
            exposed_share=found.wait_ms / found.step_ms, fetched_per_step=found.fetched,
            read_ms=found.read_ms, write_ms=found.write_ms, link_ms=link_ms, **ideal,
        )  # fmt: skip


def measure(results: Results, folder: Path, part: str) -> None:
    """Measure one part of the benchmark; raise SystemExit if caching changes any result."""
    keep_freed_memory()
    torch.set_num_threads(1)
    scratch = folder / f"rows-{os.getpid()}"
    with World.start("cpu") as world:
        batches, fields = genuine_batches(folder, world)
        if part == "evaluation":
            _measure_evaluation(results, world, scratch, batches, fields)
        elif part == "cpu":
            _measure_cpu(results, world, scratch, batches, fields)
        else:
            _measure_training(results, world, scratch, batches, fields, part)
    if scratch.exists():
        scratch.rmdir()

"""Measures training on storage with a limited rate: fetching on demand, LRU, and lookahead.


All systems must compute the same losses. ``evaluation`` compares evaluations with and without
reading the rows of the next batch in advance. ``cpu`` compares CPU times with those of training
without a cache, which also pauses in every step for as long as lookahead waits for rows: pauses
slow the computation after them.

The rows are in a file in memory. ``PacedRecords`` adds the time that a link would take. With full
duplex, reads and writes do not slow each other down. A paced thread sleeps, so the waits are exact
even on a busy machine, but step times are not.
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

from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config, DataConfig, OptimizerConfig
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.read.loaders import open_loaders
from sbpflow.embedding.cache.records import RecordLayout, RecordStore, file_records
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.embedding.storage.base import RowListener
from sbpflow.embedding.storage.store import WEIGHTS, RowStore, StoreRequest, device_store
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.compute.malloc import keep_freed_memory
from sbpflow.runtime.ranks.world import World

PARTS = ("systems", "rates", "capacities", "lookaheads", "cpu", "evaluation")
BATCH, CAPACITY, LOOKAHEAD = 1024, 22_000, 64
MBIT = 1e6 / 8  # bytes per second
WARM_UP, MEASURED = 25, 40
EVALUATED = 40  # batches
CPU_ROUNDS = 7
UNDISTURBED = 1.03  # time of a step without its waits, over its CPU time
Array = np.ndarray[Any, Any]
Batches = Sequence[Any]


class PacedRecords:
    """Simulates records that are accessed over a link: a call takes the time that its bytes need.

    If writes are ``buffered``, a write returns when the previous write is sent; otherwise a write
    returns when its own records are sent. Written records can be read at once.
    """

    def __init__(
        self, inner: RecordStore, record_bytes: int, rate: float, *, duplex: bool, buffered: bool
    ) -> None:
        self._inner, self._second_per_row = inner, record_bytes / rate
        self._buffered = buffered
        self._free = {"read": 0.0, "write": 0.0} if duplex else {"both": 0.0}
        self.busy_s = {"read": 0.0, "write": 0.0}

    @property
    def num_bytes(self) -> int:
        """Return the size of all records."""
        return self._inner.num_bytes

    def read(self, rows: Array, out: Array) -> None:
        """Wait for the time of the transfer, then read."""
        _, end = self._reserve("read", rows.size)
        self._inner.read(rows, out)
        _sleep_until(end)

    def write(self, rows: Array, records: Array) -> None:
        """Write, and wait for this transfer or for the previous transfer."""
        self._inner.write(rows, records)
        start, end = self._reserve("write", rows.size)
        _sleep_until(start if self._buffered else end)

    def _reserve(self, direction: str, num_rows: int) -> tuple[float, float]:
        link = direction if direction in self._free else "both"
        start = max(time.perf_counter(), self._free[link])
        end = start + num_rows * self._second_per_row
        self._free[link] = end
        self.busy_s[direction] += end - start
        return start, end


def _sleep_until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class DemandStore:
    """Fetches the rows of a batch when the batch is looked up, as a baseline.

    With ``keeps``, the least recently used rows are evicted; otherwise every row is written back
    after its batch. The records contain all initial values, as in a store that cannot compute
    initial values.
    """

    is_in_place = False
    starts_initial = True

    def __init__(
        self,
        request: StoreRequest,
        make_records: Callable[[int, RecordLayout], RecordStore],
        paced: Callable[[RecordStore, RecordLayout], RecordStore],
        num_slots: int,
        *,
        keeps: bool,
    ) -> None:
        self.kernel = request.make_kernel(num_slots)
        self.num_rows, self.width, self._num_slots = request.num_rows, request.width, num_slots
        tensors = {WEIGHTS: self.kernel.weights, **self.kernel.state}
        self._layout = RecordLayout({name: tensor[:0] for name, tensor in tensors.items()})
        self._words = {name: self._layout.words(t).numpy() for name, t in tensors.items()}
        inner = make_records(request.num_rows, self._layout)
        for start in range(0, request.num_rows, 1 << 16):
            rows = np.arange(start, min(start + (1 << 16), request.num_rows))
            records = self._layout.empty(rows.size)
            self._layout.pack(request.initial(torch.from_numpy(rows)), records)
            inner.write(rows, records)
        self._records, self._keeps = paced(inner, self._layout), keeps
        self._slot_of = np.full(request.num_rows + 1, -1, np.int64)
        self._slot_of[-1] = num_slots
        self._row_in = np.full(num_slots, -1, np.int64)
        self._last_use = np.full(num_slots, -1, np.int64)
        self._addresses: dict[int, Tensor] = {}
        self.fetched, self.wait_s = 0, 0.0

    @property
    def memory_bytes(self) -> int:
        """Return the size of the slots and the records."""
        return self._num_slots * self._layout.num_bytes + self._records.num_bytes

    @property
    def listeners(self) -> list[RowListener]:
        """Return the listeners of the kernel."""
        return self.kernel.listeners

    def announce(self, number: int, addresses: Tensor) -> None:
        """Store the addresses; nothing is fetched before the lookup."""
        self._addresses[number] = addresses

    def admit(self, number: int) -> Tensor:
        """Fetch the missing rows while training waits."""
        begin = time.perf_counter()
        addresses = self._addresses[number].numpy()
        rows = np.unique(addresses)
        rows = rows[rows < self.num_rows]
        held = self._slot_of[rows]
        missing = rows[held < 0]
        self._last_use[held[held >= 0]] = number
        slots = np.argpartition(self._last_use, missing.size)[: missing.size]
        self._write_back(slots[self._row_in[slots] >= 0])
        records = self._layout.empty(missing.size)
        self._records.read(missing, records)
        for name, words in self._words.items():
            words[slots] = records[:, self._layout.columns[name]]
        self._slot_of[missing], self._row_in[slots] = slots, missing
        self._last_use[slots] = number
        self.fetched += missing.size
        self.wait_s += time.perf_counter() - begin
        return torch.from_numpy(self._slot_of[addresses]).to(self._addresses[number].dtype)

    def release(self, number: int) -> None:
        """Write back the rows of the batch unless the rows are kept."""
        del self._addresses[number]
        if not self._keeps:
            begin = time.perf_counter()
            self._write_back(np.flatnonzero(self._row_in >= 0))
            self.wait_s += time.perf_counter() - begin

    def _write_back(self, slots: Array) -> None:
        if not slots.size:
            return
        records = self._layout.empty(slots.size)
        for name, words in self._words.items():
            records[:, self._layout.columns[name]] = words[slots]
        self._records.write(self._row_in[slots], records)
        self._slot_of[self._row_in[slots]] = -1
        self._row_in[slots], self._last_use[slots] = -1, -1


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Describes how the deep tables are stored; ``system`` is device, uncached, LRU, or
    lookahead.
    """

    system: str
    pause_ms: float = 0.0  # after each step
    rate: float = 100.0  # Mbit/s
    capacity: int = CAPACITY
    lookahead: int = LOOKAHEAD
    buffered: bool = True
    duplex: bool = True


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Contains medians and means of the measured steps, and the ``losses`` of all steps."""

    losses: list[float] = field(repr=False)
    step_ms: float
    cpu_ms: float  # of the process
    training_cpu_ms: float  # of this time, in the training thread
    mover_cpu_ms: float  # in the threads that move rows
    wait_ms: float
    fetched: float
    read_ms: float  # of the link, per step
    write_ms: float


class Stores:
    """Creates the stores of a setup."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._setup, self._folder = setup, folder
        self.made: list[CachedStore | DemandStore] = []
        self.links: list[PacedRecords] = []

    def __call__(self, request: StoreRequest) -> RowStore:
        setup = self._setup
        deep = bool(request.shards) and request.shards[0].table.name.startswith("deep.")
        if setup.system == "device" or not deep:
            return device_store(request)

        def records(num_rows: int, layout: RecordLayout) -> RecordStore:
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

    def _paced(self, inner: RecordStore, layout: RecordLayout) -> PacedRecords:
        setup = self._setup
        link = PacedRecords(
            inner, layout.num_bytes, setup.rate * MBIT, duplex=setup.duplex, buffered=setup.buffered
        )
        self.links.append(link)
        return link

    def figures(self) -> tuple[float, float, float, float]:
        """Return the totals so far: training waits in ms, fetched rows, and ms of the link in each
        direction.
        """
        waits = sum(s.counts.wait_s if isinstance(s, CachedStore) else s.wait_s for s in self.made)
        fetched = sum(
            s.counts.fetched if isinstance(s, CachedStore) else s.fetched for s in self.made
        )
        read, write = (sum(link.busy_s[d] for link in self.links) for d in ("read", "write"))
        return 1e3 * waits, fetched, 1e3 * read, 1e3 * write


def make_job(world: World, fields: Fields, setup: Setup, folder: Path) -> tuple[Job, Stores]:
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
    stores = Stores(setup, folder)
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
    """CPU time of the process, of this thread, and of the threads that move rows."""
    threads = [thread.ident for thread in threading.enumerate() if thread.name == "row mover"]
    clocks = [time.pthread_getcpuclockid(ident) for ident in threads if ident is not None]
    return time.process_time(), time.thread_time(), sum(map(time.clock_gettime, clocks))


def run(world: World, folder: Path, batches: Batches, fields: Fields, setup: Setup) -> Measured:
    """Train with a setup."""
    job, stores = make_job(world, fields, setup, folder)
    return train(job, stores, batches, WARM_UP, MEASURED, setup.pause_ms)


def genuine_batches(folder: Path, world: World) -> tuple[list[Any], Fields]:
    """Return the batches of genuine rows that the longest lookahead needs, and the columns of the
    batches.
    """
    manifest = load_manifest(folder)
    config = DataConfig(batch_size=BATCH, tail="drop", loader="memmap")
    loaders = open_loaders(manifest, config, world.rank, world.size, seed=1, device=world.device)
    needed = WARM_UP + MEASURED + LOOKAHEAD + 1
    batches: list[Any] = []
    for epoch in range(3):
        batches += list(loaders["train"].epoch(epoch))
    if len(batches) < needed:
        raise SystemExit(f"{folder}: {len(batches)} batches in 3 epochs, needs {needed}")
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
                raise SystemExit(f"{setup}: logits differ from the logits on the device")
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
    """CPU times of alternating runs; SystemExit if any loss differs."""
    losses: list[float] = []
    number = 0
    while number < CPU_ROUNDS:
        wait_ms, runs = 0.0, list[dict[str, object]]()
        for name in ("device", "lookahead", "paused"):
            paused = Setup(system="device", pause_ms=wait_ms)
            setup = paused if name == "paused" else Setup(system=name)
            found = run(world, folder, batches, fields, setup)
            losses, wait_ms = losses or found.losses, found.wait_ms
            if found.losses != losses:
                raise SystemExit(f"{setup}: losses differ from those on the device")
            runs.append(
                dict(
                    system=name, round=number, step_ms=found.step_ms, pause_ms=setup.pause_ms,
                    exposed_wait_ms=found.wait_ms, cpu_ms=found.cpu_ms,
                    training_cpu_ms=found.training_cpu_ms, mover_cpu_ms=found.mover_cpu_ms,
                )
            )  # fmt: skip
            own_ms = found.step_ms - found.wait_ms - setup.pause_ms
            if own_ms > UNDISTURBED * found.training_cpu_ms:
                print(f"round {number} again: other processes took {own_ms:.1f} ms per step")
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
            raise SystemExit(f"{setup}: losses differ from the losses on the device")
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
    """Measure a part; raise SystemExit if caching changes any result."""
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

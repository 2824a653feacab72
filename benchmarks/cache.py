"""Tables larger than memory: rows fetched, the cost of planning, a slow store, and a memory limit.

    python -m benchmarks.cache fetches --input train.txt.gz   rows fetched by several policies
    python -m benchmarks.cache planning                       CPU time of slot planning
    python -m benchmarks.cache paced --input train.txt.gz     a store behind 100 Mbit/s
    python -m benchmarks.cache limit --folder DISK            tables of 4 times a memory limit

``fetches`` also uses generated rows (Zipf 1.1). Without ``--input``, ``paced`` uses them alone, and
prints without recording. The paced store is in memory; reads and writes wait as they would for a
full-duplex link. The baselines keep all rows in memory and wait for the link to carry every row of
the batch in and out, so their losses are those of a run without a cache.
"""

import argparse
import csv
import gzip
import heapq
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config, DataConfig, OptimizerConfig, TrainConfig
from sbpflow.config.storage_rules import StorageRule
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.embedding.cache.records import MappedRecords, RecordLayout, host_records
from sbpflow.embedding.cache.slot_layout import Array
from sbpflow.embedding.cache.slot_planner import SlotPlanner
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.embedding.storage.store import (
    DeviceStore,
    RowStore,
    StoreFactory,
    StoreRequest,
    device_store,
)
from sbpflow.errors import ConfigError
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World

Ids = NDArray[np.int32]
COLUMNS, BATCH, DIM = 26, 1024, 16
KNOWN = 64
SLOTS, RATE = 22_000, 100e6 / 8  # bytes per second of the paced link
WARM, STEPS = 20, 60


@dataclass
class Batch:
    """A batch as the trainer takes it."""

    labels: torch.Tensor
    dense: torch.Tensor
    ids: torch.Tensor
    batch_size: int


@dataclass
class Rows:
    """Id matrices of whole batches, and the number of ids of each column."""

    name: str
    batches: list[Ids]
    sizes: list[int]
    labels: NDArray[np.float32]

    def unique(self) -> list[Ids]:
        """The rows of each batch, numbered over all columns."""
        bases = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int32)
        return [np.unique(ids + bases).astype(np.int32) for ids in self.batches]

    def batch(self, number: int) -> Batch:
        labels = self.labels[number * BATCH : (number + 1) * BATCH]
        ids = torch.from_numpy(self.batches[number])
        return Batch(torch.from_numpy(labels), torch.zeros(BATCH, 1), ids, BATCH)


def genuine(path: Path) -> Rows:
    """Rows of a Criteo file: every value of a column is an id."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    labels = np.array([float(row[0]) for row in rows], np.float32)
    columns = []
    for column in range(14, 40):
        _, ids = np.unique([row[column] for row in rows], return_inverse=True)
        columns.append(ids.astype(np.int32))
    return cut("genuine", np.stack(columns, 1), labels)


def generated(num_batches: int = 100, rows: int = 200_000) -> Rows:
    """Ids by Zipf 1.1, in a random order for each column."""
    draw = np.random.default_rng(30)
    weights = np.arange(1, rows + 1) ** -1.1
    bounds = np.cumsum(weights / weights.sum())
    count = num_batches * BATCH
    columns = [
        draw.permutation(rows).astype(np.int32)[np.searchsorted(bounds, draw.random(count))]
        for _ in range(COLUMNS)
    ]
    return cut("zipf 1.1", np.stack(columns, 1), (draw.random(count) < 0.3).astype(np.float32))


def cut(name: str, ids: Ids, labels: NDArray[np.float32]) -> Rows:
    whole = len(ids) // BATCH
    batches = [ids[n * BATCH : (n + 1) * BATCH] for n in range(whole)]
    return Rows(name, batches, [int(size) + 1 for size in ids.max(0)], labels)


def planned(batches: list[Ids], slots: int, known: int, ahead: int) -> dict[str, int]:
    """Rows that the planner fetches, reads (touched before), and writes."""
    top = 1 + max(int(rows.max()) for rows in batches)
    planner, found = SlotPlanner(top, slots), {"fetched": 0, "read": 0, "written": 0}
    for step in range(len(batches)):
        while planner.num_announced < min(step + known, len(batches)):
            planner.announce(batches[planner.num_announced])
        while planner.num_admitted < min(step + ahead + 1, planner.num_announced):
            result = planner.admit()
            if isinstance(result, int):
                assert planner.num_admitted > step, f"one batch needs {result} slots"
                break
            found["fetched"] += result.missing.size
            found["read"] += int((~result.is_new).sum())
            found["written"] += result.evicted.size
        planner.release()
    return found


def lfu(batches: list[Ids], slots: int) -> int:
    """Rows fetched if the least frequently used row leaves, the older of two."""
    uses: dict[int, int] = {}
    cached: set[int] = set()
    heap: list[tuple[int, int, int]] = []
    fetched = 0
    for number, batch in enumerate(batches):
        wanted = set(batch.tolist())
        fetched += len(wanted - cached)
        cached |= wanted
        kept = []
        while len(cached) > slots:
            entry = heapq.heappop(heap)
            if entry[0] != uses[entry[2]] or entry[2] not in cached:
                continue
            if entry[2] in wanted:
                kept.append(entry)
            else:
                cached.remove(entry[2])
        for row in wanted:
            uses[row] = uses.get(row, 0) + 1
            heapq.heappush(heap, (uses[row], number, row))
    return fetched


def ttl(batches: list[Ids], slots: int) -> tuple[int, int]:
    """(rows fetched, lookahead) of Bagpipe's rule with the largest lookahead that fits.

    A row stays until its last use within the next L batches.
    """
    numbers = np.concatenate([np.full(rows.size, n) for n, rows in enumerate(batches)])
    rows = np.concatenate(batches)
    order = np.lexsort((numbers, rows))
    rows, numbers = rows[order], numbers[order]
    again = np.append(rows[1:] == rows[:-1], False)
    gaps = np.append(np.diff(numbers), 0)
    best = (rows.size, 0)
    for lookahead in range(1, len(batches)):
        stays = again & (gaps <= lookahead)
        change = np.zeros(len(batches) + 1, np.int64)
        np.add.at(change, numbers, 1)  # in use
        np.add.at(change, numbers + 1, -1)
        np.add.at(change, numbers[stays] + 1, 1)  # until its next use
        np.add.at(change, numbers[stays] + gaps[stays], -1)
        if np.cumsum(change).max() > slots:
            break
        best = (int(rows.size - stays.sum()), lookahead)
    return best


def fetches(options: argparse.Namespace) -> None:
    sources = [genuine(options.input)] if options.input else []
    results = Results("cache", "fetches", recorded=bool(options.input))
    for source in (*sources, generated()):
        batches = source.unique()
        for slots in (22_000, 45_000, 100_000):
            least = planned(batches, slots, len(batches), 0)["fetched"]
            ours = {known: planned(batches, slots, known, 1) for known in (8, 16, 32, KNOWN)}
            at_once = planned(batches, slots, KNOWN, 0)["fetched"]
            bagpipe, lookahead = ttl(batches, slots)
            others = {"lru": planned(batches, slots, 1, 0)["fetched"], "lfu": lfu(batches, slots)}
            count = len(batches)
            results.add(
                rows=source.name,
                slots=slots,
                unique_per_step=round(sum(map(len, batches)) / count),
                min_per_step=round(least / count),
                lookahead_0_ahead=round(at_once / least, 4),
                **{f"lookahead_{k}": round(o["fetched"] / least, 4) for k, o in ours.items()},
                read_per_step=round(ours[KNOWN]["read"] / count),
                written_per_step=round(ours[KNOWN]["written"] / count),
                lru=round(others["lru"] / least, 4),
                lfu=round(others["lfu"] / least, 4),
                bagpipe=round(bagpipe / least, 4),
                bagpipe_lookahead=lookahead,
            )


def planning(options: argparse.Namespace) -> None:
    """CPU time per unique row at the size of a large table."""
    num_rows, unique, known = 25_000_000, 38_000, 16
    draw = np.random.default_rng(1)

    def batch() -> Ids:
        ids = np.exp(draw.random(2 * unique) * np.log(num_rows)).astype(np.int64) % num_rows
        ids = np.unique(ids * 2_654_435_761 % num_rows)
        return draw.permutation(ids)[:unique].astype(np.int32)

    batches = [batch() for _ in range(60)]
    results = Results("cache", "planning")
    for slots in (1_000_000, 300_000, 120_000):
        planner, seconds, count = SlotPlanner(num_rows, slots), 0.0, 0
        for step in range(len(batches) - known):
            start = time.thread_time()
            while planner.num_announced < step + known:
                planner.announce(batches[planner.num_announced])
            while planner.num_admitted < step + 2 and not isinstance(planner.admit(), int):
                pass
            planner.release()
            if step > known + 4:
                seconds += time.thread_time() - start
                count += batches[step].size
        results.add(
            rows=num_rows, slots=slots, unique=unique, ns_per_unique_row=1e9 * seconds / count
        )


class Link:
    """A full-duplex link with a send buffer."""

    def __init__(self, rate: float, buffer_bytes: float = 4e6) -> None:
        self.rate, self._buffer_s = rate, buffer_bytes / rate
        self._free = {"read": 0.0, "write": 0.0}

    def carry(self, direction: str, num_bytes: int) -> None:
        """Wait until the bytes have arrived, or until they are in the send buffer."""
        now = time.perf_counter()
        end = self._free[direction] = max(now, self._free[direction]) + num_bytes / self.rate
        wait = end - now - (self._buffer_s if direction == "write" else 0.0)
        if wait > 0:
            time.sleep(wait)


class PacedRecords(MappedRecords):
    """Records behind a link."""

    def __init__(self, inner: MappedRecords, link: Link) -> None:
        self._records, self._link = inner._records, link

    def read(self, rows: Array, out: Array) -> None:
        super().read(rows, out)
        self._link.carry("read", out.nbytes)

    def write(self, rows: Array, records: Array) -> None:
        super().write(rows, records)
        self._link.carry("write", records.nbytes)


class FetchingStore(DeviceStore):
    """Waits for a link to carry the rows of each batch in, and after its update out again."""

    def __init__(self, request: StoreRequest, rate: float, *, overlapped: bool) -> None:
        super().__init__(request.make_kernel(request.num_rows))
        self._record = self.memory_bytes // request.num_rows
        self._link = Link(rate, 1e12 if overlapped else 0.0)
        self._counts: dict[int, int] = {}
        self.wait_s = 0.0

    def announce(self, number: int, addresses: torch.Tensor) -> None:
        self._counts[number] = self._record * addresses.unique().numel()

    def _carry(self, direction: str, num_bytes: int) -> None:
        start = time.perf_counter()
        self._link.carry(direction, num_bytes)
        self.wait_s += time.perf_counter() - start

    def admit(self, number: int) -> None:
        self._carry("read", self._counts[number])

    def release(self, number: int) -> None:
        self._carry("write", self._counts.pop(number))


def job_of(world: World, source: Rows, stores: StoreFactory, lookahead: int) -> Job:
    fields = Fields.of(("I1",), {f"C{n}": size for n, size in enumerate(source.sizes)}, {})
    config = Config(
        data=DataConfig(batch_size=BATCH),
        model=WdlConfig(embedding_dim=DIM, hidden=(64,), dropout=0.0, wide=WideConfig(crosses=())),
        parallel=ParallelConfig(device="cpu", scheme="3", kernel="numba"),
        optimizer=OptimizerConfig(sparse=LazyAdam(lr=1e-3)),
        train=TrainConfig(lookahead=lookahead),
    )
    spec, plan = plan_run(config, fields, world_size=world.size, device_type="cpu")

    def chosen(request: StoreRequest) -> RowStore:
        return stores(request) if request.width == DIM else device_store(request)

    return build_job(config, spec, plan, Boxing(world), stores=chosen)


def timed(world: World, source: Rows, make: StoreFactory, lookahead: int = 1) -> dict[str, Any]:
    """Losses, ms and CPU ms per step, and what the store did, after some steps."""
    made: list[Any] = []

    def stores(request: StoreRequest) -> RowStore:
        made.append(make(request))
        return made[-1]

    job = job_of(world, source, stores, lookahead)
    losses, times, marks = [], [], []
    batches = (source.batch(n) for n in range(WARM + STEPS))
    start = time.perf_counter()
    for loss in job.trainer.train_on(batches):
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
        (store,) = made
        counts = getattr(store, "counts", store)
        read = getattr(counts, "fetched", 0) - getattr(counts, "new", 0)
        marks.append((getattr(counts, "wait_s", 0.0), time.process_time(), read,
                      getattr(counts, "written", 0)))  # fmt: skip
    wait, cpu, read, written = (
        (b - a) / STEPS for a, b in zip(marks[WARM - 1], marks[-1], strict=True)
    )
    return {
        "losses": losses,
        "step_ms": 1e3 * statistics.mean(times[WARM:]),
        "cpu_ms": 1e3 * cpu,
        "wait_ms": 1e3 * wait,
        "read": read,
        "written": written,
    }


def cached(slots: int, rate: float, ahead: int = 1) -> StoreFactory:
    def make(request: StoreRequest) -> CachedStore:
        def records(rows: int, layout: RecordLayout) -> PacedRecords:
            return PacedRecords(host_records(rows, layout, pinned=False), Link(rate))

        return CachedStore(request, records, slots, ahead=ahead)

    return make


def paced(options: argparse.Namespace) -> None:
    """Steps with a store behind a link, against fetching in the step."""
    torch.set_num_threads(1)
    source = genuine(options.input) if options.input else generated()
    record = 3 * 4 * DIM
    with World.start("cpu") as world:
        results = Results("cache", "paced", recorded=bool(options.input))
        plain = timed(world, source, device_store)
        unique = statistics.mean(map(len, source.unique()[WARM : WARM + STEPS]))

        def add(name: str, found: dict[str, Any], rate: float, **more: float) -> None:
            assert found["losses"] == plain["losses"], f"{name}: other losses"
            store_ms = 1e3 * record * max(found["read"], found["written"]) / rate
            results.add(
                store=name,
                mbit_per_s=8 * rate / 1e6,
                **more,
                **{key: round(value, 2) for key, value in found.items() if key != "losses"},
                store_ms=round(store_ms, 2),
                extra_cpu_ms=round(found["cpu_ms"] - plain["cpu_ms"], 2),
                equal_losses=True,
            )

        add("all rows in memory", plain, RATE)
        for overlapped in (False, True):
            name = "fetched in the step" + ", written behind" * overlapped
            make = lambda request, o=overlapped: FetchingStore(request, RATE, overlapped=o)  # noqa: E731
            add(
                name,
                timed(world, source, make),
                RATE,
                sync_ms=round(2e3 * record * unique / RATE, 2),
            )
        add("lru", timed(world, source, cached(SLOTS, RATE, 0)), RATE, slots=SLOTS, known=1)
        for slots, known, rate in (
            (SLOTS, KNOWN, RATE), (45_000, KNOWN, RATE), (100_000, KNOWN, RATE), (SLOTS, 4, RATE),
            (SLOTS, 16, RATE), (SLOTS, KNOWN, 4 * RATE), (SLOTS, KNOWN, RATE / 2),
        ):  # fmt: skip
            found = timed(world, source, cached(slots, rate), known)
            add("lookahead", found, rate, slots=slots, known=known)


LIMIT_BYTES, LIMIT_DIM = 1 << 30, 64


def limit(options: argparse.Namespace) -> None:
    """Two ranks, each with a limit of its memory, and tables of 4 times both limits."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["-m", "benchmarks.cache", "limited", "--folder", str(options.folder)]
    results = Results("cache", "limit")
    for kind in ("device", "file"):
        done = subprocess.run([*words, "--kind", kind], capture_output=True, text=True)
        told = [line for line in (done.stdout + done.stderr).splitlines() if "LIMIT " in line]
        if not told:
            sys.exit(done.stderr[-4000:])
        results.add(kind=kind, limit_bytes=LIMIT_BYTES, ranks=2, says=told[0].split("LIMIT ")[1])


def limited(options: argparse.Namespace) -> None:
    """One rank of ``limit``."""
    torch.set_num_threads(1)
    record = 3 * 4 * LIMIT_DIM
    rows = 4 * 2 * LIMIT_BYTES // record // COLUMNS
    fields = Fields.of(("I1",), {f"C{n}": rows for n in range(COLUMNS)}, {})
    rule = {"device": {}, "file": {"*": StorageRule(kind="file", cache="2%", path=options.folder)}}
    config = Config(
        data=DataConfig(batch_size=BATCH),
        model=WdlConfig(embedding_dim=LIMIT_DIM, hidden=(64,), wide=None),
        parallel=ParallelConfig(
            device="cpu", scheme="3", kernel="torch", storage=rule[options.kind]
        ),
        optimizer=OptimizerConfig(sparse=LazyAdam(lr=1e-3)),
        train=TrainConfig(lookahead=8 if options.kind == "file" else 1),
    )
    with World.start("cpu") as world:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        spec, plan = plan_run(config, fields, world_size=world.size, device_type="cpu")
        try:
            job = build_job(config, spec, plan, Boxing(world))
        except ConfigError as error:
            print(f"LIMIT refused: {error}")
            return
        draw = np.random.default_rng(world.rank)

        def batches() -> Iterator[Batch]:
            for _ in range(30):
                size = BATCH // world.size
                ids = torch.from_numpy((draw.random((size, COLUMNS)) ** 4 * rows).astype(np.int32))
                labels = torch.from_numpy((draw.random(size) < 0.3).astype(np.float32))
                yield Batch(labels, torch.zeros(size, 1), ids, BATCH)

        losses = [float(loss) for loss in job.trainer.train_on(batches())]
        counts = job.trainer.cache_counts()
        status = Path("/proc/self/status").read_text()
        data = next(line.split()[1] for line in status.splitlines() if line.startswith("VmData"))
        if world.rank == 0:
            print(
                f"LIMIT trained {len(losses)} steps, last loss {losses[-1]:.4f}; rank 0 has "
                f"{4 * LIMIT_BYTES / 1e9:.2f} GB of rows in a file, {int(data) / 1e6:.2f} GB of "
                f"data memory, fetched {counts.fetched}, written {counts.written}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = {
        "fetches": fetches,
        "planning": planning,
        "paced": paced,
        "limit": limit,
        "limited": limited,
    }
    parser.add_argument("part", choices=parts)
    parser.add_argument("--input", type=Path, help="a file in Criteo's text format")
    parser.add_argument("--folder", type=Path, help="for the files of limit")
    parser.add_argument("--kind", choices=("device", "file"), default="file", help="for limited")
    options = parser.parse_args()
    parts[options.part](options)


if __name__ == "__main__":
    main()

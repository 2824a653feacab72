"""Tests a single cached store: values under any timing, failures, capacity, and memory."""

import errno
import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sbpflow.embedding.cache.records import MappedRecords, RecordLayout, file_records, host_records
from sbpflow.embedding.cache.slot_layout import SLOT, STORED
from sbpflow.embedding.cache.slot_planner import LANE_THREADS
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.plan.tables import Shard, TableConfig
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.choose import KernelChoice, make_kernel
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import WEIGHTS, StoreRequest
from sbpflow.errors import ConfigError, TrainingError

ROWS, WIDTH = 200, 4
CPU = torch.device("cpu")
TABLE = TableConfig(name="t", features=("f",), num_rows=ROWS, dim=WIDTH)
SHARD = Shard(table=TABLE, rank=0, row_start=0, row_stop=ROWS, col_start=0, col_stop=WIDTH)
RULE = sparse_optimizer("adagrad", lr=0.1)


class Initial:
    """Fills each row with its row number, and calls ``log`` with the rows."""

    def __init__(self, log=lambda rows: None):
        self._log = log

    def __call__(self, rows):
        if rows.numel():  # a new store first calls this without rows, to compile its loops
            self._log(rows)
        weights = rows.unsqueeze(1).repeat(1, WIDTH).float()
        state = torch.full((rows.numel(), WIDTH), RULE.initial_state("sum"))
        return {WEIGHTS: weights, "sum": state}

    def put(self, rows, slots, tensors):
        for name, values in self(torch.from_numpy(rows)).items():
            tensors[name][slots] = values


initial = Initial()


REQUEST = StoreRequest(
    shards=(SHARD,),
    num_rows=ROWS,
    width=WIDTH,
    optimizer=RULE,
    make_kernel=lambda slots: make_kernel(
        KernelChoice("torch", ""), ROWS, WIDTH, dim=WIDTH, optimizer=RULE, dtype=torch.float32,
        device=CPU, slots=slots,
    ),
    initial=initial,
)  # fmt: skip


class SlowRecords(MappedRecords):
    """Records with random delays before and after each operation, and optional failures."""

    def __init__(self, inner, seed, fail_at=None):
        super().__init__(inner._records)
        self._random, self._fail_at = random.Random(seed), fail_at
        self._calls = {"read": 0, "write": 0}

    def read(self, rows, out):
        self._around("read", lambda: MappedRecords.read(self, rows, out))

    def write(self, rows, records):
        # Writes are not atomic: their two halves become visible one after the other.
        half = rows.size // 2
        for part in (slice(0, half), slice(half, None)):
            self._around("write", lambda p=part: MappedRecords.write(self, rows[p], records[p]))

    def _around(self, name, operation):
        self._calls[name] += 1
        if self._fail_at == (name, self._calls[name]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(self._random.choice((0, 0, 0.001, 0.004)))
        operation()
        time.sleep(self._random.choice((0, 0, 0.001)))


def make_store(slots, *, seed=None, fail_at=None, ahead=1):
    def records(rows, layout):
        inner = host_records(rows, layout)
        return inner if seed is None else SlowRecords(inner, seed, fail_at)

    return CachedStore(REQUEST, records, slots, ahead=ahead, key="parallel.storage.t")


def batches(seed, count=40, size=30):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy((rng.random(size) ** 2 * ROWS).astype(np.int64)) for _ in range(count)]


def train(store, given, known, expected, after=lambda step: None):
    """In each step, check the batch's rows, then add 1000 to them."""
    announced = 0
    for step, batch in enumerate(given):
        while announced < min(step + known + 1, len(given)):
            store.announce(announced, given[announced])
            announced += 1
        slots = store.admit(step)
        weights = store.kernel.weights
        assert torch.equal(weights[slots], expected[batch])
        rows, first = np.unique(batch.numpy(), return_index=True)
        weights[slots[first]] += 1000
        expected[rows] += 1000
        store.release(step)
        after(step)


@pytest.mark.parametrize("seed", range(8))
def test_values_are_exact_under_any_timing(seed):
    draw = random.Random(seed)
    store = make_store(draw.choice((35, 50, 90)), seed=seed, ahead=draw.choice((0, 1, 2)))
    expected = initial(torch.arange(ROWS))[WEIGHTS]
    ends, faults = threading.Event(), []

    def watch():
        """Check that values only grow, in steps of 1000, and that no read returns an old value."""
        seen = np.zeros((ROWS, WIDTH))
        while not ends.is_set():
            rows = torch.randint(0, ROWS, (60,))
            found = store.read(rows)[WEIGHTS].numpy()
            if (found % 1000 != rows.numpy()[:, None]).any() or (found < seen[rows]).any():
                faults.append(rows)
            seen[rows] = np.maximum(seen[rows], found)

    watcher = threading.Thread(target=watch)
    watcher.start()

    def read_all(step):
        if step % 7 == 0:
            assert torch.equal(store.read(slice(0, ROWS))[WEIGHTS], expected)

    try:
        train(store, batches(seed), draw.choice((1, 2, 6, 30)), expected, read_all)
    finally:
        ends.set()
        watcher.join()
    assert not faults
    assert torch.equal(store.read(slice(0, ROWS))[WEIGHTS], expected)
    assert store.counts.written > 50
    assert store.counts.fetched > store.counts.new > 0


class BlockedRecords(MappedRecords):
    """Records whose writes wait for ``opens``."""

    def __init__(self, inner):
        super().__init__(inner._records)
        self.opens, self.waits, self.reads = (threading.Event() for _ in range(3))

    def read(self, rows, out):
        self.reads.set()
        MappedRecords.read(self, rows, out)

    def write(self, rows, records):
        self.waits.set()
        assert self.opens.wait(30)
        MappedRecords.write(self, rows, records)


def test_reads_do_not_wait_for_a_slow_write_and_a_row_that_returns_is_exact():
    made = []

    def records(rows, layout):
        made.append(BlockedRecords(host_records(rows, layout)))
        return made[-1]

    store = CachedStore(REQUEST, records, 4, ahead=0, key="key")
    given = [torch.tensor(rows) for rows in ([0, 1, 2, 3], [4, 5], [0, 1])]
    for number, batch in enumerate(given):
        store.announce(number, batch)
    slots = store.admit(0)
    store.kernel.weights[slots] += 1000
    store.release(0)
    slots = store.admit(1)  # two rows are evicted; the rows that batch 2 uses stay
    assert made[0].waits.wait(30)
    found = store.read(torch.arange(6))[WEIGHTS][:, 0]  # some rows are in slots, others in flight
    assert found.tolist() == [1000, 1001, 1002, 1003, 4, 5]
    store.kernel.weights[slots] += 1000
    store.release(1)
    made[0].opens.set()
    store.admit(2)
    store.release(2)
    # Rows 2 and 3 were written back and are read again.
    store.announce(3, torch.tensor([2, 3, 9, 8]))
    slots = store.admit(3)
    assert store.kernel.weights[slots, 0].tolist() == [1002, 1003, 9, 8]
    assert store.read(torch.tensor([4, 5]))[WEIGHTS][:, 0].tolist() == [1004, 1005]


class LoggedRecords(MappedRecords):
    """Records that log the rows read and written."""

    def __init__(self, inner, log):
        super().__init__(inner._records)
        self._log = log

    def read(self, rows, out):
        self._log.append(("read", set(rows.tolist())))
        MappedRecords.read(self, rows, out)

    def write(self, rows, records):
        self._log.append(("written", set(rows.tolist())))
        MappedRecords.write(self, rows, records)


@pytest.mark.parametrize("seed", range(6))
def test_exactly_the_fetched_rows_that_an_earlier_batch_used_are_read(seed):
    """Compare the rows that the store moves with sets of rows computed from the batches."""
    log = []

    def records(rows, layout):
        return LoggedRecords(host_records(rows, layout), log)

    draw, given, slots = random.Random(seed), batches(seed), 35 + 10 * seed
    request = replace(
        REQUEST, initial=Initial(lambda rows: log.append(("computed", set(rows.tolist()))))
    )
    store = CachedStore(request, records, slots, ahead=draw.choice((0, 1, 2)))
    train(store, given, draw.choice((1, 3, 20)), initial(torch.arange(ROWS))[WEIGHTS])
    store._mover.wait_idle()
    counts, fetched, read = store.counts, 0, 0
    cached, touched = set(), set()
    for batch in given:
        wanted = set(batch.tolist())
        missing = wanted - cached
        for kind, rows in (("read", missing & touched), ("computed", missing - touched)):
            assert not rows or log.pop(0) == (kind, rows)
        left = log.pop(0)[1] if log and log[0][0] == "written" else set()
        assert left <= cached - wanted
        cached = cached - left | wanted
        assert len(cached) <= slots
        fetched += len(missing)
        read += len(missing & touched)
        touched |= wanted
    assert not log
    assert (counts.fetched, counts.fetched - counts.new) == (fetched, read)
    assert fetched - read == len(touched)
    assert read > 20


def test_a_row_without_a_slot_stops_its_batch():
    batch = torch.tensor([7, 3, 7, 199, 0])
    for row in batch.unique().tolist():
        store = make_store(40)
        planner, admit = store._mover.planner, store._mover.planner.admit

        def lose(row=row, planner=planner, admit=admit):
            found = admit()
            planner.records[row, SLOT] = STORED
            return found

        planner.admit = lose
        store.announce(0, batch)
        count = int((batch == row).sum())
        text = f"table t: {count} ids of batch 0, starting with row {row}, have no slot"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text):
                store.admit(0)


def test_rows_are_read_ahead_for_evaluation():
    made = []

    def records(rows, layout):
        made.append(BlockedRecords(host_records(rows, layout)))
        return made[-1]

    store = CachedStore(REQUEST, records, 40, key="key")
    made[0].opens.set()
    expected = initial(torch.arange(ROWS))[WEIGHTS]
    train(store, batches(1, 20), 4, expected)
    store._mover.wait_idle()
    before = replace(store.counts)
    made[0].reads.clear()
    lookups = [Lookup(torch.arange(start, ROWS, 2)) for start in (0, 1)]
    store.read_ahead(lookups[0])
    assert made[0].reads.wait(30)  # the read starts before the lookup
    assert torch.equal(store.peek(lookups[0]), expected[lookups[0].addresses])
    for lookup in lookups:
        store.read_ahead(lookup)
    for lookup in [*reversed(lookups), *lookups]:
        assert torch.equal(store.peek(lookup), expected[lookup.addresses])
    store.read_ahead(lookups[0])
    store._mover.wait_idle()
    del lookup, lookups
    assert not store._ahead  # nothing remains of lookups that were not used
    assert store.counts == before


def test_evaluation_reads_without_moving_rows():
    store = make_store(60)
    expected = initial(torch.arange(ROWS))[WEIGHTS]
    train(store, batches(1, 20), 4, expected)
    store._mover.wait_idle()
    before = store.counts.fetched
    addresses = torch.tensor([3, 199, 3, 150, 0])
    assert torch.equal(store.peek(Lookup(addresses)), expected[addresses])
    bags = Lookup(addresses, torch.tensor([0, 2, 5]))
    sums = torch.stack([expected[addresses[:2]].sum(0), expected[addresses[2:]].sum(0)])
    assert torch.equal(store.peek(bags), sums)
    assert store.counts.fetched == before


def test_rows_in_any_place_are_written_and_initial_rows_are_not_stored():
    store = make_store(60)
    expected = initial(torch.arange(ROWS))[WEIGHTS]
    train(store, batches(2, 20), 4, expected)
    new = torch.randn(ROWS, WIDTH)
    store.write(slice(0, ROWS), {WEIGHTS: new})
    state = torch.rand(5, WIDTH)
    store.write(torch.tensor([199, 0, 7, 100, 3]), {"sum": state})
    assert torch.equal(store.read(slice(0, ROWS))[WEIGHTS], new)
    assert torch.equal(store.read(torch.tensor([199, 0, 7, 100, 3]))["sum"], state)
    fresh = make_store(60)
    values = {name: value.clone() for name, value in initial(torch.arange(ROWS)).items()}
    values[WEIGHTS][5] += 1
    for name, value in values.items():  # load one tensor after another, as a restore does
        fresh.write(slice(0, ROWS), {name: value})
    expected = values[WEIGHTS].clone()
    train(fresh, batches(3, 20, 20), 4, expected)
    fresh._mover.wait_idle()
    read = fresh.counts.fetched - fresh.counts.new
    assert read <= fresh.counts.written + 1


@pytest.mark.parametrize("fail_at", [("read", 2), ("write", 1), ("write", 6)], ids=str)
def test_a_failure_of_the_mover_ends_training_with_its_reason(fail_at):
    store = make_store(40, seed=0, fail_at=fail_at)
    expected = initial(torch.arange(ROWS))[WEIGHTS]
    with pytest.raises(
        TrainingError, match=r"parallel\.storage\.t: rows of table t could not be moved: .*No space"
    ):
        train(store, batches(4, 60), 3, expected)
    for call in (lambda: store.read(slice(0, 3)), lambda: store.announce(99, batches(4)[0])):
        with pytest.raises(TrainingError, match="No space"):
            call()


def test_a_full_disk_is_reported_at_the_start(tmp_path, monkeypatch):
    layout = RecordLayout({WEIGHTS: torch.zeros(0, WIDTH)})
    with pytest.raises(ConfigError, match=r"parallel\.storage\.t\.path: .* cannot hold a file of "):
        file_records(10**14, layout, tmp_path, "parallel.storage.t")
    for number, message in (
        (errno.ENOSPC, r"no space left on device; only [\d.]+ GB is free\); use a"),
        (errno.EFBIG, r"\(file too large\); raise the limit on file sizes"),
    ):
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=error))
        with pytest.raises(ConfigError, match=message):
            file_records(ROWS, layout, tmp_path, "parallel.storage.t")
    assert list(tmp_path.iterdir()) == []
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(
        ConfigError, match=r"\(not a directory\); use a folder on a local disk that"
    ):
        file_records(ROWS, layout, blocked / "folder", "parallel.storage.t")


def test_a_file_has_no_name_so_removing_its_folder_changes_nothing(tmp_path):
    folder = tmp_path / "rows"
    store = CachedStore(REQUEST, lambda rows, layout: file_records(rows, layout, folder, "key"), 40)
    expected = initial(torch.arange(ROWS))[WEIGHTS]

    def remove(step):
        if step == 10:
            assert list(folder.iterdir()) == []
            folder.rmdir()

    train(store, batches(5), 3, expected, remove)
    assert torch.equal(store.read(slice(0, ROWS))[WEIGHTS], expected)
    assert store.counts.written > 50


def test_a_batch_that_does_not_fit_is_reported_with_a_sufficient_size():
    given = batches(6, 10)
    need = max(len(batch.unique()) for batch in given)
    store = make_store(need - 1)
    text = rf"parallel\.storage\.t\.cache: .* table t .* {need - 1} slots .* needs {need}; use"
    with pytest.raises(ConfigError, match=text) as caught:
        train(store, given, 3, initial(torch.arange(ROWS))[WEIGHTS])
    share = float(str(caught.value).split("use ")[1].split("%")[0])
    enough = make_store(int(np.ceil(ROWS * share / 100)))
    train(enough, given, 3, initial(torch.arange(ROWS))[WEIGHTS])


def test_canceled_batches_can_be_followed_by_others():
    store, given = make_store(60), batches(7, 12)
    expected = initial(torch.arange(ROWS))[WEIGHTS]
    for number in range(6):
        store.announce(number, given[number])
    slots = store.admit(0)
    assert torch.equal(store.kernel.weights[slots], expected[given[0]])
    for number in range(6):
        store.release(number)
    for number in range(6, 12):
        store.announce(number, given[number])
        slots = store.admit(number)
        assert torch.equal(store.kernel.weights[slots], expected[given[number]])
        store.release(number)
    store._mover.wait_idle()
    assert store._mover.planner.num_leased == 0


EXIT = """
import time
from tests.embedding.test_cached_store import *

store = make_store(40)
records, write = store._mover.records, store._mover.records.write

def slow(rows, values):
    time.sleep(0.3)
    write(rows, values)
    print("written")

train(store, batches(1, 6), 2, initial(torch.arange(ROWS))[WEIGHTS])
store._mover.wait_idle()
records.write = slow
store._mover.tasks.put((lambda: records.write(batches(1)[0].numpy(), records._records[:30]), None))
"""


@pytest.mark.slow
def test_a_process_ends_after_the_last_write():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["written"]), done.stderr


def test_a_freed_store_ends_its_thread():
    store = make_store(60)
    train(store, batches(8, 5), 2, initial(torch.arange(ROWS))[WEIGHTS])
    mover, thread = weakref.ref(store._mover), store._thread
    del store
    thread.join(10)
    assert not thread.is_alive()
    del thread
    gc.collect()
    assert mover() is None


def test_a_store_can_be_freed_in_a_thread_for_which_its_mover_waits():
    stores, began = [make_store(60)], threading.Event()
    thread, tasks = stores[0]._thread, stores[0]._mover.tasks

    def free():
        began.wait(10)  # until the mover waits for this thread
        stores.clear()

    freeing = threading.Thread(target=free, name=f"{LANE_THREADS}_0")
    freeing.start()
    tasks.put((lambda: (began.set(), freeing.join()), None))
    freeing.join(10)
    thread.join(10)
    assert not freeing.is_alive()
    assert not thread.is_alive()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                    (torch.bfloat16, torch.float64)])  # fmt: skip
def test_records_keep_every_bit(dtypes):
    row, state = dtypes
    for width, count in itertools.product((1, 3, 4, 8), (1, 2, 9)):
        values = {
            WEIGHTS: torch.randn(count, width).to(row),
            "sum": torch.randn(count, width).to(state),
            "steps": torch.randn(count).to(state),
        }
        layout = RecordLayout({name: value[:0] for name, value in values.items()})
        records = layout.empty(count)
        layout.pack(values, records)
        for name, value in values.items():
            assert torch.equal(layout.values(records, name), value)
        assert layout.num_bytes == sum(v[0].numel() * v.itemsize for v in values.values())

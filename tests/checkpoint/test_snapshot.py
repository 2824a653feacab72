"""Tests, for every kernel, that a save writes the state as of its start, even though training
changes the state in the meantime.
"""

import errno
import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from benchmarks.reshard import Case, Lying, make_job, make_rows
from sbpflow.checkpoint import attempt, marks, slabs, spill, undo
from sbpflow.checkpoint import snapshot as module
from sbpflow.checkpoint.attempt import Attempt
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.snapshot import Snapshot
from sbpflow.checkpoint.write import Part, PieceWriter
from sbpflow.embedding.plan.tables import Place, Shard, TableConfig
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import DeviceStore
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.errors import CheckpointError
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.ranks.world import World

ROWS, WIDTH = 200, 4
RULE = sparse_optimizer("adagrad", lr=0.1)
CPU = torch.device("cpu")


def make_storage(kernel):
    if kernel == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
        from sbpflow.embedding.storage.fbgemm_storage import FbgemmStorage

        return FbgemmStorage(ROWS, WIDTH, optimizer=RULE, device=CPU)
    kinds = {"torch": "TorchStorage", "numba": "NumbaStorage", "triton": "TritonStorage"}
    loaded = pytest.importorskip(f"sbpflow.embedding.storage.{kernel}_storage")
    return getattr(loaded, kinds[kernel])(
        ROWS, WIDTH, dim=WIDTH, optimizer=RULE, dtype=torch.float32, device=CPU
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("kernel", ["torch", "numba", "fbgemm", "triton"])
def test_changing_rows_are_saved_as_they_were(kernel, tight, tmp_path, monkeypatch):
    if tight:  # the log has room for 30 rows in slabs of 2; the rest goes through a file
        monkeypatch.setattr(undo, "SLAB_SHARE", 0.0)
        monkeypatch.setattr(undo, "MIN_SLAB_ROWS", 1)
        monkeypatch.setattr(slabs, "SLAB_BITS", 1)
        monkeypatch.setattr(undo, "PIECE_ROWS", 16)
        monkeypatch.setattr(undo, "SEGMENT_ROWS", 24)
        # one thread both trains and writes, so it must not wait for the writer
        monkeypatch.setattr(undo, "MIN_SEGMENTS", 100)
    storage = make_storage(kernel)
    storage.weights.copy_(torch.randn(ROWS, WIDTH))
    table = TableConfig(name="t", features=("f",), num_rows=ROWS - 20, dim=WIDTH)
    shard = Shard(table=table, rank=0, row_start=0, row_stop=ROWS - 20, col_start=0,
                  col_stop=WIDTH, base=20)  # fmt: skip
    values = {"tables/t": storage.weights[20:], "tables/t/sum": storage.state["sum"][20:]}
    parts = []
    # Another rank writes the first rows of the weights; this rank writes the other rows and all
    # state.
    for name, value in values.items():
        start = 30 if name == "tables/t" else 0
        place = Place(row_start=start, row_stop=ROWS - 20, col_start=0, col_stop=WIDTH)
        parts.append(Part(name=name, place=place, values=value[start:]))
    expected = {part.name: part.values.clone() for part in parts}
    monkeypatch.setattr(module, "RANGE_BYTES", 16 * WIDTH * 4)
    real, updates = PieceWriter.write, []

    def write(self, data):
        """Between two blocks, train on rows already written, rows still to be written, and rows not
        saved.
        """
        lookup = Lookup(torch.randint(0, ROWS, (40,)))
        storage.lookup(lookup, 0.1)
        storage.update(lookup, torch.randn(40, WIDTH), 0.1, len(updates) + 1)
        updates.append(lookup)
        real(self, data)

    monkeypatch.setattr(PieceWriter, "write", write)
    snapshot = Snapshot(parts, lambda: [(DeviceStore(storage), [shard])])
    written = snapshot.write(tmp_path / "rank-0.bin")
    snapshot.end()
    raw = (tmp_path / "rank-0.bin").read_bytes()
    for name, piece in written:
        size = expected[name].numel() * 4
        piece_bytes = bytearray(raw[piece.offset : piece.offset + size])
        saved = torch.frombuffer(piece_bytes, dtype=torch.float32)
        assert torch.equal(saved.view(-1, WIDTH), expected[name]), name
        assert not torch.equal(values[name], expected[name]), "or nothing was tested"
    assert len(updates) > 10
    cost = snapshot.cost
    assert 0 < cost.log_bytes < cost.extra_bytes
    assert (cost.spilled_bytes > 0) == tight
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.bin"]
    storage.update(Lookup(torch.arange(5)), torch.ones(5, WIDTH), 0.1, 99)
    assert snapshot.cost == cost


@pytest.mark.parametrize("fixed_size", [False, True])
def test_a_small_table_has_a_small_log(fixed_size, tmp_path):
    """Storages of fixed size report some rows repeatedly; the log needs room for each row only
    once.
    """
    storage = TorchStorage(
        30, 256, dim=256, optimizer=RULE, dtype=torch.float32, device=CPU, fixed_size=fixed_size
    )
    table = TableConfig(name="t", features=("f",), num_rows=30, dim=256)
    shard = Shard(table=table, rank=0, row_start=0, row_stop=30, col_start=0, col_stop=256)
    place = Place(row_start=0, row_stop=30, col_start=0, col_stop=256)
    part = Part(name="tables/t", place=place, values=storage.weights)
    expected = storage.weights.clone()
    snapshot = Snapshot([part], lambda: [(DeviceStore(storage), [shard])])
    for step in range(1, 4):
        lookup = Lookup(torch.randint(0, 31 if fixed_size else 30, (9000,)))
        storage.update(lookup, torch.randn(9000, 256), 0.1, step)
    ((_, piece),) = snapshot.write(tmp_path / "rank-0.bin")
    snapshot.end()
    raw = bytearray((tmp_path / "rank-0.bin").read_bytes())
    saved = torch.frombuffer(raw, dtype=torch.float32, offset=piece.offset)
    assert torch.equal(saved.view(30, 256), expected)
    assert not torch.equal(storage.weights, expected)
    assert snapshot.cost.extra_bytes < 2**20


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


TIGHT = {"SLAB_SHARE": 0.0, "MIN_SLAB_ROWS": 1, "MIN_SEGMENTS": 1, "SEGMENT_ROWS": 8,
         "PIECE_ROWS": 8}  # fmt: skip


@contextmanager
def tight_memory(tight: bool = True):
    """Limit the memory, so that training waits for the writer after every few rows."""
    usual = {name: getattr(undo, name) for name in TIGHT}, module.RANGE_BYTES, slabs.SLAB_BITS
    if tight:
        for name, value in TIGHT.items():
            setattr(undo, name, value)
        module.RANGE_BYTES, slabs.SLAB_BITS = 64, 0
    try:
        yield
    finally:
        for name, value in usual[0].items():
            setattr(undo, name, value)
        module.RANGE_BYTES, slabs.SLAB_BITS = usual[1:]


def train_while_saving(world: World, folder, case: Case, tight: bool):
    def train(job, steps):
        for _ in range(steps):
            job.trainer.step(make_rows(job.trainer.num_steps + 1, world.rank, world.size))

    one, two = make_job(world, case, case.saved), make_job(world, case, case.saved)
    train(one, 3)
    Saver(folder / "a", one.boxing, one.state, run="r", deadline_s=30).save(3, {})
    train(two, 3)
    saver = Saver(
        folder / "b", two.boxing, two.state, run="r", deadline_s=30,
        stores=two.embeddings.stores,
    )  # fmt: skip
    real, taken = PieceWriter.write, []

    def slow(self, data):
        time.sleep(0.001)
        real(self, data)

    PieceWriter.write = slow
    try:
        with tight_memory(tight):
            saver.start(3, {}, lambda: taken.append(niceness()))
            train(two, 8)
            saver.wait()
        spilled = saver.last_cost.spilled_bytes
        saver.start(11, {})
        saver.wait()
    finally:
        PieceWriter.write = real
    return taken, niceness(), spilled


@pytest.mark.few(2)
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("scheme", ["3", "mixed"])
def test_background_saves_equal_blocking_saves(ranks, memory, scheme, tight):
    for name in "ab":
        (memory / name).mkdir()
    case = Case(Lying(2, scheme), Lying(2, scheme), "lazy_adam")
    results = ranks(2, train_while_saving, memory, case, tight)
    assert tight == any(spilled for _, _, spilled in results)
    for taken, usual, _ in results:
        if sys.platform == "linux":
            assert taken == [min(19, usual + 10)], "the thread that saves leaves the processor"
    one, two = (open_checkpoint(memory / name / "step-3") for name in "ab")
    for name in one.tensors:
        assert one.tensor(name).equal(two.tensor(name)), name
    assert (
        not open_checkpoint(memory / "b" / "step-11")
        .tensor("tables/deep.C1")
        .equal(two.tensor("tables/deep.C1"))
    )


def begun(world: World, folder, deadline_s: float = 30):
    """Return a job after its first step, and its saver."""
    lying = Lying(world.size, "3")
    case = Case(lying, lying, "lazy_adam")
    job = make_job(world, case, case.saved)
    job.trainer.step(make_rows(1, world.rank, world.size))
    storages = job.embeddings.stores
    return job, Saver(
        folder, job.boxing, job.state, run="r", deadline_s=deadline_s, stores=storages
    )


def one_cannot_write(world: World, folder):
    _, saver = begun(world, folder)
    real = PieceWriter.write

    def full(self, data):
        if world.rank == 1:
            raise CheckpointError("rank-1.bin cannot be written (no space left on device)")
        real(self, data)

    messages = []
    saver.save(1, {})
    PieceWriter.write = full
    try:
        for save in (lambda: saver.save(2, {}), lambda: (saver.start(2, {}), saver.wait())):
            try:
                save()
            except CheckpointError as error:
                messages.append(str(error))
    finally:
        PieceWriter.write = real
    saver.save(3, {})
    return messages


def test_every_rank_gets_the_reason_of_a_failed_write(ranks, memory):
    for message in ranks(2, one_cannot_write, memory):
        assert message == ["rank 1: rank-1.bin cannot be written (no space left on device)"] * 2
    assert sorted(path.name for path in memory.iterdir()) == ["step-1", "step-3"]


def one_is_slow(world: World, folder):
    _, saver = begun(world, folder, deadline_s=4)
    real, end = PieceWriter.write, time.monotonic() + 6

    def slow(self, data):
        if world.rank == 1 and time.monotonic() < end:
            time.sleep(0.5)
        real(self, data)

    PieceWriter.write = slow
    try:
        saver.save(1, {})
    finally:
        PieceWriter.write = real


def one_hangs(world: World, folder):
    _, saver = begun(world, folder, deadline_s=1)
    if world.rank == 1:
        Attempt.report, report = lambda self, *written: time.sleep(3), Attempt.report
    try:
        saver.save(1, {})
    except CheckpointError as error:
        return str(error)
    finally:
        if world.rank == 1:
            Attempt.report = report


def test_a_rank_may_write_for_longer_than_the_deadline_but_not_hang(ranks, memory):
    ranks(2, one_is_slow, memory)
    assert [path.name for path in memory.iterdir()] == ["step-1"]
    shutil.rmtree(memory / "step-1")
    for message in ranks(2, one_hangs, memory):
        assert "ranks [1] did not finish, and no rank wrote anything for 1 s (parallel.t" in message
    assert not list(memory.iterdir())


def folder_is_taken_away(world: World, folder, late: bool):
    _, saver = begun(world, folder, deadline_s=3)
    saver.save(1, {})
    report, publish = Attempt.report, attempt.publish

    def take_away():
        shutil.rmtree(next(folder.glob(".step-2.partial-*")))

    def before_report(self, *written):
        if world.rank == 1:
            take_away()
        report(self, *written)

    def before_publish(*of):
        take_away()
        publish(*of)

    if late:
        attempt.publish = before_publish
    else:
        Attempt.report = before_report
    message = ""
    try:
        saver.start(2, {})
        saver.wait()
    except CheckpointError as error:
        message = str(error)
    finally:
        Attempt.report, attempt.publish = report, publish
    left = [saver._store.check([f"{saver._nonce}1/rank-{rank}"]) for rank in range(2)]
    return message, left


@pytest.mark.parametrize("late", [False, True])
def test_every_rank_reports_a_deleted_folder(ranks, memory, late):
    (one, left), (two, _) = ranks(2, folder_is_taken_away, memory, late)
    assert one == two
    assert "cannot be written (no such file or directory)" in one
    assert [path.name for path in memory.iterdir()] == ["step-1"]
    assert left == [False, False], "what ranks report is not kept for the whole run"


def disk_full_for_rows_put_aside(world: World, folder):
    job, saver = begun(world, folder)
    saver.save(1, {})
    real, trained = spill.write_at, threading.Event()

    def full(file, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def slow(self, data):
        trained.wait(0.01)
        real_write(self, data)

    real_write, PieceWriter.write = PieceWriter.write, slow
    spill.write_at = full
    message = ""
    try:
        with tight_memory():
            saver.start(2, {})
            for step in range(2, 12):  # training continues after waiting for the writer
                job.trainer.step(make_rows(step, world.rank, world.size))
            saver.wait()
    except CheckpointError as error:
        message = str(error)
    finally:
        spill.write_at, PieceWriter.write = real, real_write
    return message, job.trainer.num_steps


def test_a_full_disk_for_spilled_rows_is_reported_without_a_hang(ranks, memory):
    ((message, steps),) = ranks(1, disk_full_for_rows_put_aside, memory)
    assert "cannot be written (no space left on device)" in message
    assert steps == 11
    assert [path.name for path in memory.iterdir()] == ["step-1"]


def test_spill_files_have_no_name_and_are_checked(tmp_path):
    file = spill.SpillFile(tmp_path)
    first = file.append([memoryview(b"some"), memoryview(b" rows")])
    second = file.append([memoryview(b"others")])
    assert not list(tmp_path.iterdir())  # the file has no name, so it does not outlive its process
    assert [bytes(file.read(one)) for one in (second, first)] == [b"others", b"some rows"]
    os.pwrite(file._file, b"S", first.offset)
    with pytest.raises(CheckpointError, match="spilled rows: the disk did not return the bytes"):
        file.read(first)
    assert bytes(file.read(second)) == b"others"
    file.close()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("compiled", [False, True])
def test_each_marked_row_is_returned_once(compiled, dtype):
    if compiled:
        pytest.importorskip("numba")
    take = marks.choose_take_marked() if compiled else marks.take_marked_by_numpy
    marked = np.array([True, True, False, True, True])
    found = np.full(8, -1, np.int64)
    # row 5 is beyond the last mark
    assert take(np.array([5, 3, 2, 0], dtype), marked, found) == 2
    assert sorted(found[:2].tolist()) == [0, 3]
    assert take(np.array([0, 1, 1, 3], dtype), marked, found[2:]) == 1
    assert found[2] == 1
    assert marked.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("num_slabs", [0, 14])
def test_slabs_separate_rows_by_range(num_slabs, monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BITS", 2)
    generator = np.random.default_rng(0)
    kept = slabs.Slabs(4 * num_slabs, 10, 7)
    held, given = {}, 0
    for _ in range(300):
        rows = np.sort(generator.choice(70, generator.integers(1, kept.sure_rows), replace=False))
        rows = np.array([row for row in rows if row not in held.values()], dtype=np.int64)
        while (places := kept.place(rows)) is None:
            fullest = kept.fullest()
            taken = [held.pop(place) for place in kept.take(fullest).tolist()]
            assert taken
            assert {row // 7 for row in taken} == {fullest}
            given += 1
        assert not held.keys() & set(places.tolist())
        assert places.size == rows.size
        held |= dict(zip(places.tolist(), rows.tolist(), strict=True))
        assert all(0 <= place < kept.touched_places <= kept.num_places for place in held)
    assert given > 50
    for number in range(10):
        assert all(held.pop(place) // 7 == number for place in kept.take(number).tolist())
    assert not held

"""Tests reads of sets that are replaced, and the descriptors, maps, and threads that reads use."""

import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sbpflow.data import load_manifest, open_loader
from sbpflow.data.format.manifest import write_manifest
from sbpflow.data.format.shards import RowFiles, SplitRows
from sbpflow.errors import DataError
from tests.data.backends import BACKENDS
from tests.data.conftest import make_set
from tests.data.rows import ROOT, run_prepare, text_rows, write_rows


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_set_replaced_during_a_read_is_refused(tmp_path, backend):
    source = write_rows(tmp_path / "rows.tsv", text_rows(600))
    old = run_prepare(tmp_path / "set", source, seed=7)
    loader = open_loader(old, batch_size=100, backend=backend)
    first = loader.epoch(0)
    before = next(first)
    run_prepare(tmp_path / "set", source, seed=8, overwrite=True)
    with pytest.raises(DataError, match=r"replaced since it was opened .* load its manifest again"):
        loader.epoch(1)
    with pytest.raises(DataError, match="replaced since it was opened"):
        open_loader(old, batch_size=100, backend=backend)
    rest = [before, *first]  # the running epoch reads the old files, which it has mapped
    run_prepare(tmp_path / "set", source, seed=7, overwrite=True)
    again = list(loader.epoch(0))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(rest, again, strict=True))


def test_a_set_removed_during_a_read_is_refused(tmp_path):
    manifest = make_set(tmp_path / "set", 50)
    loader = open_loader(manifest, batch_size=10, backend="memmap")
    shutil.rmtree(tmp_path / "set")
    with pytest.raises(DataError, match="removed or damaged since it was opened"):
        loader.epoch(0)


def test_a_set_with_other_shards_is_reported_as_replaced(tmp_path):
    manifest = make_set(tmp_path / "set", 50)
    loader = open_loader(manifest, batch_size=10, backend="memmap")
    shutil.rmtree(tmp_path / "set")
    make_set(tmp_path / "set", 40)
    with pytest.raises(DataError, match="replaced since it was opened"):
        loader.epoch(0)


def test_an_equal_set_written_again_is_accepted(tmp_path):
    manifest = make_set(tmp_path / "set", 50)
    loader = open_loader(manifest, batch_size=10, backend="memmap")
    write_manifest(tmp_path / "set", dict(manifest.content))
    assert len(list(loader.epoch(0))) == 5


MANY_SHARDS = """
import gc, os, pathlib, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
gc.disable()
from sbpflow.data import load_manifest, open_loader
from sbpflow.data.stats import compute_stats

manifest = load_manifest(sys.argv[1])
compute_stats(manifest)


def in_use():
    maps = pathlib.Path("/proc/self/maps").read_text().count("train-")
    return maps, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(first):
    for _ in range(50):  # a run of an abandoned read may not have ended yet
        if all(now <= then for now, then in zip(in_use(), first, strict=True)):
            break
        time.sleep(0.1)
    return in_use()


def read(loader):
    after = []
    for epoch in range(8):
        for batch in loader.epoch(epoch):
            if epoch % 2 and batch.step == 3:
                break
        del batch
        after.append(settled(after[0]) if after else in_use())
    for maps, descriptors, threads in after:  # libraries end some of their threads after a while
        assert maps == 300, after
        assert descriptors <= after[0][1], after
        assert threads <= after[0][2], after


for shuffle in ("none", "rows"):
    loader = open_loader(manifest, batch_size=50, backend=sys.argv[2], shuffle=shuffle)
    read(loader)
    loader.close()
print("ok")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_shards_and_epochs_need_no_descriptors_and_no_garbage_collector(tmp_path, backend):
    """Read 300 shards with a limit of 128 open files; every second epoch is abandoned midway."""
    make_set(tmp_path / "set", 3000, shard_rows=10)
    arguments = [str(tmp_path / "set"), backend]
    result = subprocess.run(
        [sys.executable, "-c", MANY_SHARDS, *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.stdout == "ok\n", result.stderr


def test_a_read_only_shard_is_read_and_never_written(tmp_path):
    manifest = make_set(tmp_path / "set", 50)
    path = tmp_path / "set" / "train-0.npy"
    path.chmod(0o400)
    raw = path.read_bytes()
    for batch in open_loader(manifest, batch_size=10, shuffle="none", backend="memmap").epoch(0):
        batch.ids.zero_()
    assert path.read_bytes() == raw


def test_statistics_notice_a_shard_that_is_truncated_while_it_is_read(tmp_path):
    rows = RowFiles(load_manifest(make_set(tmp_path / "set", 50, shard_rows=20).path), "train")
    path = tmp_path / "set" / "train-20.npy"
    path.write_bytes(path.read_bytes()[:-4])
    assert rows.read(0, 20)[:, 3].tolist() == [row * 10 for row in range(20)]
    with pytest.raises(DataError, match=r"train-20\.npy was truncated while"):
        rows.read(15, 50)


def slowed(function):
    """Return ``function``, delayed by 5 ms."""

    def later(*arguments):
        time.sleep(0.005)
        return function(*arguments)

    return later


@pytest.mark.parametrize("shuffle", ["blocks", "rows"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loader_closed_by_another_thread_ends_the_read_with_a_message(
    monkeypatch, row_set, backend, shuffle
):
    """Close the loader while a read waits for a block."""
    monkeypatch.setattr("sbpflow.data.read.blocks.BLOCK_BYTES", 0)
    for name in ("view", "gather"):
        monkeypatch.setattr(SplitRows, name, slowed(getattr(SplitRows, name)))

    def consume(loader, started):
        for _ in loader.epoch(0):
            started.set()

    pool = ThreadPoolExecutor(1)
    for _ in range(10):
        loader = open_loader(row_set(9000), batch_size=20, backend=backend, shuffle=shuffle)
        started = threading.Event()
        thread = pool.submit(consume, loader, started)
        assert started.wait(60)
        loader.close()
        with pytest.raises(DataError, match="this read was ended by"):
            thread.result(60)


def test_every_call_on_a_closed_loader_is_refused(row_set):
    loader = open_loader(row_set(9000), batch_size=700, backend="memmap")
    state = loader.state_dict()
    loader.close()
    for call in (
        lambda: loader.epoch(0),
        lambda: loader.load_state_dict(state),
    ):
        with pytest.raises(DataError, match="this loader is closed; open another"):
            call()
    assert loader.state_dict() == state

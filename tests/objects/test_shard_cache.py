"""Tests the cache of shards: its limit, damaged downloads, several processes, and kills."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sbpflow.config.data_cache import DataCache
from sbpflow.data import load_manifest, open_loader
from sbpflow.data.format import shard_cache
from sbpflow.data.format.manifest_check import SET_FILE
from sbpflow.data.format.verify import verify_set
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files import remote_path
from sbpflow.runtime.files.remote_path import RemotePath
from sbpflow.runtime.files.upload import upload
from tests.data.rows import run_prepare, text_rows, write_rows
from tests.deadlines import Deadline
from tests.quick import quick

SET = RemotePath("s3://bucket/set")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Return a local set with several shards per split."""
    folder = tmp_path_factory.mktemp("local")
    return run_prepare(folder / "set", write_rows(folder / "rows.tsv", text_rows(2000)))


@pytest.fixture
def remote(s3, local, monkeypatch):
    """Return the server that has the same set."""
    monkeypatch.setattr(remote_path, "_FIRST_PAUSE_S", 0.001)
    upload(local.path, SET, owned=SET_FILE, last=("manifest.json",))
    s3.clear()
    return s3


def options(folder: Path, size: float = 1e9) -> DataCache:
    return DataCache(dir=folder, size=f"{size / 1e6:.6f} MB")


def rows_of(manifest, split="train", **more):
    settings = {"batch_size": 300, "backend": "memmap", "seed": 3, **more}
    loader = open_loader(manifest, split=split, **settings)
    batches = [np.concatenate([b.dense.numpy(), b.ids.numpy()], 1) for b in loader.epoch(0)]
    loader.close()
    return np.concatenate(batches)


def shard_requests(server, split):
    pattern = re.compile(rf"/bucket/set/({split}-\d+\.npy)")
    return [match[1] for r in server.requests if (match := pattern.match(r.path))]


def sizes_in(folder):
    for path in [*folder.glob("*/*.npy"), *folder.glob("*/*.npy.partial")]:
        with contextlib.suppress(FileNotFoundError):  # another thread renamed or removed the file
            yield path.stat().st_size


def size_of(manifest, split):
    return sum((manifest.path / shard.file).stat().st_size for shard in manifest.shards(split))


@pytest.mark.parametrize("shuffle", quick(["runs", "none"], lambda n: n == 0))
def test_rows_from_a_store_equal_local_rows(remote, local, tmp_path, shuffle):
    assert len(local.shards("train")) > 4
    manifest = load_manifest(SET, cache=options(tmp_path / "sets"))
    assert manifest.fingerprint == local.fingerprint
    assert manifest.origin == SET
    for _ in range(2):  # the second iteration reads from the cache
        rows = rows_of(manifest, shuffle=shuffle)
        assert np.array_equal(rows, rows_of(local, shuffle=shuffle))
    wanted = sorted(shard.file for shard in local.shards("train"))
    assert sorted(set(shard_requests(remote, "train"))) == wanted
    # ``get_file`` requests a file's size before its content.
    assert len(shard_requests(remote, "train")) <= 2 * len(wanted)


@pytest.mark.slow
def test_a_small_cache_streams_rows_in_order(remote, local, tmp_path):
    limit = max((local.path / s.file).stat().st_size for s in local.shards("train")) * 2.5
    manifest = load_manifest(SET, cache=options(tmp_path / "sets", limit))
    loader = open_loader(manifest, batch_size=300, backend="memmap", shuffle="none")
    expected = open_loader(local, batch_size=300, backend="memmap", shuffle="none")
    for batch, other in zip(loader.epoch(0), expected.epoch(0), strict=True):
        assert np.array_equal(batch.ids.numpy(), other.ids.numpy())
        assert sum(sizes_in(tmp_path / "sets")) <= limit
    loader.close()


@pytest.mark.slow
def test_an_unfinished_download_keeps_its_reserved_space(remote, local, tmp_path, monkeypatch):
    first, second = (shard.file for shard in local.shards("train")[:2])
    limit = max((local.path / name).stat().st_size for name in (first, second)) * 1.5
    cache = load_manifest(SET, cache=options(tmp_path, limit)).cache
    cache.get_all(())  # nothing to fetch: the manifest's own files are cached
    download, started, goes_on = RemotePath.download, [], threading.Event()

    def slow_download(self, target):
        target.write_bytes(b"")  # like a store's client, create an empty file first
        started.append(self.name)
        assert goes_on.wait(60)
        download(self, target)

    monkeypatch.setattr(RemotePath, "download", slow_download)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(cache.get_all, [first])
        deadline = Deadline(60)
        while not started and not deadline.over():
            time.sleep(0.01)
        other = pool.submit(cache.get_all, [second])
        time.sleep(0.3)
        assert started == [first]
        goes_on.set()
        one.result(60), other.result(60)
    assert started == [first, second]
    assert sum(sizes_in(tmp_path)) <= limit


@pytest.mark.slow
def test_a_shuffled_split_must_fit_into_the_cache(remote, local, tmp_path):
    manifest = load_manifest(SET, cache=options(tmp_path, size_of(local, "train") - 1))
    with pytest.raises(ConfigError, match=r"data\.cache\.size: .* use at least .*shuffle=none"):
        rows_of(manifest, shuffle="runs")


@pytest.mark.slow
def test_shards_that_are_mapped_are_not_removed(remote, local, tmp_path):
    limit = size_of(local, "train") + 1000
    manifest = load_manifest(SET, cache=options(tmp_path, limit))
    loader = open_loader(manifest, batch_size=300, backend="memmap", shuffle="runs")
    with pytest.raises(
        ConfigError, match=r"data\.cache\.size: the files in use and another .* exceed"
    ):
        rows_of(manifest, "val", shuffle="none")
    assert len(list(loader.epoch(0))) == loader.num_steps
    loader.close()


@pytest.mark.slow
def test_a_damaged_download_is_repeated_and_then_reported(remote, local, tmp_path):
    name = local.shards("train")[1].file
    raw = (SET / name).read_bytes()
    (SET / name).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    manifest = load_manifest(SET, cache=options(tmp_path))
    with pytest.raises(DataError, match=rf"{SET / name}: all 3 downloads differ from the manifest"):
        rows_of(manifest)
    assert not [*tmp_path.glob("*/*.partial"), *tmp_path.glob("*/*.reserved")]
    (SET / name).unlink()
    with pytest.raises(DataError, match=rf"{SET / name}: missing"):
        rows_of(manifest)


@pytest.mark.slow
def test_truncated_and_refused_reads_are_repeated(remote, local, tmp_path):
    seen: dict[str, int] = {}

    def fault(request):
        seen[request.path] = seen.get(request.path, 0) + 1
        return ("cut", "503", "")[min(seen[request.path], 3) - 1]

    remote.fault = fault
    manifest = load_manifest(SET, cache=options(tmp_path))
    assert np.array_equal(rows_of(manifest), rows_of(local))


@pytest.mark.slow
def test_verify_reads_the_whole_set(remote, local, tmp_path):
    verify_set(load_manifest(SET, cache=options(tmp_path)), 2)
    (SET / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"s3://bucket/set has no manifest\.json"):
        load_manifest(SET)


@pytest.mark.slow
def test_threads_share_downloads_and_leftovers_of_kills_are_replaced(remote, local, tmp_path):
    caches = [load_manifest(SET, cache=options(tmp_path)).cache for _ in range(2)]
    name = local.shards("train")[0].file
    for suffix in ("partial", "reserved"):
        (caches[0].folder / f"{name}.{suffix}").write_bytes(b"of a killed process")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cache: cache.get_split("train"), caches))
    gets = [r.path for r in remote.requests if r.method == "GET" and "/train-" in r.path]
    assert sorted(gets) == sorted(f"/bucket/set/{shard.file}" for shard in local.shards("train"))
    assert not [*tmp_path.glob("*/*.partial"), *tmp_path.glob("*/*.reserved")]


def test_a_reservation_of_a_killed_process_does_not_take_up_room(local, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_cache, "_WAIT_S", -1)  # to wait is an error
    url = RemotePath("memory://killed/set")
    upload(local.path, url, owned=SET_FILE, last=("manifest.json",))
    limit = size_of(local, "train") + 1
    cache = load_manifest(url, cache=options(tmp_path, limit)).cache
    *names, last = [shard.file for shard in local.shards("train")]
    cache.get_all(names)
    with (cache.folder / f"{last}.reserved").open("wb") as file:
        file.truncate((local.path / last).stat().st_size)
    cache.get_split("train")  # the other files are in use
    assert (cache.folder / last).is_file()
    assert not [*tmp_path.glob("*/*.reserved")]


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_reservation_of_a_killed_process_evicts_no_file(local, tmp_path, split):
    url = RemotePath(f"memory://evicted/{split}")
    upload(local.path, url, owned=SET_FILE, last=("manifest.json",))
    cache = load_manifest(url, cache=options(tmp_path, size_of(local, "train") + 1)).cache
    *names, last = [shard.file for shard in local.shards("train")]
    cache.get_all(names)
    reserved = last if split == "train" else local.shards(split)[0].file
    with (cache.folder / f"{reserved}.reserved").open("wb") as file:
        file.truncate((local.path / last).stat().st_size)
    cache.get_all([last])
    assert all((cache.folder / name).is_file() for name in [*names, last])


def test_files_of_the_user_in_the_cache_folder_are_not_removed(local, tmp_path):
    """The folder may contain prepared sets: only the files of sets at URLs make room."""
    url = RemotePath("memory://shared/set")
    upload(local.path, url, owned=SET_FILE, last=("manifest.json",))
    own = tmp_path / "monday"
    shutil.copytree(local.path, own)
    cache = load_manifest(url, cache=options(tmp_path, size_of(local, "train") + 1)).cache
    for split in ("train", "val", "test"):
        cache.get_all([shard.file for shard in local.shards(split)])
    verify_set(load_manifest(own), 1)
    assert not all((cache.folder / shard.file).exists() for shard in local.shards("train"))


def test_an_unknown_split_is_refused(local, tmp_path):
    url = RemotePath("memory://unknown/set")
    upload(local.path, url, owned=SET_FILE, last=("manifest.json",))
    with pytest.raises(DataError, match="split 'dev' is not one of train, val, test"):
        rows_of(load_manifest(url, cache=options(tmp_path)), "dev")


def _read(folder, start):
    manifest = load_manifest(SET, cache=options(folder))
    while time.time() < start:
        pass
    rows_of(manifest)


@pytest.mark.slow
def test_ranks_of_a_host_share_downloads_and_survive_a_kill(remote, local, tmp_path):
    context = multiprocessing.get_context("spawn")
    names = [shard.file for shard in local.shards("train")]
    victim = context.Process(target=_read, args=(tmp_path, 0.0))

    def kill(request):
        if request.method == "GET" and names[2] in request.path and victim.is_alive():
            os.kill(victim.pid, signal.SIGKILL)
            return "drop"
        return ""

    remote.fault = kill
    victim.start()
    victim.join(120)
    assert victim.exitcode == -signal.SIGKILL
    remote.clear()
    ranks = [context.Process(target=_read, args=(tmp_path, time.time() + 4)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    deadline = Deadline(120)
    while any(rank.is_alive() for rank in ranks):
        assert not deadline.over()
        time.sleep(0.05)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    gets = [r.path for r in remote.requests if r.method == "GET" and "train-" in r.path]
    assert len(gets) == len(set(gets)), "a shard was downloaded twice"
    shutil.rmtree(tmp_path)

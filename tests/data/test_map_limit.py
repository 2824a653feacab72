"""Tests splits with more shards than a process may map: batches are equal, and the number of maps
is bounded.
"""

import gc
from itertools import product
from pathlib import Path

import pytest
import torch

from sbpflow.data import open_loader
from sbpflow.data.format.manifest import write_manifest
from sbpflow.data.format.shards import SplitRows
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.read.order import SHUFFLES
from sbpflow.errors import DataError
from tests.data import full_set
from tests.data.backends import BACKENDS, INSTALLED
from tests.data.conftest import make_set
from tests.data.rows import run_prepare, text_rows, write_rows
from tests.data.test_read_lists import check
from tests.quick import quick

MAPS = 40
"""Maximum number of maps per loader; the process's limit is four times as high."""


FEW = (("rows", "dali"),)
COMBINATIONS = [
    pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in FEW))
    for pair in product(SHUFFLES, INSTALLED)
]


@pytest.fixture
def few_maps(monkeypatch):
    """Simulate a system with a low limit on memory maps per process."""
    limit = "sbpflow.data.format.mapped_rows.map_count_limit"
    monkeypatch.setattr(limit, lambda: 4 * MAPS, raising=False)


@pytest.fixture
def one_by_one(monkeypatch):
    """Read each batch as a separate block, and limit the number of blocks that are read ahead."""
    monkeypatch.setattr("sbpflow.data.read.blocks.BLOCK_BYTES", 0)


def num_mapped(folder):
    """Return the number of this process's maps of files in ``folder``."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(str(folder))


@pytest.fixture(scope="module")
def tiny_shards(tmp_path_factory):
    return make_set(tmp_path_factory.mktemp("tiny") / "set", 1500, shard_rows=5)


@pytest.mark.parametrize(("shuffle", "backend"), COMBINATIONS)
def test_batches_equal_those_of_large_shards_with_few_maps(
    tiny_shards, row_set, few_maps, backend, shuffle
):
    settings = {"batch_size": 130, "backend": backend, "shuffle": shuffle}
    gc.collect()  # an earlier test's loader may still map this folder
    loader = open_loader(tiny_shards, **settings)
    assert 0 < num_mapped(tiny_shards.path) <= MAPS
    batches, most = [], 0
    for epoch in (0, 1):
        for batch in loader.epoch(epoch):
            most = max(most, num_mapped(tiny_shards.path))
            batches.append(batch)
    assert most <= MAPS
    whole = open_loader(row_set(1500), **settings)
    expected = [batch for epoch in (0, 1) for batch in whole.epoch(epoch)]
    assert len(batches) == len(expected) == 24
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch.ids, other.ids)
        assert torch.equal(batch.dense, other.dense)
        assert torch.equal(batch.labels, other.labels)
    loader.close()
    del batches, batch
    gc.collect()
    assert num_mapped(tiny_shards.path) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle", quick(SHUFFLES, lambda n: n % 2 == 0))
def test_lists_and_side_columns_in_unmapped_files(
    tmp_path, monkeypatch, few_maps, backend, shuffle
):
    monkeypatch.setattr(full_set, "SHARD_ROWS", 70)
    manifest, rows = full_set.make_full_set(tmp_path / "set")
    loader = open_loader(manifest, batch_size=900, backend=backend, shuffle=shuffle)
    assert 9 <= num_mapped(manifest.path) <= MAPS  # the set has 10 x 72 files
    seen = [number for batch in loader.epoch(1) for number in check(batch, rows)]
    assert sorted(seen) == list(range(full_set.NUM_ROWS))


@pytest.mark.usefixtures("few_maps", "one_by_one")
@pytest.mark.parametrize("shuffle", ["none", "runs"])
def test_replacing_a_set_while_its_files_are_read_ends_the_read(tmp_path, shuffle):
    manifest = make_set(tmp_path / "set", 1500, shard_rows=5)
    loader = open_loader(manifest, batch_size=100, backend="memmap", shuffle=shuffle)
    batches = loader.epoch(0)
    next(batches)
    write_manifest(manifest.path, {**manifest.content, "source": "another"})
    with pytest.raises(DataError, match="replaced since it was opened"):
        list(batches)


@pytest.mark.usefixtures("few_maps", "one_by_one")
def test_replacing_a_set_by_an_equal_one_does_not_end_the_read(tmp_path):
    manifest = make_set(tmp_path / "set", 1500, shard_rows=5)
    loader = open_loader(manifest, batch_size=100, backend="memmap", shuffle="rows")
    expected = [batch.ids.clone() for batch in loader.epoch(0)]
    batches = loader.epoch(0)
    actual = [next(batches).ids]
    for path in make_set(tmp_path / "again", 1500, shard_rows=5).path.iterdir():
        path.replace(manifest.path / path.name)
    actual += [batch.ids for batch in batches]
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("shuffle", ["none", "runs"])
def test_a_truncated_shard_is_named_when_an_epoch_begins_and_when_it_is_read(
    tmp_path, few_maps, shuffle
):
    manifest = make_set(tmp_path / "set", 1500, shard_rows=5)
    loader = open_loader(manifest, batch_size=100, backend="memmap", shuffle=shuffle)
    batches = loader.epoch(0)
    path = tmp_path / "set" / "train-1495.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"train-1495\.npy was truncated while it was read"):
        list(batches)
    wanted = r"train-1495\.npy does not match the manifest, which lists 5 rows"
    with pytest.raises(DataError, match=wanted):
        loader.epoch(0)


def test_shards_are_not_mapped_twice_if_rows_are_copied(row_set):
    manifest = row_set(9000)
    for shuffle, times in (("runs", 1), ("none", 2)):
        loader = open_loader(manifest, batch_size=500, backend="memmap", shuffle=shuffle)
        gc.collect()  # the loader of the previous iteration
        before = num_mapped(manifest.path)
        batches = loader.epoch(0)
        next(batches)
        assert num_mapped(manifest.path) == times * before > 0
        loader.close()
        del batches


def test_ranges_of_rows_are_read_from_mapped_and_unmapped_files(tiny_shards):
    rows = SplitRows(tiny_shards, "train", 7)
    out = rows.new(100)
    rows.read(20, 120, out)
    assert out[:, 3].tolist() == [10 * row for row in range(20, 120)]
    assert rows.view(30, 35) is not None
    assert rows.view(35, 40) is None  # rows of the first unmapped file


def test_pieces_grow_with_the_input():
    options = PrepareOptions(inputs=(Path("day_0"),), output=Path("set"))
    totals = (0, 1 << 38, (1 << 38) + 1, 1 << 40, 1 << 44)
    sizes = [options.sized_for(total).piece_bytes >> 20 for total in totals]
    assert sizes == [32, 32, 64, 128, 128]


@pytest.mark.parametrize(("suffix", "most"), [("", 6), (".gz", 12)])
def test_a_large_input_has_few_large_shards(tmp_path, monkeypatch, suffix, most):
    rows = write_rows(tmp_path / f"rows.tsv{suffix}", text_rows(600))  # 120 kB, gzipped 22 kB
    monkeypatch.setattr("sbpflow.data.prepare.options.MAX_PIECES", 4)
    manifest = run_prepare(tmp_path / "set", rows, piece_bytes=4096)
    assert 2 <= sum(len(manifest.shards(split)) for split in ("train", "val", "test")) <= most

"""Tests that counts do not depend on the memory limit and that denser tables find the same ids."""

import numpy as np
import polars as pl
import pytest

from sbpflow.data.format.ids import NarrowIdTable, WideIdTable
from sbpflow.data.prepare.distinct import count_fields, spilled
from sbpflow.errors import DataError


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_counts_do_not_depend_on_the_size_of_a_pass(tmp_path, kind):
    rng = np.random.default_rng(3)
    high = np.iinfo(kind).max
    many = pl.Series("key", rng.integers(0, high, 5000, dtype=kind)[rng.integers(0, 5000, 20_000)])
    many = many.set(pl.Series(rng.random(20_000) < 0.1), None)
    few = pl.Series("key", (rng.random(20_000) ** 4 * 50).astype(kind))
    checks = pl.Series("check", (few.to_numpy() % 7 + (np.arange(20_000) % 2)).astype(np.uint32))
    frames = {"many": many.to_frame(), "few": pl.DataFrame([few, checks])}
    rows = {name: frame.lazy for name, frame in frames.items()}
    whole = dict(count_fields(rows, 20_000, tmp_path / "a"))
    parts = dict(count_fields(rows, 20_000, tmp_path / "b", pass_values=700))
    assert spilled(tmp_path / "a") == []
    # These are keys and counts of both fields, and the smallest and largest check of one field.
    assert len(spilled(tmp_path / "b")) == 6
    for name, series in (("many", many), ("few", few)):
        one_pass, by_ranges = whole[name], parts[name]
        keys, counts = np.unique(series.drop_nulls().to_numpy(), return_counts=True)
        assert np.array_equal(one_pass.keys, keys)
        assert np.array_equal(one_pass.counts, counts)
        assert np.array_equal(by_ranges.keys, keys)
        assert np.array_equal(by_ranges.counts, counts)
        assert one_pass.missing == by_ranges.missing == series.null_count()
        collisions = 0 if name == "many" else len(keys)
        assert one_pass.collisions == by_ranges.collisions == collisions
    assert np.array_equal(whole["few"].checks, parts["few"].checks)


def test_sums_of_several_machines_counts_do_not_overflow(tmp_path):
    def counted(*numbers):
        lengths = pl.Series(numbers, dtype=pl.UInt32)
        frame = pl.DataFrame({"key": pl.Series([7, 7], dtype=pl.UInt32), "len": lengths})
        return dict(count_fields({"C1": frame.lazy}, 2, tmp_path / "s"))["C1"]

    assert counted(2**31, 2**31 - 1).counts.tolist() == [2**32 - 1]
    with pytest.raises(DataError, match="a value occurs 4294967296 times in train"):
        counted(2**31, 2**31)


@pytest.mark.parametrize("table", [NarrowIdTable, WideIdTable])
def test_a_table_filled_to_two_thirds_finds_the_same_ids(monkeypatch, table):
    rng = np.random.default_rng(5)
    kind = np.uint32 if table is NarrowIdTable else np.uint64
    keys = np.unique(rng.integers(0, np.iinfo(kind).max, 5000, dtype=kind))
    ids = rng.permutation(len(keys)).astype(np.int32) + 2
    counts = rng.integers(1, 100, len(keys))
    asked = np.concatenate([keys, keys + kind(1)])
    loose = table(keys, ids, counts).lookup(asked)
    monkeypatch.setattr("sbpflow.data.format.ids._LARGE", 100)
    monkeypatch.setattr("sbpflow.data.format.ids._INSERTED", 300)
    assert np.array_equal(table(keys, ids, counts).lookup(asked), loose)
    assert np.array_equal(loose[: len(keys)], ids)

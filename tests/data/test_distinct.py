"""Tests that counts do not depend on groups or ranges, and that nearly full hash tables find the
same ids.
"""

import numpy as np
import polars as pl
import pytest

from sbpflow.data.format.ids import IdTable
from sbpflow.data.prepare.distinct import (
    count_group,
    merge_range,
    ranges_of,
    read_merged,
    record_of,
)
from sbpflow.data.prepare.workspace import DamagedWork


def counted(folder, groups, most, monkeypatch):
    """Count values by field in groups of frames, and merge the counts in ranges of about ``most``
    values. Return the counts and the numbers of ranges.
    """
    monkeypatch.setattr("sbpflow.data.prepare.distinct.RANGE_VALUES", most)
    monkeypatch.setattr("sbpflow.data.prepare.distinct._SAMPLED", 16)
    folder.mkdir()
    files = [folder / f"{number}.counts" for number in range(len(groups))]
    records = [
        count_group({name: frame.lazy() for name, frame in group.items()}, 1, file, {})
        for group, file in zip(groups, files, strict=True)
    ]
    for file in files:  # merging must not read these records of all fields again for every range
        record_of(file).unlink()
    ranges = {name: ranges_of(name, records) for name in groups[0]}
    for name in groups[0]:
        for keys in ranges[name]:
            merge_range(keys, folder, files)
    numbers = {name: len(of) for name, of in ranges.items()}
    return {name: read_merged(name, numbers[name], folder) for name in groups[0]}, numbers


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_counts_do_not_depend_on_groups_and_ranges(tmp_path, kind, monkeypatch):
    rng = np.random.default_rng(3)
    high = np.iinfo(kind).max
    many = pl.Series("key", rng.integers(0, high, 5000, dtype=kind)[rng.integers(0, 5000, 20_000)])
    many = many.set(pl.Series(rng.random(20_000) < 0.1), None)
    few = pl.Series("key", (rng.random(20_000) ** 4 * 50).astype(kind))
    checks = pl.Series("check", (few.to_numpy() % 7 + (np.arange(20_000) % 2)).astype(np.uint32))
    frames = {"many": many.to_frame(), "few": pl.DataFrame([few, checks])}
    thirds = [slice(0, 9000), slice(9000, 9001), slice(9001, None)]
    groups = [{name: frame[part] for name, frame in frames.items()} for part in thirds]
    whole, numbers = counted(tmp_path / "a", [frames], 1 << 20, monkeypatch)
    assert numbers == {"many": 1, "few": 1}
    parts, numbers = counted(tmp_path / "b", groups, 700, monkeypatch)
    assert numbers["many"] > 10
    for name, series in (("many", many), ("few", few)):
        keys, counts = np.unique(series.drop_nulls().to_numpy(), return_counts=True)
        collisions = 0 if name == "many" else len(keys)
        for each in (whole[name], parts[name]):
            assert np.array_equal(each.keys, keys)
            assert np.array_equal(each.counts, counts)
            assert each.missing == series.null_count()
            assert each.collisions == collisions
    assert np.array_equal(whole["few"].checks, parts["few"].checks)


def test_counts_can_exceed_32_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("sbpflow.data.prepare.distinct.pl.len", lambda: pl.lit(2**32 - 1))
    group = {"C1": pl.DataFrame({"key": pl.Series([7, 9], dtype=pl.UInt32)})}
    counts, _ = counted(tmp_path / "a", [group, group], 1 << 20, monkeypatch)
    assert counts["C1"].counts.tolist() == [2**33 - 2, 2**33 - 2]


def test_damaged_counts_are_refused(tmp_path, monkeypatch):
    group = {"C1": pl.DataFrame({"key": pl.Series(range(300), dtype=pl.UInt32)})}
    record = count_group({"C1": group["C1"].lazy()}, 1, tmp_path / "0.counts", {})
    counted(tmp_path / "a", [group], 1 << 20, monkeypatch)
    for name in ("0.counts", "C1.range-000000"):
        file = tmp_path / "a" / name
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 4
        file.write_bytes(raw)
    (tmp_path / "a" / "C1.range-000000.json").rename(tmp_path / "record")
    keys = ranges_of("C1", [record])[0]
    with pytest.raises(DamagedWork, match=r"0\.counts is damaged"):
        merge_range(keys, tmp_path / "a", [tmp_path / "a" / "0.counts"])
    (tmp_path / "record").rename(tmp_path / "a" / "C1.range-000000.json")
    with pytest.raises(DamagedWork, match=r"C1\.range-000000 is damaged"):
        read_merged("C1", 1, tmp_path / "a")


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_a_table_filled_to_two_thirds_finds_the_same_ids(monkeypatch, kind):
    rng = np.random.default_rng(5)
    keys = np.unique(rng.integers(0, np.iinfo(kind).max, 5000, dtype=kind))
    ids = rng.permutation(len(keys)).astype(np.int32) + 2
    counts = rng.integers(1, 100, len(keys))
    asked = np.concatenate([keys, keys + kind(1)])
    loose = IdTable(keys, ids, counts).lookup(asked)
    monkeypatch.setattr("sbpflow.data.format.ids._LARGE", 100)
    monkeypatch.setattr("sbpflow.data.format.ids._INSERTED", 300)
    assert np.array_equal(IdTable(keys, ids, counts).lookup(asked), loose)
    assert np.array_equal(loose[: len(keys)], ids)

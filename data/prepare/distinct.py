"""Count the occurrences of each value of each vocabulary in train, in bounded memory.

Each group of pieces is counted separately, and its counts are written to one file in key order. The
counts of all groups are then merged by ranges of keys. Groups and ranges depend only on the rows.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.ids import Keys
from sbpflow.data.prepare.workspace import (
    DamagedWork,
    read_record,
    require_record,
    write_record,
)
from sbpflow.runtime.files.atomic_file import replacing

RANGE_VALUES = 1 << 22
"""Approximate maximum number of values to merge at a time"""
_BLOCK = 1 << 20
_SAMPLED = 1 << 14
"""Number of values per sampled key; the ranges are derived from the sample"""
_COLUMNS: Mapping[str, str] = {"len": "<i8", "least": "<u4", "most": "<u4"}
COUNTS_KEYS = ("fields", "padding")
MERGED_KEYS = ("values", "missing", "key", "checked", "crc32")


@dataclass(frozen=True)
class FieldCounts:
    """The distinct values of a vocabulary in train, with their counts, in key order."""

    keys: Keys
    counts: NDArray[np.int64]
    checks: NDArray[np.uint32] | None
    """For each key, the smallest check of the strings with this key"""
    most: NDArray[np.uint32] | None
    """For each key, the largest check of the strings with this key"""
    missing: int

    @property
    def collisions(self) -> int:
        """Return the number of keys shared by several strings."""
        if self.checks is None or self.most is None:
            return 0
        starts = range(0, len(self.checks), _BLOCK)
        pairs = ((self.checks[i : i + _BLOCK], self.most[i : i + _BLOCK]) for i in starts)
        return sum(int(np.count_nonzero(least != most)) for least, most in pairs)


NO_COUNTS = FieldCounts(np.empty(0, np.uint64), np.empty(0, np.int64), None, None, 0)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The range low <= key < high of the values of a vocabulary. None means no bound."""

    name: str
    number: int
    low: int | None
    high: int | None
    entries: tuple[Mapping[str, Any], ...]
    """The entry of the vocabulary in each group's record, without the sample"""


def count_group(
    rows: Mapping[str, pl.LazyFrame], at_once: int, path: Path, padding: Mapping[str, int]
) -> dict[str, Any]:
    """Count the values of every vocabulary in a group, write the counts to ``path``, and return
    their record.

    ``rows`` maps each vocabulary to a frame with one row per value and the columns ``key`` (null if
    missing) and ``check`` (strings only). ``at_once`` is the number of vocabularies to count at a
    time.
    The record also contains ``padding``, the number of missing ids that pad rows of fields with a
    fixed number of ids.
    """
    fields: dict[str, Any] = {}
    names = list(rows)
    with replacing(path) as partial, partial.open("wb") as file:
        for first in range(0, len(names), at_once):
            some = names[first : first + at_once]
            frames = pl.collect_all([_grouped(rows[name]) for name in some], engine="streaming")
            for name, frame in zip(some, frames, strict=True):
                values, missing = _in_key_order(frame)
                start, sample = file.tell(), values["key"].gather_every(_SAMPLED, _SAMPLED // 2)
                more = {"missing": missing, "start": start, "sample": sample.to_list()}
                fields[name] = {**_write(file, values), **more}
    record = {"fields": fields, "padding": dict(padding)}
    write_record(record_of(path), record)
    return record


def record_of(path: Path) -> Path:
    """Return the path of the record that belongs to a file of counts."""
    return path.with_name(f"{path.name}.json")


def ranges_of(name: str, records: Iterable[Mapping[str, Any]]) -> list[KeyRange]:
    """Divide the keys of a vocabulary into ranges with about equal numbers of values."""
    entries = [record["fields"][name] for record in records]
    passes = -(-sum(entry["values"] for entry in entries) // RANGE_VALUES)
    sample = sorted(key for entry in entries for key in entry["sample"])
    places = (len(sample) * k // passes for k in range(1, passes)) if sample else ()
    bounds = sorted({sample[place] for place in places})
    limits = zip([None, *bounds], [*bounds, None], strict=True)
    known = tuple({k: v for k, v in entry.items() if k != "sample"} for entry in entries)
    return [KeyRange(name, number, low, high, known) for number, (low, high) in enumerate(limits)]


def merge_range(keys: KeyRange, folder: Path, groups: Sequence[Path]) -> dict[str, Any]:
    """Add up the counts of a range of keys over the files of all ``groups``; return the record of
    the result.
    """
    path = folder / f"{keys.name}.range-{keys.number:06d}"
    record = read_record(record_of(path), MERGED_KEYS)
    if record is not None and path.is_file():
        return record
    parts: list[pl.DataFrame] = []
    missing = 0
    for group, entry in zip(groups, keys.entries, strict=True):
        arrays = _mapped(group, entry)
        if keys.number == 0:  # the checksum of the whole file is verified once, by the first range
            missing += entry["missing"]
            _check(arrays, entry, group)
        start, stop = _places(arrays["key"], keys)
        parts.append(pl.DataFrame({name: array[start:stop] for name, array in arrays.items()}))
    whole, _ = _in_key_order(_grouped(pl.concat(parts).lazy()).collect())
    with replacing(path) as partial, partial.open("wb") as file:
        entry = _write(file, whole)
    record = {**entry, "missing": missing}
    write_record(record_of(path), record)
    return record


def read_merged(name: str, num_ranges: int, folder: Path) -> FieldCounts:
    """Map the files of a vocabulary's merged ranges; return its counts."""
    columns: dict[str, list[NDArray[Any]]] = {}
    missing = 0
    for number in range(num_ranges):
        path = folder / f"{name}.range-{number:06d}"
        record = require_record(record_of(path), MERGED_KEYS)
        missing += record["missing"]
        arrays = _mapped(path, record)
        _check(arrays, record, path)
        for column, array in arrays.items():
            columns.setdefault(column, []).append(array)
    whole = {c: arrays[0] if num_ranges == 1 else np.concatenate(arrays)
             for c, arrays in columns.items()}  # fmt: skip
    return FieldCounts(whole["key"], whole["len"], whole.get("least"), whole.get("most"), missing)


def _write(file: IO[bytes], values: pl.DataFrame) -> dict[str, Any]:
    """Write the columns to ``file`` one after another; return their entry for the record."""
    checksum = 0
    entry = {"key": values["key"].to_numpy().dtype.str, "checked": "least" in values.columns}
    for column in _columns(entry):
        raw = np.ascontiguousarray(values[column].to_numpy()).view(np.uint8).data
        checksum = zlib.crc32(raw, checksum)
        file.write(raw)
    return {**entry, "values": len(values), "crc32": checksum}


def _check(arrays: "Mapping[str, NDArray[Any]]", entry: Mapping[str, Any], path: Path) -> None:
    checksum = 0
    for array in arrays.values():
        checksum = zlib.crc32(array.view(np.uint8).data, checksum)
    if checksum != entry["crc32"]:
        raise DamagedWork(f"{path} is damaged")


def _columns(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the names and dtypes of an entry's columns, in the order of the file."""
    columns = {"key": entry["key"], **_COLUMNS}
    return columns if entry["checked"] else {name: columns[name] for name in ("key", "len")}


def _mapped(path: Path, entry: Mapping[str, Any]) -> "dict[str, NDArray[Any]]":
    """Map the columns that an entry describes in a file of counts."""
    arrays: dict[str, NDArray[Any]] = {}
    at, number = entry.get("start", 0), entry["values"]
    try:
        for name, dtype in _columns(entry).items():
            arrays[name] = (
                np.memmap(path, dtype=dtype, mode="r", offset=at, shape=(number,))
                if number
                else np.empty(0, dtype=dtype)
            )
            at += number * np.dtype(dtype).itemsize
    except (OSError, ValueError) as error:
        raise DamagedWork(f"{path} is missing or damaged") from error
    return arrays


def _places(keys: "NDArray[Any]", limits: KeyRange) -> tuple[int, int]:
    """Return the start and stop of a range of keys in ascending ``keys``."""
    kind = keys.dtype.type
    start = 0 if limits.low is None else int(np.searchsorted(keys, kind(limits.low)))
    stop = len(keys) if limits.high is None else int(np.searchsorted(keys, kind(limits.high)))
    return start, stop


def _grouped(rows: pl.LazyFrame) -> pl.LazyFrame:
    columns = rows.collect_schema().names()
    number = pl.col("len").sum() if "len" in columns else pl.len().cast(pl.Int64)
    wanted = [number.alias("len")]
    if "check" in columns:
        wanted += [pl.col("check").min().alias("least"), pl.col("check").max().alias("most")]
    elif "least" in columns:
        wanted += [pl.col("least").min(), pl.col("most").max()]
    return rows.group_by("key").agg(wanted)


def _in_key_order(frame: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return the values in key order, and the number of missing values."""
    missing = int(frame.filter(pl.col("key").is_null())["len"].sum())
    return frame.drop_nulls("key").sort("key"), missing

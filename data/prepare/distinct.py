"""Count the occurrences of each value of a field in the train part, in bounded memory.

Fields with few distinct values are counted together in one pass. A field with too many values for
one pass is counted in key ranges, and each range is written to a file before the next is counted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.ids import Keys
from sbpflow.errors import DataError

PASS_VALUES = 1 << 22
"""Maximum number of distinct values counted in one pass over all its fields"""
_STEP = 32
_BLOCK = 1 << 20
_MAX_COUNT = 2**32 - 1
_SAMPLED_ROWS = 1 << 20
_PARTS = ("k", "c", "h", "m")
"""File suffixes of spilled keys, counts, smallest checks and largest checks"""

Rows = Callable[[], pl.LazyFrame]


@dataclass(frozen=True)
class FieldCounts:
    """Contains the distinct values of a field in the train part, in key order."""

    keys: Keys
    counts: NDArray[np.uint32]
    checks: NDArray[np.uint32] | None
    """Smallest check among the strings with each key"""
    most: NDArray[np.uint32] | None
    """Largest check among the strings with each key"""
    missing: int

    @property
    def collisions(self) -> int:
        """Return the number of keys shared by several strings."""
        if self.checks is None or self.most is None:
            return 0
        starts = range(0, len(self.checks), _BLOCK)
        pairs = ((self.checks[i : i + _BLOCK], self.most[i : i + _BLOCK]) for i in starts)
        return sum(int(np.count_nonzero(least != most)) for least, most in pairs)

    def frames(self) -> Iterator[pl.DataFrame]:
        """Yield keys and counts in blocks of rows that ``count_fields`` can merge."""
        columns = {"key": self.keys, "len": self.counts, "least": self.checks, "most": self.most}
        present = {name: column for name, column in columns.items() if column is not None}
        for start in range(0, max(len(self.keys), 1), _BLOCK):
            yield pl.DataFrame({n: column[start : start + _BLOCK] for n, column in present.items()})


def count_fields(
    rows: Mapping[str, Rows], num_rows: int, spill: Path, pass_values: int = PASS_VALUES
) -> Iterator[tuple[str, FieldCounts]]:
    """Yield the counts of every field in any order.

    ``rows`` maps each field to frames with one row per value and the columns ``key`` (null if
    missing) and ``check`` (strings only), or to the rows of ``FieldCounts.frames``. ``num_rows`` is
    the approximate number of rows. Counts beyond the memory limit are written to files
    ``spill``.NAME, which the caller must remove.
    """
    estimates = dict.fromkeys(rows, min(num_rows, pass_values // max(len(rows), 1)))
    if num_rows * len(rows) > pass_values:
        # Multiplying the sample's distinct values by the sampling stride gives an upper bound.
        every = [lazy().select(pl.col("key").gather_every(_STEP)) for lazy in rows.values()]
        sampled = pl.collect_all([rows.select(pl.col("key").n_unique()) for rows in every])
        estimates = {
            name: min(num_rows, _STEP * int(frame.item()))
            for name, frame in zip(rows, sampled, strict=True)
        }
    for names in _passes(estimates, pass_values):
        if len(names) == 1 and estimates[names[0]] > pass_values:
            passes = -(-estimates[names[0]] // pass_values)
            yield names[0], _by_ranges(rows[names[0]], num_rows, passes, spill, names[0])
        else:
            queries = [_grouped(rows[name]()) for name in names]
            frames = pl.collect_all(queries, engine="streaming")
            for name, frame in zip(names, frames, strict=True):
                yield name, _from_frame(frame)
            del frames  # free memory before the next pass


def _passes(estimates: Mapping[str, int], pass_values: int) -> Iterator[list[str]]:
    """Yield groups of fields; each group is counted in one pass."""
    names: list[str] = []
    total = 0
    for name, number in sorted(estimates.items(), key=lambda item: item[1]):
        if names and total + number > pass_values:
            yield names
            names, total = [], 0
        names.append(name)
        total += number
    if names:
        yield names


def _grouped(rows: pl.LazyFrame) -> pl.LazyFrame:
    columns = rows.collect_schema().names()
    # Cast first, because Polars sums 32-bit integers in 32 bits, which could overflow.
    number = pl.col("len").cast(pl.UInt64).sum() if "len" in columns else pl.len()
    wanted = [number.alias("len")]
    if "check" in columns:
        wanted += [pl.col("check").min().alias("least"), pl.col("check").max().alias("most")]
    elif "least" in columns:
        wanted += [pl.col("least").min(), pl.col("most").max()]
    return rows.group_by("key").agg(wanted)


def _from_frame(frame: pl.DataFrame) -> FieldCounts:
    missing = int(frame.filter(pl.col("key").is_null())["len"].sum())
    values = frame.drop_nulls("key").sort("key")
    if len(values) and int(values["len"].to_numpy().max()) > _MAX_COUNT:
        raise DataError(
            f"--input: a value occurs {values['len'].max()} times in train, but the maximum is "
            f"{_MAX_COUNT}; hash its column (--hash-size), or prepare fewer rows"
        )
    values = values.with_columns(pl.col("len").cast(pl.UInt32))
    checks = most = None
    if "least" in values.columns:
        checks, most = values["least"].to_numpy(), values["most"].to_numpy()
    keys, counts = values["key"].to_numpy(), values["len"].to_numpy()
    return FieldCounts(keys, counts, checks, most, missing)


def _by_ranges(rows: Rows, num_rows: int, passes: int, spill: Path, name: str) -> FieldCounts:
    """Count a large field, one range of keys after another."""
    bounds = _bounds(rows, num_rows, passes)
    files = {part: spill.with_name(f"{spill.name}.{name}.{part}") for part in _PARTS}
    types: dict[str, np.dtype[np.generic]] = {}
    for file in files.values():
        file.unlink(missing_ok=True)
    missing = 0
    for low, high in zip([None, *bounds], [*bounds, None], strict=True):
        key = pl.col("key")
        chosen = pl.lit(True) if low is None else key >= low
        chosen = chosen if high is None else chosen & (key < high)
        chosen = chosen | key.is_null() if low is None else chosen
        counted = _from_frame(_grouped(rows().filter(chosen)).collect(engine="streaming"))
        missing += counted.missing
        arrays = (counted.keys, counted.counts, counted.checks, counted.most)
        for part, array in zip(_PARTS, arrays, strict=True):
            if array is not None:
                types[part] = array.dtype
                with files[part].open("ab") as file:
                    file.write(np.ascontiguousarray(array).data)
        del counted, arrays  # free memory before the next range
    whole = {part: np.memmap(files[part], dtype=types[part], mode="r") for part in types}
    keys, counts, checks, most = (whole.get(part) for part in _PARTS)
    if keys is None or counts is None:
        raise RuntimeError(f"{name}: no range of its keys was counted")
    return FieldCounts(keys, counts, checks, most, missing)


def _bounds(rows: Rows, num_rows: int, passes: int) -> list[int]:
    """Return keys that divide the distinct values of a sample into ranges of about equal size."""
    step = max(1, num_rows // _SAMPLED_ROWS)
    sample = rows().select("key").gather_every(step).collect(engine="streaming")["key"]
    distinct = sample.drop_nulls().unique().sort().to_numpy()
    places = np.linspace(0, len(distinct), passes + 1)[1:-1].astype(np.int64)
    return [int(key) for key in np.unique(distinct[places])]


def spilled(spill: Path) -> Sequence[Path]:
    """Return the spill files of ``count_fields``."""
    return sorted(spill.parent.glob(spill.name + ".*"))

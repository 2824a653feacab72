"""Compute statistics of each table's lookups in train, for planners and caches.

The 17 frequency bins are DreamShard's table features (tools/gen_dlrm_data.py at 73128ed): rows are
grouped by their number of lookups in one batch of 65,536 samples. ``top_mass`` shows how much a
cache of rows would help; ``unique_ratio`` determines the cost of the ``unique`` exchange.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import Field
from sbpflow.data.format.shards import RowFiles, Words
from sbpflow.errors import DataError
from sbpflow.serving.cells import MISSING_ID, MISSING_KEY, RARE_ID

TOP = (1, 16, 1024, 65536)
BATCH_SIZES = (1024, 4096, 16384, 65536)
NUM_BINS = 17
_BIN_EDGES = np.concatenate([[0], 2 ** np.arange(NUM_BINS - 1)])
"""Lower edges of the bins [17]. A row is in bin j if its number of lookups is above ``edges[j]``
and, except in the last bin, at most ``edges[j + 1]``.
"""
BIN_SAMPLES = 65536
_SAMPLED_BATCHES = 8
_MIN_TAIL_COUNT = 5
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class FieldStats:
    """The statistics of one table's lookups in train. Masses and ratios are fractions of the
    lookups.

    For a field with keys, ``rows`` is 0.
    """

    name: str
    rows: int
    hot: int
    lookups: int
    missing: int
    rare: int
    distinct: int
    top_mass: dict[str, float]
    bins_samples: int
    """Number of samples in the batch that is used for the bins: 65,536, or all samples of a smaller
    train split
    """
    bins_rows: list[int]
    """Numbers of rows that have 1, 2, 3-4, 5-8, ..., 2^14 + 1 to 2^15, and more lookups in the
    batch
    """
    bins_lookups: list[int]
    """Number of lookups in the batch, by bin"""
    unique_ratio: dict[str, float]
    """Distinct ids per lookup, by global batch size, for batches no larger than train"""
    tail_exponent: float | None
    """Negated slope of log lookups over log rank for rows with 5 or more lookups, or None if there
    are fewer than 3 such rows
    """


def field_stats(
    field: Field,
    counts: NDArray[np.int64],
    unique_ratio: Mapping[int, float],
    batch: NDArray[np.int64],
    batch_samples: int,
) -> FieldStats:
    """Compute the statistics of one table from its ``counts`` (int64), a result of
    ``count_lookups``.

    ``batch`` (int64 [touched rows]) contains the ascending lookup counts of the rows that one batch
    touches.
    """
    rising = np.sort(counts)
    total = int(rising.sum())
    starts = np.append(np.searchsorted(batch, _BIN_EDGES, side="right"), len(batch))
    tops = {k: int(rising[max(len(rising) - k, 0) :].sum()) for k in TOP}
    return FieldStats(
        name=field.name,
        rows=field.rows,
        hot=field.hot,
        lookups=total,
        missing=int(counts[MISSING_ID]),
        rare=int(counts[RARE_ID]),
        distinct=len(rising) - int(np.searchsorted(rising, 1)),
        top_mass={str(k): round(mass / max(total, 1), 6) for k, mass in tops.items()},
        bins_samples=batch_samples,
        bins_rows=np.diff(starts).tolist(),
        bins_lookups=[int(batch[a:b].sum()) for a, b in pairwise(starts)],
        unique_ratio={str(size): round(ratio, 6) for size, ratio in unique_ratio.items()},
        tail_exponent=tail_exponent(rising[::-1]),
    )


def batch_counts(manifest: Manifest) -> tuple[int, dict[str, NDArray[np.int64]]]:
    """Return the number of samples in a batch from the middle of train, and the batch's lookup
    counts by field.

    The lookup counts of a field are those of all rows that the batch touches, in ascending order.
    """
    rows = RowFiles(manifest, "train")
    size = min(BIN_SAMPLES, rows.num_rows)
    start = (rows.num_rows - size) // 2
    all_ids = field_ids(manifest, rows, start, start + size)
    return size, {
        field.name: np.sort(np.unique(ids, return_counts=True)[1])
        for field, ids in zip(manifest.fields, all_ids, strict=True)
    }


def tail_exponent(falling: NDArray[np.int64]) -> float | None:
    """Fit the negated slope of log count over log rank to descending counts, at logarithmically
    spaced ranks.
    """
    usable = len(falling) - int(np.searchsorted(falling[::-1], _MIN_TAIL_COUNT))
    if usable < 3:
        return None
    ranks = np.unique(np.geomspace(1, usable, 200).astype(np.int64))
    x, y = np.log(ranks), np.log(falling[ranks - 1])
    spread = float(((x - x.mean()) ** 2).sum())
    slope = -float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    return round(slope, 4) if math.isfinite(slope) else None


def unique_ratios(manifest: Manifest) -> dict[str, dict[int, float]]:
    """Return the distinct ids per lookup by field and batch size, averaged over several batches of
    train.
    """
    rows = RowFiles(manifest, "train")
    ratios: dict[str, dict[int, float]] = {field.name: {} for field in manifest.fields}
    for size in (size for size in BATCH_SIZES if size <= rows.num_rows):
        sums = np.zeros(len(manifest.fields))
        starts = np.linspace(0, rows.num_rows - size, _SAMPLED_BATCHES).astype(np.int64)
        for start in np.unique(starts):
            all_ids = field_ids(manifest, rows, int(start), int(start) + size)
            sums += [num_distinct(ids) / max(ids.size, 1) for ids in all_ids]
        for field, ratio in zip(manifest.fields, sums / len(np.unique(starts)), strict=True):
            ratios[field.name][size] = float(ratio)
    return ratios


def num_distinct(ids: NDArray[Any]) -> int:
    """Return the number of distinct ids. Sorting is several times faster than numpy's unique."""
    ordered = np.sort(ids, axis=None)
    return int(np.count_nonzero(ordered[1:] != ordered[:-1])) + min(len(ordered), 1)


def field_ids(manifest: Manifest, rows: RowFiles, start: int, stop: int) -> Iterator[NDArray[Any]]:
    """Yield each field's ids in rows [start, stop) as [rows, hot], or [ids] for a ragged field."""
    words, keys = rows.read(start, stop), rows.keys(start, stop)
    return ids_in(manifest, words, keys, rows.lists(start, stop))


def ids_in(
    manifest: Manifest,
    words: Words,
    keys: NDArray[np.int64] | None,
    of_lists: tuple[NDArray[Any], NDArray[Any]] | None,
) -> Iterator[NDArray[Any]]:
    """Yield the ids of each field, taken from ``words``, ``keys``, or the lengths and values of
    lists.
    """
    lists: Iterator[NDArray[Any]] = iter(()) if of_lists is None else list_ids(*of_lists)
    column, key_column = 1 + len(manifest.dense), 0
    for field in manifest.fields:
        if field.ragged:
            yield next(lists)
        elif field.keyed and keys is not None:
            yield keys[:, key_column : key_column + field.hot]
            key_column += field.hot
        else:
            yield words[:, column : column + field.hot]
            column += field.hot


def list_ids(lengths: NDArray[Any], values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the ids of each list column, given ``lengths`` [rows, lists] and the values of all
    lists.
    """
    owner = np.repeat(np.tile(np.arange(lengths.shape[1]), len(lengths)), lengths.reshape(-1))
    for number in range(lengths.shape[1]):
        yield values[owner == number]


def count_lookups(manifest: Manifest, names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Count the lookups per table row of the named fields in one pass over the train split.

    For a field with keys, the result contains the count of missing values, a 0 for rare values, and
    then the count of each key.
    """
    counts = {f.name: np.zeros(f.rows, dtype=np.int64) for f in manifest.fields if f.name in names}
    keyed = {f.name: _KeyCounts() for f in manifest.fields if f.keyed and f.name in names}
    rows = RowFiles(manifest, "train")
    for start in range(0, rows.num_rows, _BLOCK_ROWS):
        all_ids = field_ids(manifest, rows, start, min(start + _BLOCK_ROWS, rows.num_rows))
        for field, ids in zip(manifest.fields, all_ids, strict=True):
            if field.name in keyed:
                keyed[field.name].add(ids)
            elif field.name in counts and ids.size:
                distinct, times = np.unique(ids, return_counts=True)
                if distinct[0] < 0 or distinct[-1] >= field.rows:
                    raise out_of_range(manifest, field, "train", start, ids)
                counts[field.name][distinct] += times
    return counts | {name: found.counts() for name, found in keyed.items()}


class _KeyCounts:
    """Counts keys. New keys are buffered, and merged when there are more new keys than distinct
    keys so far.
    """

    def __init__(self) -> None:
        self._runs = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]

    def add(self, keys: NDArray[np.int64]) -> None:
        self._runs.append(np.unique(keys, return_counts=True))
        if sum(len(run[0]) for run in self._runs[1:]) > len(self._runs[0][0]):
            self._merge()

    def _merge(self) -> None:
        keys, counts = (np.concatenate(parts) for parts in zip(*self._runs, strict=True))
        distinct, place = np.unique(keys, return_inverse=True)
        total = np.zeros(len(distinct), dtype=np.int64)
        np.add.at(total, place, counts)
        self._runs = [(distinct, total)]

    def counts(self) -> NDArray[np.int64]:
        self._merge()
        ((keys, counts),) = self._runs
        is_missing = keys == MISSING_KEY
        return np.concatenate([[counts[is_missing].sum(), 0], counts[~is_missing]])


def out_of_range(
    manifest: Manifest, field: Field, split: str, start: int, ids: NDArray[Any]
) -> DataError:
    """Return the error for ids outside the field's table. ``ids`` are the ids of the rows from
    ``start`` on.
    """
    place = tuple(np.argwhere((ids < 0) | (ids >= field.rows))[0])
    where = f"row {start + int(place[0])}" if ids.ndim == 2 else "a row"
    return DataError(
        f"{manifest.path}: {where} of {split} has id {ids[place]} for {field.name}, but its table "
        f"has rows 0..{field.rows - 1}; run `sbpflow verify` to find the damaged file"
    )


def compute_stats(
    manifest: Manifest, known: Mapping[str, Callable[[], NDArray[np.int64]]] | None = None
) -> list[FieldStats]:
    """Compute the statistics of every table. ``known`` contains tables whose lookups are already
    counted, each with a function that returns its counts.

    The functions in ``known`` are called one at a time, because the counts of all tables may not
    fit in memory.
    """
    known = known or {}
    counts = count_lookups(manifest, [f.name for f in manifest.fields if f.name not in known])
    ratios = unique_ratios(manifest)
    samples, batch = batch_counts(manifest)
    return [
        field_stats(
            f,
            known[f.name]() if f.name in known else counts[f.name],
            ratios[f.name],
            batch[f.name],
            samples,
        )
        for f in manifest.fields
    ]


def load_stats(manifest: Manifest) -> list[FieldStats]:
    """Return the statistics in the manifest. Raises DataError if the statistics are missing or
    invalid.
    """
    raw = manifest.content.get("stats")
    if not raw:
        raise DataError(
            f"{manifest.path}: the manifest has no statistics; count them "
            "with `sbpflow stats --recount`, or prepare the set again"
        )
    try:
        stats = [FieldStats(**entry) for entry in raw]
        for entry, field in zip(stats, manifest.fields, strict=True):
            _check_stats(entry, field)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{manifest.path}: the statistics in the manifest do not match its tables ({error}); "
            "prepare the set again, or count them with `sbpflow stats --recount`"
        ) from error
    return stats


def _check_stats(entry: FieldStats, field: Field) -> None:
    """Raise TypeError, ValueError or KeyError if the statistics of a field are invalid."""
    if (entry.name, entry.rows, entry.hot) != (field.name, field.rows, field.hot):
        raise ValueError(f"{entry.name!r} instead of {field.name!r}")
    numbers = [entry.lookups, entry.missing, entry.rare, entry.distinct, entry.tail_exponent or 0]
    numbers += [entry.top_mass[str(k)] for k in TOP]
    numbers += [entry.bins_samples, *entry.unique_ratio.values()]
    numbers += [*entry.bins_rows, *entry.bins_lookups]
    if any(type(number) not in (int, float) for number in numbers):
        raise TypeError(f"a value of {field.name} is not a number")
    if len(entry.bins_rows) != NUM_BINS or len(entry.bins_lookups) != NUM_BINS:
        raise ValueError(f"{field.name} does not have {NUM_BINS} bins")
    if not set(entry.unique_ratio) <= {str(size) for size in BATCH_SIZES}:
        raise ValueError(f"{field.name} has batch sizes other than {BATCH_SIZES}")


def stats_json(stats: Sequence[FieldStats]) -> list[dict[str, object]]:
    """Return the statistics as JSON, in the form that the manifest and the planner use."""
    return [asdict(field) for field in stats]


def stats_table(stats: Sequence[FieldStats]) -> str:
    """Return the statistics as text, one line per table."""
    width = max((len(s.name) for s in stats), default=8)
    head = f"{'table':>{width}} {'rows':>11} {'distinct':>10} {'miss%':>6} {'rare%':>6}"
    head += "".join(f" {'top' + _short(k) + '%':>8}" for k in TOP)
    sizes = [size for size in BATCH_SIZES if all(str(size) in s.unique_ratio for s in stats)]
    head += "".join(f" {'uniq@' + _short(size):>9}" for size in sizes) + f" {'tail':>6}"
    lines = [head]
    for s in stats:
        line = f"{s.name:>{width}} {f'{s.rows:,}' if s.rows else 'keys':>11} {s.distinct:>10,}"
        missing, rare = (100 * n / max(s.lookups, 1) for n in (s.missing, s.rare))
        line += f" {missing:>6.2f} {rare:>6.2f}"
        line += "".join(f" {100 * s.top_mass[str(k)]:>8.2f}" for k in TOP)
        line += "".join(f" {s.unique_ratio[str(size)]:>9.4f}" for size in sizes)
        tail = "-" if s.tail_exponent is None else f"{s.tail_exponent:.2f}"
        lines.append(f"{line} {tail:>6}")
    return "\n".join(lines)


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)

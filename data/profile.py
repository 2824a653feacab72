"""Profile the splits of a set: labels, times, missing and unknown values, drift, and leakage.

One pass over train counts each feature in bins. A second pass, over val and test, compares the
counts of these splits with train. The memory depends on the number of features, not on the number
of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from sbpflow.data.format.manifest import SPLITS, Manifest
from sbpflow.data.format.schema import Field
from sbpflow.data.format.shards import RowFiles
from sbpflow.data.prepare.fit import ordered, values_of_order
from sbpflow.data.stats import ids_in, out_of_range
from sbpflow.serving.cells import MISSING_ID, MISSING_KEY, NUM_RESERVED_IDS, RARE_ID

TIME_BUCKETS = 40
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
_BLOCK_ROWS = 1 << 16
_DENSE_BINS = 1 << 16
_FLOAT32 = 2.0**-23
"""Relative precision of the stored float32 values"""
_MAX_ID_BINS = 1 << 18
"""Maximum number of bins per field; in larger tables, ids other than missing and rare may share
bins
"""
_SCORES = 1 << 12
_TOP_IDS = 18
_REST = NUM_RESERVED_IDS + _TOP_IDS
_DECILES = 10
_MIN_SHARE = 1e-4
"""Lower bound for the shares of groups in the population stability index, which divides by shares
"""

Bins = NDArray[np.int64]


@dataclass
class SplitProfile:
    """The labels and times of one split."""

    rows: int = 0
    label_rate: float | None = None
    times: tuple[int, int] | None = None
    """First and last time, or None"""
    rows_by_time: list[int] = field(default_factory=list)
    positives_by_time: list[int] = field(default_factory=list)


@dataclass
class FeatureProfile:
    """The profile of one field or dense column. The keys of all mappings are splits; shares are
    between 0 and 1.
    """

    name: str
    missing: dict[str, float] = field(default_factory=dict)
    """Share of missing ids, or of dense values of 0 (missing values are stored as 0)"""
    unknown: dict[str, float] = field(default_factory=dict)
    """Share of the rare id, which stands for rare and new values"""
    summary: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean, standard deviation, min, max and quantiles of a dense column"""
    psi: dict[str, float] = field(default_factory=dict)
    """Population stability index of val and test against train"""
    auc: float | None = None
    """AUC on val and test if each row's score is the train label rate of its value; None if
    undefined
    """
    is_constant: bool = False
    """True if all values in train are equal"""


@dataclass
class Profile:
    """The profile of a set."""

    splits: dict[str, SplitProfile]
    fields: list[FeatureProfile]
    dense: list[FeatureProfile]
    num_scored: tuple[int, int]
    """Numbers of rows with label 0 and label 1 from which each ``auc`` is computed"""
    time_edges: list[int]
    """Edges of the time buckets; empty for a set without times"""


class _Feature:
    """Counts the values of one feature in bins: bins of ids, or ascending bins of dense values."""

    def __init__(self, name: str, num_bins: int, *, dense: bool) -> None:
        self.profile = FeatureProfile(name)
        self.is_dense = dense
        self._counts = np.zeros((2, num_bins), dtype=np.int64)
        self._sums = np.zeros(2)
        self._range = (np.inf, -np.inf)
        self._scores = np.zeros(0, dtype=np.int64)
        self._groups = np.zeros(0, dtype=np.int64)
        self._shares = np.zeros(0)
        self._hits = np.zeros((2, _SCORES), dtype=np.int64)

    def count(self, bins: Bins, labels: Bins) -> None:
        """Count values in ``bins`` [n], which belong to rows with ``labels`` [n] (0 or 1)."""
        np.add.at(self._counts.reshape(-1), labels * self._counts.shape[1] + bins, 1)

    def summarize(self, values: NDArray[np.float32]) -> None:
        """Add dense ``values`` [n] to the sums, min and max of the current split."""
        exact = values.astype(np.float64)
        self._sums += exact.sum(), (exact * exact).sum()
        low, high = self._range
        self._range = (min(low, float(values.min())), max(high, float(values.max())))

    def score(self, bins: Bins, owners: Bins | None, labels: Bins, base: float) -> None:
        """Score rows by the mean label rate of their bins; count the scores by ``labels`` [rows].

        ``owners`` [n] contains the row of each of ``bins`` [n], or is None if each row has one bin.
        The score of rows without values is ``base``.
        """
        scores = self._scores[bins]
        if owners is not None:
            sums = np.bincount(owners, weights=scores, minlength=len(labels))
            sizes = np.bincount(owners, minlength=len(labels))
            empty = np.full(len(labels), base * (_SCORES - 1))
            scores = np.divide(sums, sizes, out=empty, where=sizes > 0).astype(np.int64)
        np.add.at(self._hits.reshape(-1), labels * _SCORES + scores, 1)

    def end_split(self, split: str, base: float) -> None:
        """Store the shares of the split, compare them with those of train, and reset the counts."""
        profile, counts = self.profile, self._counts.sum(axis=0)
        total = max(int(counts.sum()), 1)
        if self.is_dense:
            profile.summary[split] = self._summary(counts, total)
            profile.missing[split] = float(counts[_bins_of(np.zeros(1, np.float32))[0]]) / total
        else:
            profile.missing[split] = float(counts[MISSING_ID]) / total
            profile.unknown[split] = float(counts[RARE_ID]) / total
        if split == "train":
            low, high = self._range
            used = np.count_nonzero(counts)
            profile.is_constant = low == high if self.is_dense else int(used) == 1
            rates = (self._counts[1] + base) / (counts + 1)
            self._scores = (rates * (_SCORES - 1)).astype(np.int64)
            self._groups = _deciles(counts) if self.is_dense else _top_ids(counts)
        if len(self._groups):
            shares = np.bincount(self._groups, weights=counts, minlength=_REST + 1) / total
        else:  # train is empty, so there is no comparison
            shares = np.zeros(_REST + 1)
        if split == "train":
            self._shares = shares
        elif counts.any() and self._shares.any():
            profile.psi[split] = _psi(self._shares, shares)
        self._counts[:] = 0
        self._sums[:] = 0
        self._range = (np.inf, -np.inf)

    def _summary(self, counts: Bins, total: int) -> dict[str, float]:
        mean, square = (self._sums / total).tolist()
        ends = np.cumsum(counts)
        places = [np.searchsorted(ends, part * total, side="right") for part in QUANTILES]
        keys = np.minimum(places, _DENSE_BINS - 1).astype(np.uint32) << np.uint32(16)
        low, high = self._range
        quantiles = np.clip(values_of_order(keys), low, high).tolist()
        std = max(square - mean * mean, 0.0) ** 0.5
        mean = mean if abs(mean) > _FLOAT32 * std else 0.0  # 0 if it is only rounding error
        summary = {"mean": mean, "std": std, "min": low}
        names = (f"p{round(100 * part)}" for part in QUANTILES)
        return {**summary, **dict(zip(names, quantiles, strict=True)), "max": high}

    def finish(self) -> FeatureProfile:
        """Compute the AUC from the counted scores; return the profile."""
        self.profile.auc = _auc(*self._hits)
        return self.profile


def _bins_of(values: NDArray[np.float32]) -> Bins:
    """Return the bin of each value: the upper 16 bits of its ordered integer. The relative width of
    a bin is at most 1/128.
    """
    return ordered(values) >> 16


def _num_bins(field: Field) -> int:
    return _MAX_ID_BINS if field.keyed else min(field.rows, _MAX_ID_BINS)


def _id_bins(ids: NDArray[Any], num_bins: int, keyed: bool) -> Bins:
    size = max(num_bins - NUM_RESERVED_IDS, 1)
    shared = (ids - NUM_RESERVED_IDS) % size + NUM_RESERVED_IDS
    if keyed:
        return np.where(ids == MISSING_KEY, MISSING_ID, shared)
    return np.where(ids < num_bins, ids, shared).astype(np.int64)


def _deciles(counts: Bins) -> Bins:
    middles = np.cumsum(counts) - counts / 2
    parts = (middles * _DECILES / max(int(counts.sum()), 1)).astype(np.int64)
    return np.clip(parts, 0, _DECILES - 1)


def _top_ids(counts: Bins) -> Bins:
    """Return the group of each bin: missing, rare, one group per frequent id, and a group of all
    others.
    """
    groups = np.full(len(counts), _REST)
    groups[:NUM_RESERVED_IDS] = range(NUM_RESERVED_IDS)
    top = np.argsort(-counts[NUM_RESERVED_IDS:], kind="stable")[:_TOP_IDS] + NUM_RESERVED_IDS
    groups[top] = NUM_RESERVED_IDS + np.arange(len(top))
    return groups


def _psi(expected: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    p, q = np.maximum(expected, _MIN_SHARE), np.maximum(actual, _MIN_SHARE)
    return float(((q - p) * np.log(q / p)).sum())


def _auc(negatives: Bins, positives: Bins) -> float | None:
    pairs = int(negatives.sum()) * int(positives.sum())
    if not pairs:
        return None
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum()) / pairs


def profile_set(manifest: Manifest) -> Profile:
    """Return the profile of a set. Raises DataError for ids outside their tables."""
    files = {split: RowFiles(manifest, split) for split in SPLITS}
    edges = _time_edges(manifest, files)
    fields = [_Feature(f.name, _num_bins(f), dense=False) for f in manifest.fields]
    dense = [_Feature(name, _DENSE_BINS, dense=True) for name in manifest.dense]
    splits: dict[str, SplitProfile] = {}
    base, scored = 0.0, np.zeros(2, dtype=np.int64)
    with tqdm(total=sum(manifest.splits.values()), unit="row", disable=None) as bar:
        for split, rows in files.items():
            own = splits[split] = SplitProfile(rows.num_rows)
            counts, by_time = np.zeros(2, dtype=np.int64), np.zeros((2, TIME_BUCKETS), np.int64)
            for start in range(0, rows.num_rows, _BLOCK_ROWS):
                block = _Block(manifest, rows, split, start)
                counts += np.bincount(block.labels, minlength=2)
                scorable = split != "train" and manifest.labelled and splits["train"].rows
                block.count(fields, dense, base if scorable else None)
                _count_times(own, by_time, block, edges)
                bar.update(len(block.labels))
            if manifest.labelled and rows.num_rows:
                own.label_rate = float(counts[1]) / rows.num_rows
            base = own.label_rate or 0.0 if split == "train" else base
            if edges:
                own.rows_by_time = by_time.sum(axis=0).tolist()
                own.positives_by_time = by_time[1].tolist()
            if rows.num_rows:
                for feature in (*fields, *dense):
                    feature.end_split(split, base)
            scored += counts if split != "train" and manifest.labelled else 0
    negatives, positives = scored.tolist()
    return Profile(
        splits,
        [feature.finish() for feature in fields],
        [feature.finish() for feature in dense],
        (negatives, positives),
        edges,
    )


class _Block:
    """Consecutive rows of a split."""

    def __init__(self, manifest: Manifest, rows: RowFiles, split: str, start: int) -> None:
        stop = min(start + _BLOCK_ROWS, rows.num_rows)
        self._manifest, self._split, self._start = manifest, split, start
        self._words = rows.read(start, stop)
        self._keys = rows.keys(start, stop)
        self._lists = rows.lists(start, stop)
        labels = np.ascontiguousarray(self._words[:, 0]).view(np.float32)
        self.labels: Bins = (labels == 1).astype(np.int64)
        has_time = "time" in manifest.part_types
        self.times = rows.part("time", start, stop) if has_time else None

    def count(self, fields: list[_Feature], dense: list[_Feature], base: float | None) -> None:
        """Count all features of these rows; if ``base``, the label rate of train, is given, also
        score the rows.
        """
        for place, feature in enumerate(dense):
            values = np.ascontiguousarray(self._words[:, 1 + place]).view(np.float32)
            feature.summarize(values)
            self._add(feature, _bins_of(values), None, base)
        ragged = 0
        of_fields = ids_in(self._manifest, self._words, self._keys, self._lists)
        for table, feature, ids in zip(self._manifest.fields, fields, of_fields, strict=True):
            owners = None
            if table.ragged and self._lists is not None:
                owners = np.repeat(np.arange(len(self.labels)), self._lists[0][:, ragged])
                ragged += 1
            elif table.hot > 1:
                owners = np.repeat(np.arange(len(self.labels)), table.hot)
            if ids.size and not table.keyed and (ids.min() < 0 or ids.max() >= table.rows):
                raise out_of_range(self._manifest, table, self._split, self._start, ids)
            bins = _id_bins(ids.reshape(-1), _num_bins(table), table.keyed)
            self._add(feature, bins, owners, base)

    def _add(self, feature: _Feature, bins: Bins, owners: Bins | None, base: float | None) -> None:
        feature.count(bins, self.labels if owners is None else self.labels[owners])
        if base is not None:
            feature.score(bins, owners, self.labels, base)


def _time_edges(manifest: Manifest, files: dict[str, RowFiles]) -> list[int]:
    """Return the edges of time buckets of equal width, from the first to the last time of all
    splits.
    """
    if "time" not in manifest.part_types:
        return []
    times = [time for rows in files.values() for time in _extreme_times(rows)]
    low, high = min(times, default=0), max(times, default=0)
    width = max(-(-(high + 1 - low) // TIME_BUCKETS), 1)
    return [low + width * place for place in range(TIME_BUCKETS + 1)]


def _extreme_times(rows: RowFiles) -> Iterator[int]:
    for start in range(0, rows.num_rows, _BLOCK_ROWS):
        times = rows.part("time", start, min(start + _BLOCK_ROWS, rows.num_rows))
        yield from (int(times.min()), int(times.max()))


def _count_times(own: SplitProfile, by_time: Bins, block: _Block, edges: list[int]) -> None:
    if block.times is None:
        return
    low, high = int(block.times.min()), int(block.times.max())
    old: tuple[Any, ...] = own.times or ()
    own.times = (min(low, *old), max(high, *old)) if old else (low, high)
    buckets = (block.times - edges[0]) // (edges[1] - edges[0])
    np.add.at(by_time, (block.labels, buckets), 1)

"""Decide which counted values get their own ids, and assign new ids or the ids of an existing set.

Each vocabulary is written to the set atomically and recorded, so that a resumed run skips it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.ids import Counts, assign_ids
from sbpflow.data.format.npy import file_crc32
from sbpflow.data.format.vocabulary import (
    Vocabulary,
    array_files,
    blocks,
    read_vocabulary,
    write_vocabulary,
)
from sbpflow.data.prepare.distinct import FieldCounts
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.workspace import read_record, write_record
from sbpflow.serving.cells import MISSING_ID, NUM_RESERVED_IDS, RARE_ID

_RECORD_KEYS = ("entry", "rows", "missing", "rare", "rare_values", "collisions", "grown", "spare")
_LOAD_PARTS = 8


@dataclass(frozen=True)
class FilteredVocabulary:
    """A vocabulary of one or more fields, written to files, with counts from train."""

    name: str
    num_rows: int
    folder: Path
    entry: dict[str, Any]
    missing: int
    rare: int
    rare_values: int
    collisions: int
    """Number of keys that several strings in train share; all but one of these strings are mapped
    to the rare id
    """
    grown: dict[str, int]
    """Numbers of added values, of spare ids used for them, and of added rows, and the load of the
    busiest part; empty without ``--grow``
    """
    spare: int

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary, whose large files are mapped, so that only parts in use take
        memory.
        """
        return read_vocabulary(self.folder, self.name, self.num_rows, self.entry)

    def counts(self, is_shared: bool) -> dict[str, Any]:
        """Return the counts of a field for the manifest. For a shared vocabulary, lookups are
        omitted.
        """
        counts: dict[str, Any] = {"rare_values": self.rare_values}
        if not is_shared:
            counts |= {"train_missing": self.missing, "train_rare": self.rare}
        optional = {"collisions": self.collisions, "grown": self.grown, "spare": self.spare}
        return {**counts, **{key: value for key, value in optional.items() if value}}

    def lookups(self) -> Counts:
        """Return how often train looks up each row (int64 [num_rows]), for a vocabulary that is not
        from an existing set.
        """
        out = np.zeros(self.num_rows, dtype=np.int64)
        out[MISSING_ID], out[RARE_ID] = self.missing, self.rare
        for ids, counts in blocks(self.folder, self.entry, "ids", "counts"):
            out[ids] = counts
        return out


def filter_values(
    name: str,
    counted: FieldCounts,
    options: PrepareOptions,
    parent: Vocabulary | None,
    folder: Path,
    strings: Sequence[Path] = (),
) -> FilteredVocabulary:
    """Assign new ids to the values of a vocabulary, or use the ids of ``parent`` and, with
    ``--grow``, add new ids.

    ``strings`` are the files with the strings of each piece, if strings are stored.
    """
    grown: dict[str, int] = {}
    if parent is None:
        has_id = counted.counts >= options.min_count
        vocabulary = _new(name, counted, has_id, options)
    else:
        vocabulary = parent
        if options.grow:
            vocabulary, grown = grow(parent, counted, options.min_count, options.seed)
        has_id = np.isin(counted.keys, vocabulary.keys)
    if strings:
        vocabulary = _with_strings(vocabulary, parent, strings)
    return FilteredVocabulary(
        name,
        vocabulary.num_rows,
        folder,
        write_vocabulary(folder, vocabulary),
        counted.missing,
        int(counted.counts[~has_id].sum()),
        int((~has_id).sum()),
        counted.collisions,
        grown,
        vocabulary.num_rows - NUM_RESERVED_IDS - len(vocabulary.keys),
    )


def _with_strings(
    vocabulary: Vocabulary, parent: Vocabulary | None, files: Sequence[Path]
) -> Vocabulary:
    """Return the vocabulary with the strings of all values; the strings of one piece are read at a
    time.
    """
    keys, checks = vocabulary.keys, vocabulary.checks
    if checks is None:
        raise ValueError(f"vocabulary {vocabulary.name} has no strings")
    strings = np.full(len(keys), None, dtype=object)
    if parent is not None:
        strings[np.searchsorted(keys, parent.keys)] = parent.strings()
    for file in files if len(keys) else ():
        frame = pl.scan_ipc(file, glob=False).collect()
        piece_keys = frame["key"].to_numpy()
        place = np.minimum(np.searchsorted(keys, piece_keys), len(keys) - 1)
        has_id = (keys[place] == piece_keys) & (checks[place] == frame["check"].to_numpy())
        strings[place[has_id]] = frame["text"].filter(pl.Series(has_id)).to_list()
    return vocabulary.with_strings(strings.tolist())


def _new(
    name: str, counted: FieldCounts, has_id: NDArray[np.bool_], options: PrepareOptions
) -> Vocabulary:
    """Return a new vocabulary. Spare ids are placed like the ids of values without lookups."""
    number = int(np.count_nonzero(has_id))
    num_rare = int(counted.counts[~has_id].sum())
    num_spare = round(options.spare * number)
    loads = np.zeros(number + num_spare, dtype=np.int64)
    loads[:number] = counted.counts[has_id]
    ids = assign_ids(loads, (counted.missing, num_rare), options.seed, name)[:number]
    lookups = loads[:number]
    checks = None if counted.checks is None else counted.checks[has_id]
    num_rows = len(loads) + NUM_RESERVED_IDS
    return Vocabulary(name, num_rows, counted.keys[has_id], ids, lookups, checks)


def grow(
    parent: Vocabulary, counted: FieldCounts, min_count: int, seed: int
) -> tuple[Vocabulary, dict[str, int]]:
    """Add values with at least ``min_count`` lookups to a vocabulary; spare ids are assigned first,
    and then the ids of new rows.

    Existing ids do not change. New ids are assigned by a seeded permutation. The lookups in
    ``counted`` are added to the counts.
    """
    is_new = (counted.counts >= min_count) & ~np.isin(counted.keys, parent.keys)
    num_new = int(is_new.sum())
    key = [seed, parent.num_rows, len(parent.keys), *parent.name.encode()]
    generator = np.random.Generator(np.random.PCG64(key))
    free = generator.permutation(parent.spare_ids())[:num_new]
    appended = np.arange(num_new - len(free), dtype=np.int32) + np.int32(parent.num_rows)
    ids = generator.permutation(np.concatenate([free, appended]))
    keys = np.concatenate([parent.keys, counted.keys[is_new]])
    order = np.argsort(keys, kind="stable")
    lookups = parent.counts.copy()
    _, old, new = np.intersect1d(parent.keys, counted.keys, assume_unique=True, return_indices=True)
    lookups[old] += counted.counts[new]
    checks = None
    if parent.checks is not None and counted.checks is not None:
        checks = np.concatenate([parent.checks, counted.checks[is_new]])[order]
    vocabulary = Vocabulary(
        parent.name,
        parent.num_rows + len(appended),
        keys[order],
        np.concatenate([parent.ids, ids])[order].astype(np.int32),
        np.concatenate([lookups, counted.counts[is_new]])[order],
        checks,
    )
    grown = {"values": num_new, "spare": len(free), "behind": len(appended)}
    return vocabulary, {**grown, "load_percent": round(100 * _skew(vocabulary))}


def _skew(vocabulary: Vocabulary) -> float:
    """Divide the rows into eight equal parts; return the maximum number of lookups per part,
    divided by the mean.
    """
    loads = np.zeros(vocabulary.num_rows, dtype=np.int64)
    loads[vocabulary.ids] = vocabulary.counts
    parts = [int(part.sum()) for part in np.array_split(loads, _LOAD_PARTS)]
    return max(parts) * len(parts) / max(sum(parts), 1)


def save(path: Path, vocabulary: FilteredVocabulary) -> None:
    """Write the record of a vocabulary whose files are complete."""
    counts = {key: getattr(vocabulary, key) for key in _RECORD_KEYS if key != "rows"}
    write_record(path, {**counts, "rows": vocabulary.num_rows})


def load(path: Path, folder: Path, name: str) -> FilteredVocabulary | None:
    """Return the vocabulary that ``save`` recorded, or None if the record is absent or an array has
    changed.
    """
    record = read_record(path, _RECORD_KEYS)
    if record is None:
        return None
    for _, part, _, _ in array_files(record["entry"]):
        file = folder / part["file"]
        if not file.is_file() or file_crc32(file) != part["crc32"]:
            return None
    return FilteredVocabulary(name, record.pop("rows"), folder, **record)

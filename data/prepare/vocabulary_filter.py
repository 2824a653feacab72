"""Which of the values counted are kept, and which id each gets: anew, or behind those of a parent.

A vocabulary is written into the set in one step and recorded, so that a run that goes on makes
nothing twice.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.ids import Counts, assign_ids
from sbpflow.data.format.npy import file_crc32
from sbpflow.data.format.schema import MISSING_ID, NUM_RESERVED_IDS, RARE_ID
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

_RECORD_KEYS = ("entry", "rows", "missing", "rare", "rare_values", "collisions", "grown", "spare")
_LOAD_PARTS = 8


@dataclass(frozen=True)
class Kept:
    """A vocabulary, of one field or of several, and what the train part said of it."""

    name: str
    num_rows: int
    folder: Path
    entry: dict[str, Any]
    missing: int
    rare: int
    rare_values: int
    collisions: int
    """Keys that two strings of the train part share; the second has the rare id."""
    grown: dict[str, int]
    """Values added to the parent's, and how many of them found a spare id; empty without growth."""
    spare: int

    def vocabulary(self) -> Vocabulary:
        """The vocabulary, from its files: what is mapped is in memory only while it is used."""
        return read_vocabulary(self.folder, self.name, self.num_rows, self.entry)

    def said(self, is_shared: bool) -> dict[str, Any]:
        """What the manifest says of a field beside its rows; lookups are of all its fields."""
        said: dict[str, Any] = {"rare_values": self.rare_values}
        if not is_shared:
            said |= {"train_missing": self.missing, "train_rare": self.rare}
        optional = {"collisions": self.collisions, "grown": self.grown, "spare": self.spare}
        return {**said, **{key: value for key, value in optional.items() if value}}

    def lookups(self) -> Counts:
        """Lookups per table row in the train part (of a set without a parent)."""
        out = np.zeros(self.num_rows, dtype=np.int64)
        out[MISSING_ID], out[RARE_ID] = self.missing, self.rare
        for ids, counts in blocks(self.folder, self.entry, "ids", "counts"):
            out[ids] = counts
        return out


def keep_values(
    name: str,
    counted: FieldCounts,
    options: PrepareOptions,
    parent: Vocabulary | None,
    folder: Path,
) -> Kept:
    """Ids for the values of a field: anew, or the parent's and those that it grows by."""
    grown: dict[str, int] = {}
    if parent is None:
        enough = counted.counts >= options.min_count
        num_spare = round(options.spare * int(enough.sum()))
        num_rare = int(counted.counts[~enough].sum())
        rare_values = int((~enough).sum())
        vocabulary = _new(name, counted, enough, num_rare, num_spare, options)
    else:
        vocabulary, grown = parent, {}
        if options.grow:
            vocabulary, grown = grow(parent, counted, options.min_count, options.seed)
        is_known = np.isin(counted.keys, vocabulary.keys)
        num_rare = int(counted.counts[~is_known].sum())
        rare_values = int((~is_known).sum())
    entry = write_vocabulary(folder, vocabulary)
    return Kept(
        name,
        vocabulary.num_rows,
        folder,
        entry,
        counted.missing,
        num_rare,
        rare_values,
        counted.collisions,
        grown,
        vocabulary.num_rows - NUM_RESERVED_IDS - len(vocabulary.keys),
    )


def _new(
    name: str,
    counted: FieldCounts,
    enough: NDArray[np.bool_],
    num_rare: int,
    num_spare: int,
    options: PrepareOptions,
) -> Vocabulary:
    """A vocabulary of its own; spare ids are values without lookups, levelled like the others."""
    number = int(np.count_nonzero(enough))
    loads = np.zeros(number + num_spare, dtype=np.uint32)
    loads[:number] = counted.counts[enough]
    ids = assign_ids(loads, (counted.missing, num_rare), options.seed, name)[:number]
    lookups = loads[:number].astype(np.int64)
    checks = None if counted.checks is None else counted.checks[enough]
    num_rows = len(loads) + NUM_RESERVED_IDS
    return Vocabulary(name, num_rows, counted.keys[enough], ids, lookups, checks)


def grow(
    parent: Vocabulary, counted: FieldCounts, min_count: int, seed: int
) -> tuple[Vocabulary, dict[str, int]]:
    """The vocabulary with new values of ``min_count`` lookups: spare ids first, then further rows.

    No old id moves. Which new value gets which id is a seeded permutation; counts add up.
    """
    is_new = (counted.counts >= min_count) & ~np.isin(counted.keys, parent.keys)
    num_new = int(is_new.sum())
    key = [seed, parent.num_rows, len(parent.keys), *parent.name.encode()]
    generator = np.random.Generator(np.random.PCG64(key))
    free = generator.permutation(parent.spare_ids())[:num_new]
    behind = np.arange(num_new - len(free), dtype=np.int32) + np.int32(parent.num_rows)
    ids = generator.permutation(np.concatenate([free, behind]))
    keys = np.concatenate([parent.keys, counted.keys[is_new]])
    order = np.argsort(keys, kind="stable")
    lookups = parent.counts.copy()
    _, old, new = np.intersect1d(parent.keys, counted.keys, assume_unique=True, return_indices=True)
    lookups[old] += counted.counts[new]
    checks = None
    if parent.checks is not None and counted.checks is not None:
        checks = np.concatenate([parent.checks, counted.checks[is_new]])[order]
    made = Vocabulary(
        parent.name,
        parent.num_rows + len(behind),
        keys[order],
        np.concatenate([parent.ids, ids])[order].astype(np.int32),
        np.concatenate([lookups, counted.counts[is_new]])[order],
        checks,
    )
    grown = {"values": num_new, "spare": len(free), "behind": len(behind)}
    return made, {**grown, "load_percent": round(100 * _skew(made))}


def _skew(vocabulary: Vocabulary) -> float:
    """Greatest over mean load of eight equal parts of the rows."""
    loads = np.zeros(vocabulary.num_rows, dtype=np.int64)
    loads[vocabulary.ids] = vocabulary.counts
    parts = [int(part.sum()) for part in np.array_split(loads, _LOAD_PARTS)]
    return max(parts) * len(parts) / max(sum(parts), 1)


def save(path: Path, kept: Kept) -> None:
    record = {
        "entry": kept.entry,
        "rows": kept.num_rows,
        "missing": kept.missing,
        "rare": kept.rare,
        "rare_values": kept.rare_values,
        "collisions": kept.collisions,
        "grown": kept.grown,
        "spare": kept.spare,
    }
    write_record(path, record)


def load(path: Path, folder: Path, name: str) -> Kept | None:
    """What ``save`` wrote; None where it is not there or an array is not what it was."""
    record = read_record(path, _RECORD_KEYS)
    if record is None:
        return None
    for _, part, _, _ in array_files(record["entry"]):
        file = folder / part["file"]
        if not file.is_file() or file_crc32(file) != part["crc32"]:
            return None
    return Kept(name, record.pop("rows"), folder, **record)

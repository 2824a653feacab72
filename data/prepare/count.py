"""Counting the train part: which values are kept, which id each gets, and the constants it decides.

Everything is written into the set in one step and recorded, so that a run that goes on counts
nothing twice. With ``--like`` ids and constants are another set's; ``--grow`` adds ids to them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from data.format.ids import Counts, assign_ids
from data.format.manifest import Manifest
from data.format.npy import file_crc32
from data.format.schema import CHECK, MISSING_ID, NUM_RESERVED_IDS, RARE_ID, SPLIT_COLUMN
from data.format.vocabulary import (
    Vocabulary,
    array_files,
    blocks,
    open_vocabularies,
    read_vocabulary,
    write_vocabulary,
)
from data.prepare.distinct import FieldCounts, count_fields, spilled
from data.prepare.fit import Values, fit
from data.prepare.options import PrepareOptions
from data.prepare.stage import Staged, list_file
from data.prepare.workspace import DamagedWork, read_record, write_record

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


def train_rows(
    staged: Sequence[Staged], options: PrepareOptions, path_of: Callable[[Path], Path], row: str
) -> list[pl.LazyFrame]:
    """The train part of every piece, as one lazy frame each, of the files ``path_of`` says.

    ``row``: the column with the number of the row in its piece, or "" where each is a row.
    """
    frames: list[pl.LazyFrame] = []
    left, _ = options.split.bounds(sum(piece.num_rows for piece in staged))
    for piece in staged:
        frame = pl.scan_ipc(path_of(piece.path))
        if options.split.kind == "time":
            here = max(left, 0)
            frame = frame.filter(pl.col(row) < here) if row else frame.head(here)
            left -= piece.num_rows
        else:
            frame = frame.filter(pl.col(SPLIT_COLUMN) == 0)
        frames.append(frame)
    return frames


def build_vocabularies(
    staged: Sequence[Staged], options: PrepareOptions, work: Path, like: Manifest | None
) -> list[Kept]:
    """Count the fields over the train part, assign ids and write them into ``work/set``.

    Raises DamagedWork if what an earlier run kept is damaged and the staged rows are gone.
    """
    folder = work / "vocabulary"
    folder.mkdir(exist_ok=True)
    (work / "set").mkdir(exist_ok=True)
    names = list(options.counted)
    kept = [_load(folder / f"{name}.json", work / "set", name) for name in names]
    if None in kept:
        _check_there(staged, folder)
        parents = _parents(options, like)

        def build(name: str, counted: FieldCounts) -> Kept:
            made = _kept(name, counted, options, parents.get(name), work / "set")
            _save(folder / f"{name}.json", made)
            return made

        missing = {} if options.is_encode else _padding(staged, options)
        waiting: deque[Future[Kept]] = deque()
        by_name: dict[str, Kept] = {}
        with ThreadPoolExecutor(options.workers) as pool:
            for name, counted in _counts(staged, options, folder / "spill"):
                counted = replace(counted, missing=counted.missing + missing.get(name, 0))
                waiting.append(pool.submit(build, name, counted))
                if len(waiting) > options.workers:
                    done = waiting.popleft().result()
                    by_name[done.name] = done
            by_name |= {done.name: done for done in (future.result() for future in waiting)}
        for file in spilled(folder / "spill"):
            file.unlink()
        kept = [by_name[name] for name in names]
    return [vocabulary for vocabulary in kept if vocabulary is not None]


def _parents(options: PrepareOptions, like: Manifest | None) -> dict[str, Vocabulary]:
    """The vocabularies of ``like`` by the name of the vocabulary, which is a shared one's too."""
    if like is None:
        return {}
    found = open_vocabularies(like)
    return {name: replace(found[of[0]], name=name) for name, of in options.counted.items()}


def _check_there(staged: Sequence[Staged], folder: Path) -> None:
    if gone := [piece.path for piece in staged if not piece.path.exists()]:
        raise DamagedWork(f"{folder}: a part is damaged, and {gone[0]} is encoded")


def _counts(
    staged: Sequence[Staged], options: PrepareOptions, spill: Path
) -> Iterator[tuple[str, FieldCounts]]:
    """The counts of every vocabulary; none of rows that are only encoded."""
    if options.is_encode:
        nothing = np.empty(0, dtype=np.uint64)
        for name in options.counted:
            yield name, FieldCounts(nothing, nothing.astype(np.uint32), None, 0, 0)
        return
    rows = {
        name: partial(_rows_of, fields, staged, options) for name, fields in options.counted.items()
    }
    num_rows = sum(piece.num_rows for piece in staged)
    yield from count_fields(rows, num_rows, spill)


def _rows_of(
    fields: Sequence[str], staged: Sequence[Staged], options: PrepareOptions
) -> pl.LazyFrame:
    """``key`` and, of strings, ``check`` of every value of the fields in the train part."""
    return pl.concat([_rows_of_field(name, staged, options) for name in fields])


def _rows_of_field(name: str, staged: Sequence[Staged], options: PrepareOptions) -> pl.LazyFrame:
    if options.schema.several(name) is not None:
        rows = pl.concat(train_rows(staged, options, lambda path: list_file(path, name), "row"))
        key, check = "key", "check"
    else:
        rows = pl.concat(train_rows(staged, options, lambda path: path, ""))
        key, check = name, name + CHECK
    columns = [pl.col(key).alias("key")]
    if options.kind(name) == "string":
        columns.append(pl.col(check).alias("check"))
    return rows.select(columns)


def _padding(staged: Sequence[Staged], options: PrepareOptions) -> dict[str, int]:
    """Missing ids that fill up the train rows of the fields of fixed width, by vocabulary."""
    padding: dict[str, int] = {}
    for many in (many for many in options.schema.many if many.fixed):
        rows = pl.concat(train_rows(staged, options, lambda path: path, ""))
        lengths = rows.select(pl.len(), pl.col(many.name).cast(pl.Int64).sum()).collect()
        name = options.schema.vocabulary(many.name)
        filled = int(lengths[0, 0]) * many.most - int(lengths[0, 1])
        padding[name] = padding.get(name, 0) + filled
    return padding


def _kept(
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


def _save(path: Path, kept: Kept) -> None:
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


def _load(path: Path, folder: Path, name: str) -> Kept | None:
    """What ``_save`` wrote; None where it is not there or an array is not what it was."""
    record = read_record(path, _RECORD_KEYS)
    if record is None:
        return None
    for _, part, _, _ in array_files(record["entry"]):
        file = folder / part["file"]
        if not file.is_file() or file_crc32(file) != part["crc32"]:
            return None
    return Kept(name, record.pop("rows"), folder, **record)


def fit_columns(
    staged: Sequence[Staged], options: PrepareOptions, work: Path, like: Manifest | None
) -> dict[str, Any]:
    """Constants of transforms and weights, by column: of the train part, or those of ``like``."""
    if like is not None:
        return dict(like.content["fitted"])
    weight = options.schema.weight
    needy = [n for n in options.numbers if n.transform == "standardise" or n.buckets]
    if not needy and weight is None:
        return {}
    path = work / "fitted.json"
    done = read_record(path, ("fitted",))
    if done is None:
        _check_there(staged, work)
        names = [number.name for number in needy] + ([weight] if weight else [])
        fitted = fit(
            _present(staged, options, names), _present(staged, options, names), needy, weight
        )
        done = {"fitted": fitted}
        write_record(path, done)
    return done["fitted"]


def _present(
    staged: Sequence[Staged], options: PrepareOptions, names: Sequence[str]
) -> Iterator[dict[str, Values]]:
    """The values that are there in the train part, piece by piece."""
    for rows in train_rows(staged, options, lambda path: path, ""):
        frame = rows.select(names).collect()
        yield {name: frame[name].drop_nulls().cast(pl.Float32).to_numpy() for name in frame.columns}


def field_entry(
    name: str, options: PrepareOptions, kept: Mapping[str, Kept], fitted: Mapping[str, Any]
) -> dict[str, Any]:
    """What the manifest says of a field."""
    hashed = dict(options.hash_sizes)
    many = options.schema.several(name)
    entry: dict[str, Any] = {"name": name}
    vocabulary, shared = options.schema.vocabulary(name), dict(options.schema.vocabularies)
    if name in shared:
        entry["vocabulary"] = vocabulary
    if pair := next((pair for pair in options.crosses if "x".join(pair) == name), None):
        entry["parts"] = list(pair)
    if name in hashed:
        entry |= {"rows": hashed[name], "hashed": True}
    elif vocabulary in kept:
        found = kept[vocabulary]
        entry |= {"rows": found.num_rows, **found.said(is_shared=name in shared)}
    else:
        bounds = fitted[name]["bounds"]
        entry |= {"rows": len(bounds) + 1 + NUM_RESERVED_IDS, "buckets": bounds}
    if (kind := options.kind(name)) is not None:
        entry["kind"] = kind
    if many is not None:
        entry["hot"] = many.most
        if not many.fixed:
            entry |= {"ragged": True, "weighted": many.weights is not None}
    return entry

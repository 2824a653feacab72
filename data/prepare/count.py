"""Counting the train part: which values are kept, which id each gets, and the constants it decides.

Everything is written into the set in one step and recorded, so that a run that goes on counts
nothing twice. With ``--like`` ids and constants are another set's; ``--grow`` adds ids to them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from data.format.ids import Counts, Keys, assign_ids
from data.format.manifest import Manifest
from data.format.npy import file_crc32, read_array
from data.format.schema import CHECK, MISSING_ID, NUM_RESERVED_IDS, RARE_ID, SPLIT_COLUMN
from data.format.vocabulary import Vocabulary, array_files, open_vocabularies, write_vocabulary
from data.prepare.fit import Values, fit
from data.prepare.options import PrepareOptions
from data.prepare.stage import Staged, list_file
from data.prepare.workspace import DamagedWork, read_record, write_record

_RECORD_KEYS = ("entry", "rows", "missing", "rare", "rare_values", "collisions", "grown", "spare")
_LOAD_PARTS = 8


@dataclass(frozen=True)
class Kept:
    """The vocabulary of one field and what the train part said of it."""

    vocabulary: Vocabulary
    entry: dict[str, Any]
    missing: int
    rare: int
    rare_values: int
    collisions: int
    """Keys that two strings of the train part share; the second has the rare id."""
    grown: dict[str, int]
    """Values added to the parent's, and how many of them found a spare id; empty without growth."""
    spare: int

    @property
    def name(self) -> str:
        """The field."""
        return self.vocabulary.name

    def said(self) -> dict[str, Any]:
        """What the manifest says of the field beside its rows."""
        said: dict[str, Any] = {
            "train_missing": self.missing,
            "train_rare": self.rare,
            "rare_values": self.rare_values,
        }
        optional = {"collisions": self.collisions, "grown": self.grown, "spare": self.spare}
        return {**said, **{key: value for key, value in optional.items() if value}}

    def lookups(self) -> Counts:
        """Lookups per table row in the train part (of a set without a parent)."""
        out = np.zeros(self.vocabulary.num_rows, dtype=np.int64)
        out[MISSING_ID], out[RARE_ID] = self.missing, self.rare
        out[self.vocabulary.ids] = self.vocabulary.counts
        return out


@dataclass(frozen=True)
class FieldCounts:
    """Distinct values of a field in the train part, in key order."""

    keys: Keys
    counts: Counts
    checks: NDArray[np.uint32] | None
    collisions: int
    missing: int


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
    names = options.counted
    kept = [_load(folder / f"{name}.json", work / "set", name) for name in names]
    if None in kept:
        _check_there(staged, folder)
        parents = {} if like is None else open_vocabularies(like)

        def build(name: str, counts: pl.DataFrame, missing: int) -> Kept:
            counted = _field_counts(name, counts, missing)
            made = _kept(name, counted, options, parents.get(name), work / "set")
            _save(folder / f"{name}.json", made)
            return made

        if options.is_encode:
            nothing = pl.DataFrame(schema={"key": pl.UInt64, "len": pl.UInt32})
            kept = [build(name, nothing, 0) for name in names]
        else:
            counts = pl.collect_all(
                [_query(name, staged, options) for name in names], engine="streaming"
            )
            missing = [_padding(name, staged, options) for name in names]
            with ThreadPoolExecutor(options.workers) as pool:
                kept = list(pool.map(build, names, counts, missing))
    return [vocabulary for vocabulary in kept if vocabulary is not None]


def _check_there(staged: Sequence[Staged], folder: Path) -> None:
    if gone := [piece.path for piece in staged if not piece.path.exists()]:
        raise DamagedWork(f"{folder}: a part is damaged, and {gone[0]} is encoded")


def _query(name: str, staged: Sequence[Staged], options: PrepareOptions) -> pl.LazyFrame:
    """``key``, ``len`` and, of strings, the least and greatest ``check`` of each distinct value."""
    several = options.schema.several(name) is not None
    if several:
        rows = pl.concat(train_rows(staged, options, lambda path: list_file(path, name), "row"))
        key, check = "key", "check"
    else:
        rows = pl.concat(train_rows(staged, options, lambda path: path, ""))
        key, check = name, name + CHECK
    wanted = [pl.len().alias("len")]
    columns = [pl.col(key).alias("key")]
    if options.kind(name) == "string":
        columns.append(pl.col(check).alias("check"))
        wanted += [pl.col("check").min().alias("least"), pl.col("check").max().alias("most")]
    return rows.select(columns).group_by("key").agg(wanted)


def _padding(name: str, staged: Sequence[Staged], options: PrepareOptions) -> int:
    """Missing ids that fill up the train rows of a field of fixed width."""
    many = options.schema.several(name)
    if many is None or not many.fixed:
        return 0
    rows = pl.concat(train_rows(staged, options, lambda path: path, ""))
    lengths = rows.select(pl.len(), pl.col(name).cast(pl.Int64).sum()).collect()
    return int(lengths[0, 0]) * many.most - int(lengths[0, 1])


def _field_counts(name: str, counts: pl.DataFrame, padding: int) -> FieldCounts:
    missing = int(counts.filter(pl.col("key").is_null())["len"].sum()) + padding
    values = counts.drop_nulls("key").sort("key")
    checks, collisions = None, 0
    if "least" in values.columns:
        checks = values["least"].to_numpy()
        collisions = int((values["least"] != values["most"]).sum())
    lookups = values["len"].to_numpy().astype(np.int64)
    return FieldCounts(values["key"].to_numpy(), lookups, checks, collisions, missing)


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
        vocabulary,
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
    lookups = counted.counts[enough]
    loads = np.concatenate([lookups, np.zeros(num_spare, dtype=np.int64)])
    ids = assign_ids(loads, (counted.missing, num_rare), options.seed, name)[: len(lookups)]
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
        "rows": kept.vocabulary.num_rows,
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
    arrays: dict[str, NDArray[Any]] = {}
    for key, part, dtype, shape in array_files(record["entry"]):
        file = folder / part["file"]
        if not file.is_file() or file_crc32(file) != part["crc32"]:
            return None
        arrays[key] = read_array(file, dtype, shape, 0, shape[0])
    vocabulary = Vocabulary(name, record.pop("rows"), **arrays)
    return Kept(vocabulary, **record)


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
    if pair := next((pair for pair in options.crosses if "x".join(pair) == name), None):
        entry["parts"] = list(pair)
    if name in hashed:
        entry |= {"rows": hashed[name], "hashed": True}
    elif name in kept:
        entry |= {"rows": kept[name].vocabulary.num_rows, **kept[name].said()}
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

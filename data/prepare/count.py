"""Counting the train part: vocabularies, and the constants that it decides.

What is done is recorded, so that a run that goes on counts nothing twice. With ``--like`` ids and
constants are another set's; ``--grow`` adds ids to them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import CHECK, NUM_RESERVED_IDS, SPLIT_COLUMN
from sbpflow.data.format.vocabulary import (
    Vocabulary,
    open_vocabularies,
)
from sbpflow.data.prepare.bad_rows import Staged
from sbpflow.data.prepare.counts_file import COUNTS_KEYS, counts_record, read_counts, write_counts
from sbpflow.data.prepare.distinct import FieldCounts, count_fields, spilled
from sbpflow.data.prepare.fit import Values, fit
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.stage import list_file
from sbpflow.data.prepare.vocabulary_filter import Kept, keep_values, load, save
from sbpflow.data.prepare.workspace import DamagedWork, read_record, write_record


def train_rows(
    staged: Sequence[Staged],
    options: PrepareOptions,
    path_of: Callable[[Path], Path],
    row: str,
    part: int | None = None,
) -> list[pl.LazyFrame]:
    """The train part of every piece, as one lazy frame each, of the files ``path_of`` says.

    ``row``: the column with the number of the row in its piece, or "" where each is a row.
    ``part``: of the pieces of one machine alone.
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
    owned = [f for f, piece in zip(frames, staged, strict=True) if part in (None, piece.part)]
    return owned or [frames[0].head(0)]


def build_vocabularies(
    staged: Sequence[Staged], options: PrepareOptions, work: Path, plan: str, like: Manifest | None
) -> list[Kept]:
    """Count the fields over the train part, assign ids and write them into ``work/set``.

    Of several machines each counts its rows and adds up some of the vocabularies. Raises
    DamagedWork if what an earlier run kept is damaged and the staged rows are gone.
    """
    folder, part = work / "vocabulary", options.part
    folder.mkdir(exist_ok=True)
    (work / "set").mkdir(exist_ok=True)
    names = list(options.counted)
    by_name = {name: load(folder / f"{name}.json", work / "set", name) for name in names}
    if None in by_name.values():
        _check_there(staged, options, folder)
        counts = _counts(staged, options, work, plan)
        by_name |= _build(counts, staged, options, work, _parents(options, like))
    if not part.is_alone:
        files = {folder / f"{name}.json": owner for name, owner in _builders(options).items()}
        part.wait(work, plan, files, "vocabularies")
        by_name = {name: load(folder / f"{name}.json", work / "set", name) for name in names}
    kept = [by_name[name] for name in names]
    if None in kept:
        raise DamagedWork(f"{folder}: the vocabulary {names[kept.index(None)]} is damaged")
    return [vocabulary for vocabulary in kept if vocabulary is not None]


def _builders(options: PrepareOptions) -> dict[str, int]:
    """Which part adds up the counts of a vocabulary and gives out its ids."""
    return {name: 1 + k % options.part.count for k, name in enumerate(options.counted)}


def _build(
    counts: Iterator[tuple[str, FieldCounts]],
    staged: Sequence[Staged],
    options: PrepareOptions,
    work: Path,
    parents: Mapping[str, Vocabulary],
) -> dict[str, Kept]:
    """Ids for the values that were counted, some vocabularies at a time."""
    folder = work / "vocabulary"

    def build(name: str, counted: FieldCounts) -> Kept:
        made = keep_values(name, counted, options, parents.get(name), work / "set")
        save(folder / f"{name}.json", made)
        return made

    missing = {} if options.is_encode else _padding(staged, options)
    waiting: deque[Future[Kept]] = deque()
    by_name: dict[str, Kept] = {}
    with ThreadPoolExecutor(options.workers) as pool:
        for name, counted in counts:
            counted = replace(counted, missing=counted.missing + missing.get(name, 0))
            waiting.append(pool.submit(build, name, counted))
            if len(waiting) > options.workers:
                done = waiting.popleft().result()
                by_name[done.name] = done
        by_name |= {done.name: done for done in (future.result() for future in waiting)}
    for file in spilled(folder / _spill(options)):
        file.unlink()
    return by_name


def _spill(options: PrepareOptions) -> str:
    return f"spill{options.part.number}"


def _parents(options: PrepareOptions, like: Manifest | None) -> dict[str, Vocabulary]:
    """The vocabularies of ``like`` by the name of the vocabulary, which is a shared one's too."""
    if like is None:
        return {}
    found = open_vocabularies(like)
    return {name: replace(found[of[0]], name=name) for name, of in options.counted.items()}


def _check_there(staged: Sequence[Staged], options: PrepareOptions, folder: Path) -> None:
    mine = (piece for piece in staged if piece.part == options.part.number)
    if gone := [piece.path for piece in mine if not piece.path.exists()]:
        raise DamagedWork(f"{folder}: a part is damaged, and {gone[0]} is encoded")


def _counts(
    staged: Sequence[Staged], options: PrepareOptions, work: Path, plan: str
) -> Iterator[tuple[str, FieldCounts]]:
    """The counts of the vocabularies that this machine builds; none of rows only encoded."""
    builders, part = _builders(options), options.part
    mine = [name for name, builder in builders.items() if builder == part.number]
    if options.is_encode:
        nothing = np.empty(0, dtype=np.uint64)
        for name in mine:
            yield name, FieldCounts(nothing, nothing.astype(np.uint32), None, None, 0)
        return
    folder = work / "vocabulary"
    own = (piece.num_rows for piece in staged if piece.part == part.number)
    rows = {
        name: partial(_rows_of, fields, staged, options) for name, fields in options.counted.items()
    }
    if part.is_alone:
        yield from count_fields(rows, sum(own), folder / _spill(options))
        return
    left = {name: rows[name] for name in rows if read_record(
        counts_record(folder, name, part.number), COUNTS_KEYS) is None}  # fmt: skip
    for name, counted in count_fields(left, sum(own), folder / _spill(options)):
        write_counts(folder, name, part.number, counted)
    parts = range(1, part.count + 1)
    files = {counts_record(folder, name, number): number for name in mine for number in parts}
    part.wait(work, plan, files, "counted values")
    found = {name: [read_counts(folder, name, number) for number in parts] for name in mine}
    every = {name: partial(pl.concat, [one.rows for one in all_]) for name, all_ in found.items()}
    most = max((sum(one.values for one in all_) for all_ in found.values()), default=0)
    for name, counted in count_fields(every, most, folder / _spill(options)):
        missing = sum(one.missing for one in found[name])
        yield name, replace(counted, missing=missing)


def _rows_of(
    fields: Sequence[str], staged: Sequence[Staged], options: PrepareOptions
) -> pl.LazyFrame:
    """``key`` and, of strings, ``check`` of every value of the fields in the train part."""
    return pl.concat([_rows_of_field(name, staged, options) for name in fields])


def _rows_of_field(name: str, staged: Sequence[Staged], options: PrepareOptions) -> pl.LazyFrame:
    part = options.part.number
    if options.schema.several(name) is not None:
        parts = train_rows(staged, options, lambda path: list_file(path, name), "row", part)
        key, check = "key", "check"
    else:
        parts = train_rows(staged, options, lambda path: path, "", part)
        key, check = name, name + CHECK
    rows = pl.concat(parts)
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


def fit_columns(
    staged: Sequence[Staged], options: PrepareOptions, work: Path, plan: str, like: Manifest | None
) -> dict[str, Any]:
    """Constants of transforms and weights, by column: of the train part, or those of ``like``."""
    if like is not None:
        return dict(like.content["fitted"])
    weight = options.schema.weight
    needy = [n for n in options.numbers if n.transform == "standardise" or n.buckets]
    if not needy and weight is None:
        return {}
    path = work / "fitted.json"
    if not options.part.is_first:
        options.part.wait(work, plan, {path: 1}, "constants")
    done = read_record(path, ("fitted",))
    if done is None and not options.part.is_first:
        raise DamagedWork(f"{path}: is not what was written there")
    if done is None:
        _check_there(staged, options, work)
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
            entry |= {"ragged": True, "weighted": many.weighted}
    return entry

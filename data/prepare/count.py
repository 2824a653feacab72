"""Build the vocabularies from counts of the train part, and fit constants on this part.

Finished results are recorded, so a resumed run does not count twice. With ``--like``, ids and
constants come from an existing set; ``--grow`` adds new ids.
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
from sbpflow.data.format.vocabulary import Vocabulary, open_vocabularies
from sbpflow.data.prepare.bad_rows import StagedPiece
from sbpflow.data.prepare.counts_file import COUNTS_KEYS, counts_record, read_counts, write_counts
from sbpflow.data.prepare.distinct import FieldCounts, count_fields, spilled
from sbpflow.data.prepare.fit import Values, fit
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.stage import list_file, strings_file
from sbpflow.data.prepare.vocabulary_filter import FilteredVocabulary, filter_values, load, save
from sbpflow.data.prepare.workspace import DamagedWork, read_record, require_record, write_record


def train_rows(
    staged: Sequence[StagedPiece],
    options: PrepareOptions,
    path_of: Callable[[Path], Path] = lambda path: path,
    row: str = "",
    part: int | None = None,
) -> list[pl.LazyFrame]:
    """Return a lazy frame of train rows for each piece.

    ``path_of`` maps a piece to the file to read. If a file contains several entries per row, its
    column ``row`` contains the row number. ``part`` selects one machine's pieces.
    """
    frames: list[pl.LazyFrame] = []
    left, _ = options.split.bounds(sum(piece.num_rows for piece in staged))
    for piece in staged:
        frame = pl.scan_ipc(path_of(piece.path))
        if options.split.kind == "time":
            num_train = max(left, 0)
            frame = frame.filter(pl.col(row) < num_train) if row else frame.head(num_train)
            left -= piece.num_rows
        else:
            frame = frame.filter(pl.col(SPLIT_COLUMN) == 0)
        frames.append(frame)
    chosen = [f for f, piece in zip(frames, staged, strict=True) if part in (None, piece.part)]
    return chosen or [frames[0].head(0)]


def build_vocabularies(
    staged: Sequence[StagedPiece],
    options: PrepareOptions,
    work: Path,
    plan: str,
    like: Manifest | None,
) -> dict[str, FilteredVocabulary]:
    """Count the values of the fields in the train part, assign ids and write them to ``work/set``.

    With several machines, each machine counts its own rows, and merges the counts of some
    vocabularies. Raise DamagedWork if files of an earlier run are damaged and the staged rows no
    longer exist.
    """
    folder, part = work / "vocabulary", options.part
    folder.mkdir(exist_ok=True)
    (work / "set").mkdir(exist_ok=True)
    records = {name: folder / f"{name}.json" for name in options.counted}
    built = {name: load(path, work / "set", name) for name, path in records.items()}
    if None in built.values():
        _check_present(staged, options, folder)
        counts = _counts(staged, options, work, plan)
        built |= _build(counts, staged, options, work, _parents(options, like))
    if not part.is_alone:
        builders = _builders(options)
        part.wait(work, plan, {records[name]: builders[name] for name in records}, "vocabularies")
        built = {name: load(path, work / "set", name) for name, path in records.items()}
    vocabularies = {name: vocabulary for name, vocabulary in built.items() if vocabulary}
    if damaged := built.keys() - vocabularies.keys():
        raise DamagedWork(f"{folder}: vocabulary {min(damaged)} is damaged")
    return vocabularies


def _builders(options: PrepareOptions) -> dict[str, int]:
    """Map each vocabulary to the machine that merges its counts and assigns its ids."""
    return {name: 1 + k % options.part.count for k, name in enumerate(options.counted)}


def _build(
    counts: Iterator[tuple[str, FieldCounts]],
    staged: Sequence[StagedPiece],
    options: PrepareOptions,
    work: Path,
    parents: Mapping[str, Vocabulary],
) -> dict[str, FilteredVocabulary]:
    """Assign ids to the counted values of up to ``options.workers`` vocabularies in parallel."""
    folder = work / "vocabulary"

    def build(name: str, counted: FieldCounts) -> FilteredVocabulary:
        strings = _strings_files(name, staged, options)
        parent = parents.get(name)
        vocabulary = filter_values(name, counted, options, parent, work / "set", strings)
        save(folder / f"{name}.json", vocabulary)
        return vocabulary

    missing = {} if options.is_encode else _padding(staged, options)
    waiting: deque[Future[FilteredVocabulary]] = deque()
    built: list[FilteredVocabulary] = []
    with ThreadPoolExecutor(options.workers) as pool:
        for name, counted in counts:
            counted = replace(counted, missing=counted.missing + missing.get(name, 0))
            waiting.append(pool.submit(build, name, counted))
            if len(waiting) > options.workers:  # limit the number of counts in memory
                built.append(waiting.popleft().result())
        built += [future.result() for future in waiting]
    for file in spilled(folder / _spill(options)):
        file.unlink()
    return {vocabulary.name: vocabulary for vocabulary in built}


def _strings_files(name: str, staged: Sequence[StagedPiece], options: PrepareOptions) -> list[Path]:
    """Return the files with a vocabulary's strings, or an empty list if no strings are kept."""
    fields = options.counted[name]
    if not options.adds_strings or options.kind(fields[0]) != "string":
        return []
    return [strings_file(piece.path, field) for piece in staged for field in fields]


def _spill(options: PrepareOptions) -> str:
    return f"spill{options.part.number}"


def _parents(options: PrepareOptions, like: Manifest | None) -> dict[str, Vocabulary]:
    """Return the vocabularies of ``like`` under their names in the new set."""
    if like is None:
        return {}
    known = open_vocabularies(like)
    return {name: replace(known[of[0]], name=name) for name, of in options.counted.items()}


def _check_present(staged: Sequence[StagedPiece], options: PrepareOptions, folder: Path) -> None:
    mine = (piece for piece in staged if piece.part == options.part.number)
    if removed := [piece.path for piece in mine if not piece.path.exists()]:
        raise DamagedWork(f"{folder}: a file is damaged, and its source {removed[0]} was removed")


def _counts(
    staged: Sequence[StagedPiece], options: PrepareOptions, work: Path, plan: str
) -> Iterator[tuple[str, FieldCounts]]:
    """Yield the counts of this machine's vocabularies; for ``encode``, the counts are empty."""
    builders, part = _builders(options), options.part
    mine = [name for name, builder in builders.items() if builder == part.number]
    if options.is_encode:
        no_keys = np.empty(0, dtype=np.uint64)
        for name in mine:
            yield name, FieldCounts(no_keys, no_keys.astype(np.uint32), None, None, 0)
        return
    folder = work / "vocabulary"
    own = (piece.num_rows for piece in staged if piece.part == part.number)
    rows = {
        name: partial(_rows_of, fields, staged, options) for name, fields in options.counted.items()
    }
    if part.is_alone:
        yield from count_fields(rows, sum(own), folder / _spill(options))
        return
    uncounted = {
        name: rows[name]
        for name in rows
        if read_record(counts_record(folder, name, part.number), COUNTS_KEYS) is None
    }
    for name, counted in count_fields(uncounted, sum(own), folder / _spill(options)):
        write_counts(folder, name, part.number, counted)
    parts = range(1, part.count + 1)
    files = {counts_record(folder, name, number): number for name in mine for number in parts}
    part.wait(work, plan, files, "counted values")
    by_part = {name: [read_counts(folder, name, number) for number in parts] for name in mine}
    rows = {name: partial(pl.concat, [c.rows for c in counts]) for name, counts in by_part.items()}
    most = max((sum(c.values for c in counts) for counts in by_part.values()), default=0)
    for name, counted in count_fields(rows, most, folder / _spill(options)):
        yield name, replace(counted, missing=sum(counts.missing for counts in by_part[name]))


def _rows_of(
    fields: Sequence[str], staged: Sequence[StagedPiece], options: PrepareOptions
) -> pl.LazyFrame:
    """Return the ``key`` of every train value of the fields and, for strings, the ``check``."""
    return pl.concat([_rows_of_field(name, staged, options) for name in fields])


def _rows_of_field(
    name: str, staged: Sequence[StagedPiece], options: PrepareOptions
) -> pl.LazyFrame:
    part = options.part.number
    if options.schema.list_column(name) is not None:
        parts = train_rows(staged, options, lambda path: list_file(path, name), "row", part)
        key, check = "key", "check"
    else:
        parts = train_rows(staged, options, part=part)
        key, check = name, name + CHECK
    rows = pl.concat(parts)
    columns = [pl.col(key).alias("key")]
    if options.kind(name) == "string":
        columns.append(pl.col(check).alias("check"))
    return rows.select(columns)


def _padding(staged: Sequence[StagedPiece], options: PrepareOptions) -> dict[str, int]:
    """Return, by vocabulary, the number of missing ids that pad fixed-width fields in train."""
    padding: dict[str, int] = {}
    for column in (column for column in options.schema.many if column.fixed):
        rows = pl.concat(train_rows(staged, options))
        lengths = rows.select(pl.len(), pl.col(column.name).cast(pl.Int64).sum()).collect()
        name = options.schema.vocabulary(column.name)
        num_missing = int(lengths[0, 0]) * column.most - int(lengths[0, 1])
        padding[name] = padding.get(name, 0) + num_missing
    return padding


def fit_columns(
    staged: Sequence[StagedPiece],
    options: PrepareOptions,
    work: Path,
    plan: str,
    like: Manifest | None,
) -> dict[str, Any]:
    """Return the constants of transforms and weights by column, fitted on train or copied from
    ``like``."""
    if like is not None:
        return dict(like.content["fitted"])
    weight = options.schema.weight
    columns = [c for c in options.numbers if c.transform == "standardise" or c.buckets]
    if not columns and weight is None:
        return {}
    path = work / "fitted.json"
    if not options.part.is_first:
        options.part.wait(work, plan, {path: 1}, "constants")
        return require_record(path, ("fitted",))["fitted"]
    record = read_record(path, ("fitted",))
    if record is None:
        _check_present(staged, options, work)
        names = [column.name for column in columns] + ([weight] if weight else [])
        record = {"fitted": fit(partial(_present, staged, options, names), columns, weight)}
        write_record(path, record)
    return record["fitted"]


def _present(
    staged: Sequence[StagedPiece], options: PrepareOptions, names: Sequence[str]
) -> Iterator[dict[str, Values]]:
    """Yield the non-missing train values of each piece by column."""
    for rows in train_rows(staged, options):
        frame = rows.select(names).collect()
        yield {name: frame[name].drop_nulls().cast(pl.Float32).to_numpy() for name in frame.columns}


def field_entry(
    name: str,
    options: PrepareOptions,
    vocabularies: Mapping[str, FilteredVocabulary],
    fitted: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a field's entry in the manifest."""
    hashed, shared = dict(options.hash_sizes), dict(options.schema.vocabularies)
    entry: dict[str, Any] = {"name": name}
    vocabulary = options.schema.vocabulary(name)
    if name in shared:
        entry["vocabulary"] = vocabulary
    if pair := next((pair for pair in options.crosses if "x".join(pair) == name), None):
        entry["parts"] = list(pair)
    if name in options.keys:
        entry["keyed"] = True
    elif name in hashed:
        entry |= {"rows": hashed[name], "hashed": True}
    elif vocabulary in vocabularies:
        filtered = vocabularies[vocabulary]
        entry |= {"rows": filtered.num_rows, **filtered.counts(is_shared=name in shared)}
    else:
        bounds = fitted[name]["bounds"]
        entry |= {"rows": len(bounds) + 1 + NUM_RESERVED_IDS, "buckets": bounds}
    if (kind := options.kind(name)) is not None:
        entry["kind"] = kind
    if (column := options.schema.list_column(name)) is not None:
        entry["hot"] = column.most
        if not column.fixed:
            entry |= {"ragged": True, "weighted": column.weighted}
    return entry

"""Build the vocabularies from the counts of values in train, and fit the constants of transforms on
train. The work runs as tasks on an engine. Finished results are recorded, so that a resumed run
does not count again. With ``--like``, ids and constants come from an existing set; ``--grow`` adds
ids.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from sbpflow.data.engine import Engine
from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import CHECK, SPLIT_COLUMN
from sbpflow.data.format.vocabulary import (
    Vocabulary,
    fetch_vocabularies,
    read_vocabulary,
    vocabulary_files,
)
from sbpflow.data.prepare.bad_rows import StagedPiece
from sbpflow.data.prepare.distinct import (
    COUNTS_KEYS,
    NO_COUNTS,
    count_group,
    merge_range,
    ranges_of,
    read_merged,
    record_of,
)
from sbpflow.data.prepare.fit import Fit, Values
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.stage import list_file, strings_file
from sbpflow.data.prepare.vocabulary_filter import FilteredVocabulary, filter_values, load, save
from sbpflow.data.prepare.workspace import DamagedWork, read_record, write_record
from sbpflow.serving.cells import NUM_RESERVED_IDS

_GROUP_ROWS = (1 << 16, 1 << 20)
_GROUPS = 8
"""A group has about 1/8 of the train rows, within the limits ``_GROUP_ROWS``"""
_VALUES_AT_ONCE = 1 << 22
_VOCABULARIES_AT_ONCE = 64
"""64 queries at a time are faster than 16 or 256, and need less memory than 256"""


@dataclass(frozen=True, slots=True)
class TrainPiece:
    """A piece with train rows. With a split by time, its first ``limit`` rows are the train
    rows.
    """

    path: Path
    num_rows: int
    limit: int | None

    def rows(self, path: Path | None = None, row: str = "") -> pl.LazyFrame:
        """Return the train rows of the piece or, with ``path``, of another file of the piece. If
        that file has several entries per row, its column ``row`` contains the row numbers.
        """
        frame = pl.scan_ipc(path or self.path, glob=False)
        if self.limit is None:
            return frame.filter(pl.col(SPLIT_COLUMN) == 0)
        return frame.filter(pl.col(row) < self.limit) if row else frame.head(self.limit)


@dataclass(frozen=True, slots=True)
class Group:
    """A group of consecutive pieces that one task counts."""

    number: int
    pieces: tuple[TrainPiece, ...]

    @property
    def num_rows(self) -> int:
        """Return the number of train rows in the group."""
        return sum(piece.num_rows for piece in self.pieces)

    def rows(self) -> list[pl.LazyFrame]:
        """Return the train rows of each piece."""
        return [piece.rows() for piece in self.pieces]

    def values(self, name: str, options: PrepareOptions, rows: list[pl.LazyFrame]) -> pl.LazyFrame:
        """Return the ``key`` of every value of a field in train and, for strings, the ``check``.

        ``rows`` is the result of ``rows()``. If every field scanned the files itself, Polars would
        keep the columns of the files once per field, 1 GB for 1,000 fields.
        """
        if options.schema.list_column(name) is not None:
            frames = [piece.rows(list_file(piece.path, name), "row") for piece in self.pieces]
            key, check = "key", "check"
        else:
            frames = rows
            key, check = name, name + CHECK
        columns = [pl.col(key).alias("key")]
        if options.kind(name) == "string":
            columns.append(pl.col(check).alias("check"))
        return pl.concat(frames).select(columns)

    def numbers(self, names: Sequence[str]) -> Iterator[dict[str, Values]]:
        """Yield, for each piece, the values in train that are not missing, by column."""
        for piece in self.pieces:
            frame = piece.rows().select(names).collect()
            yield {name: frame[name].drop_nulls().cast(pl.Float32).to_numpy() for name in names}


def train_groups(staged: Sequence[StagedPiece], options: PrepareOptions) -> list[Group]:
    """Divide the pieces with train rows into groups; the result depends only on the pieces."""
    pieces: list[TrainPiece] = []
    left, _ = options.split.bounds(sum(piece.num_rows for piece in staged))
    for piece in staged:
        if options.split.kind == "time":
            number = min(max(left, 0), piece.num_rows)
            pieces += [TrainPiece(piece.path, number, number)] if number else []
            left -= piece.num_rows
        elif piece.num_train:
            pieces.append(TrainPiece(piece.path, piece.num_train, None))
    least, most = _GROUP_ROWS
    target = min(max(sum(piece.num_rows for piece in pieces) // _GROUPS, least), most)
    groups: list[list[TrainPiece]] = []
    rows = target
    for piece in pieces:
        if rows + piece.num_rows > target:
            groups.append([])
            rows = 0
        groups[-1].append(piece)
        rows += piece.num_rows
    return [Group(number, tuple(group)) for number, group in enumerate(groups)]


def build_vocabularies(
    staged: Sequence[StagedPiece],
    options: PrepareOptions,
    work: Path,
    like: Manifest | None,
    engine: Engine,
) -> dict[str, FilteredVocabulary]:
    """Count the values of the fields in train, assign ids, and write the vocabularies to
    ``work/set``. Raises DamagedWork if files of an earlier run are damaged and the staged rows no
    longer exist.
    """
    folder = work / "vocabulary"
    folder.mkdir(exist_ok=True)
    (work / "set").mkdir(exist_ok=True)
    built = {name: load(folder / f"{name}.json", work / "set", name) for name in options.counted}
    missing = [name for name, vocabulary in built.items() if vocabulary is None]
    if missing:
        counted = (
            {} if options.is_encode else _count(missing, staged, options, work / "counts", engine)
        )
        opening = None
        if like is not None:
            opening = partial(_opening, like, _parents_folder(like, work, engine))
        jobs = [
            _VocabularyJob(
                name,
                *counted.get(name, (0, 0)),
                None if opening is None else opening(name, fields[0]),
                tuple(_strings_files(fields, staged, options)),
            )
            for name, fields in options.counted.items()
            if built[name] is None
        ]
        new = engine.run(partial(_build, options=options, work=work), jobs)
        built |= {vocabulary.name: vocabulary for vocabulary in new}
        shutil.rmtree(work / "counts", ignore_errors=True)
    return {name: vocabulary for name, vocabulary in built.items() if vocabulary}


def _parents_folder(like: Manifest, work: Path, engine: Engine) -> Path:
    """Return a folder with the vocabularies of ``like`` that all workers can read. The files of a
    set at a URL are in the cache of this host, so they are copied to ``work`` for other processes.
    """
    fetch_vocabularies(like)  # other processes may have removed files from the full cache
    if like.cache is None or engine.shares_memory:
        return like.path.absolute()
    folder = work / "like"
    for file in vocabulary_files(like):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(like.path / file, folder / file)
    return folder


def _opening(like: Manifest, folder: Path, name: str, field: str) -> Callable[[], Vocabulary]:
    """Return a function, which workers can call, that opens the vocabulary of a field in ``like``
    as the vocabulary ``name``; ``folder`` contains its files.
    """
    entry = like.vocabularies[field]
    return partial(read_vocabulary, folder, name, like.field(field).rows, entry)


@dataclass(frozen=True, slots=True)
class _VocabularyJob:
    name: str
    num_ranges: int
    padding: int
    """Number of missing ids that pad rows of fields with a fixed number of ids"""
    open_parent: Callable[[], Vocabulary] | None
    strings: tuple[Path, ...]


def _build(job: _VocabularyJob, *, options: PrepareOptions, work: Path) -> FilteredVocabulary:
    """Assign ids to the counted values of a vocabulary, and save the vocabulary. For ``encode``,
    nothing is counted.
    """
    counted = NO_COUNTS
    if not options.is_encode:
        counted = read_merged(job.name, job.num_ranges, work / "counts")
        counted = replace(counted, missing=counted.missing + job.padding)
    parent = None if job.open_parent is None else job.open_parent()
    vocabulary = filter_values(job.name, counted, options, parent, work / "set", job.strings)
    save(work / "vocabulary" / f"{job.name}.json", vocabulary)
    return vocabulary


def _count(
    names: Sequence[str],
    staged: Sequence[StagedPiece],
    options: PrepareOptions,
    folder: Path,
    engine: Engine,
) -> dict[str, tuple[int, int]]:
    """Count the values in the train rows of each group, and merge the counts by ranges of keys.

    Return, by vocabulary, the number of ranges and the number of padding ids.
    """
    _check_present(staged, folder)
    folder.mkdir(exist_ok=True)
    groups = train_groups(staged, options)
    count = partial(_count_group, options=options, folder=folder)
    records = list(engine.run(count, groups))
    files = [_counts_file(folder, group) for group in groups]
    padding: Counter[str] = Counter()
    for record in records:
        padding.update(record["padding"])
    ranges = {name: ranges_of(name, records) for name in names}
    merge = partial(merge_range, folder=folder, groups=files)
    for _ in engine.run(merge, [each for name in names for each in ranges[name]]):
        pass
    return {name: (len(ranges[name]), padding[name]) for name in names}


def _counts_file(folder: Path, group: Group) -> Path:
    return folder / f"group-{group.number:06d}"


def _count_group(group: Group, *, options: PrepareOptions, folder: Path) -> dict[str, Any]:
    path = _counts_file(folder, group)
    record = read_record(record_of(path), COUNTS_KEYS)
    if record is not None and path.is_file():
        return record
    plain = group.rows()
    rows = {
        name: pl.concat([group.values(field, options, plain) for field in fields])
        for name, fields in options.counted.items()
    }
    padding = _padding(group, options)
    at_once = min(max(1, _VALUES_AT_ONCE // group.num_rows), _VOCABULARIES_AT_ONCE)
    return count_group(rows, at_once, path, padding)


def _strings_files(
    fields: Sequence[str], staged: Sequence[StagedPiece], options: PrepareOptions
) -> list[Path]:
    """Return the files with the strings of a vocabulary, or an empty list if strings are not
    stored.
    """
    if not options.adds_strings or options.kind(fields[0]) != "string":
        return []
    return [strings_file(piece.path, field) for piece in staged for field in fields]


def _check_present(staged: Sequence[StagedPiece], folder: Path) -> None:
    if removed := [piece.path for piece in staged if not piece.path.exists()]:
        raise DamagedWork(f"{folder}: a file is damaged, and its source {removed[0]} was removed")


def _padding(group: Group, options: PrepareOptions) -> dict[str, int]:
    """Return, by vocabulary, how many missing ids pad the group's rows in fields with a fixed
    number of ids.
    """
    padding: dict[str, int] = {}
    for column in (column for column in options.schema.many if column.fixed):
        rows = pl.concat([piece.rows() for piece in group.pieces])
        lengths = rows.select(pl.len(), pl.col(column.name).cast(pl.Int64).sum()).collect()
        name = options.schema.vocabulary(column.name)
        num_missing = int(lengths[0, 0]) * column.most - int(lengths[0, 1])
        padding[name] = padding.get(name, 0) + num_missing
    return padding


def fit_columns(
    staged: Sequence[StagedPiece],
    options: PrepareOptions,
    work: Path,
    like: Manifest | None,
    engine: Engine,
) -> dict[str, Any]:
    """Return the constants of transforms and weights by column, either fitted on train or copied
    from ``like``.
    """
    if like is not None:
        return dict(like.content["fitted"])
    weight = options.schema.weight
    columns = [c for c in options.numbers if c.transform == "standardise" or c.buckets]
    if not columns and weight is None:
        return {}
    path = work / "fitted.json"
    record = read_record(path, ("fitted",))
    if record is None:
        _check_present(staged, work)
        groups, fit = train_groups(staged, options), Fit(columns, weight)
        for part in engine.run(partial(_fit_group, fit=fit.empty()), groups):
            fit.merge(part)
        if fit.seek():
            for part in engine.run(partial(_fit_group, fit=fit.empty()), groups):
                fit.merge(part)
        record = {"fitted": fit.constants()}
        write_record(path, record)
    return record["fitted"]


def _fit_group(group: Group, *, fit: Fit) -> Fit:
    """Add the values of a group to an empty copy of ``fit``; return the copy."""
    fit = fit.empty()
    for values in group.numbers(fit.names):
        fit.add(values)
    return fit


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

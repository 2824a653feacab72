"""Stage the input: parse every piece once into an uncompressed Arrow file of typed columns.

The columns are label uint8, dense int32 or float32, one key per sparse column and cross (null
means missing), and split uint8. A piece is complete once its ``.json`` record has been written.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.npy import file_crc32
from sbpflow.data.format.schema import SPLIT_COLUMN, TIME, Schema
from sbpflow.data.prepare.bad_rows import StagedPiece, check_bad, check_label_rule
from sbpflow.data.prepare.csv_text import parse_table
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.parse import parse_piece
from sbpflow.data.prepare.piece import BadLines, Piece
from sbpflow.data.prepare.pieces import columns_of, pieces_in_order
from sbpflow.data.prepare.remote import InputPath
from sbpflow.data.prepare.source import Input, read_piece
from sbpflow.data.prepare.tables import PIECE_ROWS, count_rows, table_piece
from sbpflow.data.prepare.workspace import read_record, require_record, write_record
from sbpflow.errors import DataError
from sbpflow.runtime.random.splitmix import GAMMA
from sbpflow.sbp.sbp import balanced_sizes

Advance = Callable[[int], None]
ENCODED_KEYS = ("shards", "clamped", "rare", "ranges")
_STAGED_KEYS = (
    *("rows", "train", "lines", "names", "crc32", "counts", "examples", "cut"),
    *("positives", "label_cells"),
)

_EARLY_LINES = 10_000
_EARLY_BAD = 0.5
"""Minimum fraction of bad lines to refuse a file early, after ``_EARLY_LINES`` lines"""


def stage_inputs(
    inputs: Sequence[Input], options: PrepareOptions, work: Path, plan: str, advance: Advance
) -> tuple[StagedPiece, ...]:
    """Stage up to ``options.workers`` pieces in parallel; check bad rows and the train part.

    With several machines, each machine stages its own files and then waits for the other machines.
    """
    for name in ("stage", "encoded"):
        (work / name).mkdir(exist_ok=True)
    part = options.part
    owners = part.owners(inputs)
    own_sources = [source for source in inputs if owners[source.order] == part.number]
    staged: list[StagedPiece] = []
    waiting: deque[tuple[int, Future[StagedPiece]]] = deque()

    def finish() -> None:
        num_bytes, future = waiting.popleft()
        staged.append(future.result())
        advance(num_bytes)
        if sum(piece.num_lines for piece in staged) >= _EARLY_LINES:
            check_bad(staged, options, early=_EARLY_BAD)

    schema = options.schema
    columns = {
        source.order: columns_of(source, schema, options.is_encode) for source in own_sources
    }
    with ThreadPoolExecutor(options.workers) as pool:
        for job in _jobs(own_sources, columns, options, work):
            waiting.append((job.num_bytes, pool.submit(_stage_piece, job, options)))
            if len(waiting) > options.workers:
                finish()
        while waiting:
            finish()
    has_labels = {
        order: [name for name in (schema.label, *schema.labels) if name in names]
        for order, names in columns.items()
    }
    if not part.is_alone:
        for source in own_sources:
            number = sum(piece.file == source.path for piece in staged)
            content = {"pieces": number, "labels": has_labels[source.order]}
            write_record(_source_record(work, source), content)
        files = {_source_record(work, source): owners[source.order] for source in inputs}
        part.wait(work, plan, files, "staged rows")
        staged = _all_staged(inputs, owners, has_labels, staged, work)
    _check_labels(inputs, has_labels, schema)
    check_bad(staged, options)
    num_train = None if options.split.kind == "time" else sum(p.num_train for p in staged)
    if not options.is_encode:
        check_label_rule(staged, schema)
        options.split.check_train(sum(piece.num_rows for piece in staged), num_train)
    return tuple(staged)


def _source_record(work: Path, source: Input) -> Path:
    """Return the path of the record that exists once a file is fully staged."""
    return work / "stage" / f"{source.order:05d}.json"


def _all_staged(
    inputs: Sequence[Input],
    owners: Mapping[int, int],
    has_labels: dict[int, list[str]],
    own_pieces: Sequence[StagedPiece],
    work: Path,
) -> list[StagedPiece]:
    """Return the pieces of all machines in order, and update ``has_labels`` from other machines."""
    own = {piece.path: piece for piece in own_pieces}
    staged: list[StagedPiece] = []
    for source in inputs:
        record = require_record(_source_record(work, source), ("pieces", "labels"))
        has_labels[source.order] = record["labels"]
        for index in range(record["pieces"]):
            target = _target(work, source, index)
            piece = own.get(target)
            if piece is None:
                piece_record = require_record(target.with_suffix(".json"), _STAGED_KEYS)
                piece = _staged(target, source.path, piece_record, owners[source.order])
            staged.append(piece)
    return staged


def _target(work: Path, source: Input, index: int) -> Path:
    return work / "stage" / f"{source.order:05d}-{index:06d}.arrow"


def encoded_record(target: Path) -> Path:
    """Return the path of the record that exists once a staged piece has been encoded."""
    return target.parent.with_name("encoded") / f"{target.stem}.json"


@dataclass(frozen=True, slots=True)
class _Job:
    """Describes a piece to stage; ``text`` is set only for files that must be read in order."""

    target: Path
    source: Input
    columns: tuple[str, ...]
    index: int
    num_bytes: int
    text: bytes | None = None


def _jobs(
    inputs: Sequence[Input],
    columns_by_order: Mapping[int, tuple[str, ...]],
    options: PrepareOptions,
    work: Path,
) -> Iterator[_Job]:
    size, schema = options.piece_bytes, options.schema
    for source in inputs:
        pieces: Iterator[tuple[bytes | None, int]]
        if source.is_compressed or (schema.quote is not None and not source.is_table):
            pieces = pieces_in_order(source.path, size, schema.quote)
        else:
            num_pieces = -(-source.num_bytes // size)
            if source.is_table:
                num_pieces = -(-count_rows(source.path) // PIECE_ROWS)
            pieces = ((None, part) for part in balanced_sizes(source.num_bytes, max(num_pieces, 1)))
        columns = columns_by_order[source.order]
        for index, (text, num_bytes) in enumerate(pieces):
            yield _Job(_target(work, source, index), source, columns, index, num_bytes, text)


def _check_labels(
    inputs: Sequence[Input], has_labels: Mapping[int, Sequence[str]], schema: Schema
) -> None:
    """Raise DataError if some files have labels and other files do not."""
    for name in (schema.label, *schema.labels):
        has = [name in has_labels[source.order] for source in inputs]
        if any(has) and not all(has):
            raise DataError(
                f"{inputs[has.index(False)].path}: no column {name!r}, but "
                f"{inputs[has.index(True)].path} has it; encode files with and without labels "
                "separately"
            )


def _stage_piece(job: _Job, options: PrepareOptions) -> StagedPiece:
    path = job.target.with_suffix(".json")
    record = read_record(path, _STAGED_KEYS)
    if record is None or not _is_whole(job, record, options):
        piece = _read(job, options)
        frame, split = _with_split(job, piece, options)
        frame.write_ipc(job.target, compression="uncompressed")
        for name, values in piece.lists.items():
            values = values.with_columns(pl.Series(SPLIT_COLUMN, split[values["row"].to_numpy()]))
            values.write_ipc(list_file(job.target, name), compression="uncompressed")
        for name in piece.strings.keys() - dict(options.hash_sizes).keys():
            piece.strings[name].write_ipc(
                strings_file(job.target, name), compression="uncompressed"
            )
        record = {
            "rows": len(frame),
            "train": int((split == 0).sum()),
            "lines": piece.num_lines,
            "names": _num_names(job, options.schema),
            "crc32": _crc32(job.target, options),
            "counts": piece.bad.counts,
            "examples": piece.bad.examples,
            "cut": piece.cut,
            "positives": _num_positives(frame, options.schema),
            "label_cells": piece.label_cells,
        }
        write_record(path, record)
    return _staged(job.target, job.source.path, record, options.part.number)


def _staged(target: Path, source: InputPath, record: Mapping[str, Any], part: int) -> StagedPiece:
    bad = BadLines(record["counts"], [tuple(example) for example in record["examples"]])
    return StagedPiece(
        target,
        source,
        record["rows"],
        record["train"],
        record["lines"],
        record["names"],
        bad,
        record["cut"],
        part,
        record["positives"],
        record["label_cells"],
    )


def _num_positives(frame: pl.DataFrame, schema: Schema) -> int:
    return int((frame[schema.label] == 1).sum()) if schema.label in frame.columns else 0


def _with_split(
    job: _Job, piece: Piece, options: PrepareOptions
) -> tuple[pl.DataFrame, NDArray[np.uint8]]:
    """Return the rows with crosses and splits, and the splits as a separate array."""
    frame, rule, schema = piece.frame, options.split, options.schema
    if rule.kind == "date" and schema.time is not None:
        split = rule.of_times(frame[TIME].to_numpy(), schema.time[1])
    else:
        key = (options.seed, job.source.order, job.index)
        split = rule.of_piece(job.source.path.name, key, len(frame))
    crosses = (cross_key(frame, pair, schema) for pair in options.crosses)
    return frame.with_columns(*crosses, pl.Series(SPLIT_COLUMN, split)), split


def list_file(target: Path, name: str) -> Path:
    """Return the path of the file with a piece's values of a list column."""
    return target.with_suffix(f".{name}.list")


def strings_file(target: Path, name: str) -> Path:
    """Return the path of the file with the distinct strings of a column in a piece.

    Unlike staged rows, these files stay until the set is complete.
    """
    return target.with_suffix(f".{name}.strings")


def staged_files(target: Path, options: PrepareOptions) -> list[Path]:
    """Return the paths of a piece's staged files, except the record."""
    names = (column.name for column in options.schema.many)
    return [target, *(list_file(target, name) for name in names)]


def _crc32(target: Path, options: PrepareOptions) -> list[int]:
    return [file_crc32(path) for path in staged_files(target, options)]


def _read(job: _Job, options: PrepareOptions) -> Piece:
    schema = options.schema
    if job.source.is_table:
        return table_piece(job.source.path, job.index, schema, options.adds_strings)
    text = job.text
    if text is None:
        text = read_piece(job.source.path, job.index, options.piece_bytes)
    if schema.is_plain and job.columns == schema.columns and not options.adds_strings:
        return parse_piece(text, schema)
    return parse_table(text, job.columns, schema, _num_names(job, schema), options.adds_strings)


def _num_names(job: _Job, schema: Schema) -> int:
    return int(schema.header and job.index == 0 and not job.source.is_table)


def _is_whole(job: _Job, record: Mapping[str, Any], options: PrepareOptions) -> bool:
    """Return True if the staged files are unchanged or no longer needed."""
    if read_record(encoded_record(job.target), ENCODED_KEYS) is not None:
        return True
    files = staged_files(job.target, options)
    return all(map(Path.is_file, files)) and _crc32(job.target, options) == record["crc32"]


def cross_key(frame: pl.DataFrame, pair: tuple[str, str], schema: Schema) -> pl.Series:
    """Return 64-bit keys of a column pair, or null if a value is missing; keys of hex values never
    collide."""
    left, right = (frame[name].cast(pl.UInt64) for name in pair)
    a, b = (column.fill_null(0).to_numpy() for column in (left, right))
    if schema.kind(pair[0]) == schema.kind(pair[1]) == "hex":
        keys = (a << np.uint64(32)) | b
    else:
        keys = (a * np.uint64(GAMMA)) ^ (b + (a >> np.uint64(29)))
    missing = left.is_null() | right.is_null()
    return pl.select(pl.when(~missing).then(pl.Series(keys))).to_series().alias("x".join(pair))

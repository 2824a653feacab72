"""Stage the input: parse every piece into an uncompressed Arrow file of typed columns.

The columns include the label (uint8), dense values (int32 or float32), a key for each sparse column
and cross (null if missing), and the split (uint8). A piece is complete once its ``.json`` record
has been written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.engine import Engine
from sbpflow.data.format.npy import file_crc32
from sbpflow.data.format.schema import SPLIT_COLUMN, TIME, Schema
from sbpflow.data.prepare.bad_rows import StagedPiece, check_bad, check_label_rule
from sbpflow.data.prepare.csv_text import parse_table
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.parse import parse_piece
from sbpflow.data.prepare.piece import BadLines, Piece
from sbpflow.data.prepare.pieces import columns_of, pieces_in_order
from sbpflow.data.prepare.source import Input, read_piece
from sbpflow.data.prepare.tables import PIECE_ROWS, count_rows, table_piece
from sbpflow.data.prepare.workspace import read_record, write_record
from sbpflow.errors import DataError
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.sbp.sbp import balanced_sizes
from sbpflow.serving.cells import pair_keys

Advance = Callable[[int], object]
ENCODED_KEYS = ("shards", "clamped", "rare", "ranges")
_PIECE_KEYS = (
    *("num_rows", "num_train", "num_lines", "num_names", "num_extra", "num_positives"),
    *("cut", "label_cells"),
)
_STAGED_KEYS = (*_PIECE_KEYS, "counts", "examples", "crc32")

_EARLY_LINES = 10_000
_EARLY_BAD = 0.5
"""The input is rejected early if, after ``_EARLY_LINES`` lines, more than this fraction of the
lines are bad
"""


def stage_inputs(
    inputs: Sequence[Input],
    options: PrepareOptions,
    work: Path,
    engine: Engine,
    advance: Advance,
) -> tuple[StagedPiece, ...]:
    """Stage all pieces as tasks on the engine. Raises DataError for too many bad lines, and
    ConfigError for an empty train split.
    """
    for name in ("stage", "encoded"):
        (work / name).mkdir(exist_ok=True)
    schema = options.schema
    columns = {source.order: columns_of(source, schema, options.is_encode) for source in inputs}
    staged: list[StagedPiece] = []
    num_lines = num_bad = 0
    jobs = _jobs(inputs, columns, options, as_text=engine.shares_memory)
    for pieces in engine.run(partial(_stage, options=options, work=work), jobs):
        for piece, num_bytes in pieces:
            staged.append(piece)
            num_lines += piece.num_lines - piece.bad.blank
            num_bad += piece.bad.total
            advance(num_bytes)
        if num_lines >= _EARLY_LINES and num_bad > _EARLY_BAD * num_lines:
            check_bad(staged, options, early=_EARLY_BAD)
    _check_labels(inputs, columns, schema)
    check_bad(staged, options)
    num_train = None if options.split.kind == "time" else sum(p.num_train for p in staged)
    if not options.is_encode:
        check_label_rule(staged, schema)
        options.split.check_train(sum(piece.num_rows for piece in staged), num_train)
    return tuple(staged)


def encoded_record(target: Path) -> Path:
    """Return the path of the record that marks a staged piece as encoded."""
    return target.parent.with_name("encoded") / f"{target.stem}.json"


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece to stage, or all pieces of a file that must be read from the beginning. If tasks
    share this process's memory, each piece of such a file is a job with its ``text``. Otherwise,
    one job with ``index`` None reads the whole file.
    """

    source: Input
    columns: tuple[str, ...]
    index: int | None
    num_bytes: int
    text: bytes | None = None


def _jobs(
    inputs: Sequence[Input],
    columns_by_order: Mapping[int, tuple[str, ...]],
    options: PrepareOptions,
    *,
    as_text: bool,
) -> Iterator[_Job]:
    size, schema = options.piece_bytes, options.schema
    for source in inputs:
        columns = columns_by_order[source.order]
        if source.is_compressed or (schema.quote is not None and not source.is_table):
            job = _Job(source, columns, None, source.num_bytes)
            yield from _in_order(job, options) if as_text else (job,)
            continue
        num_pieces = -(-source.num_bytes // size)
        if source.is_table:
            num_pieces = -(-count_rows(source.path) // PIECE_ROWS)
        for index, num_bytes in enumerate(balanced_sizes(source.num_bytes, max(num_pieces, 1))):
            yield _Job(source, columns, index, num_bytes)


def _in_order(job: _Job, options: PrepareOptions) -> Iterator[_Job]:
    """Read a file from the beginning; yield a job with the text of each piece."""
    pieces = pieces_in_order(job.source.path, options.piece_bytes, options.schema.quote)
    for index, (text, num_bytes) in enumerate(pieces):
        yield _Job(job.source, job.columns, index, num_bytes, text)


def _check_labels(
    inputs: Sequence[Input], columns: Mapping[int, Sequence[str]], schema: Schema
) -> None:
    """Raise DataError if some of the files have a label column and others do not."""
    for name in (schema.label, *schema.labels):
        has = [name in columns[source.order] for source in inputs]
        if any(has) and not all(has):
            raise DataError(
                f"{inputs[has.index(False)].path} has no column {name!r}, but "
                f"{inputs[has.index(True)].path} has it; encode files with and without labels "
                "separately"
            )


def _stage(job: _Job, *, options: PrepareOptions, work: Path) -> list[tuple[StagedPiece, int]]:
    """Stage the pieces of a job; return each piece with the number of bytes of its file that it
    covers.
    """
    jobs = (job,) if job.index is not None else _in_order(job, options)
    return [(_stage_piece(each, options, work), each.num_bytes) for each in jobs]


def _stage_piece(job: _Job, options: PrepareOptions, work: Path) -> StagedPiece:
    target = work / "stage" / f"{job.source.order:05d}-{job.index:06d}.arrow"
    path = target.with_suffix(".json")
    record = read_record(path, _STAGED_KEYS)
    if record is None or not _is_whole(target, record, options):
        piece = _read(job, options)
        frame, split = _with_split(job, piece, options)
        _write(frame, target)
        for name, values in piece.lists.items():
            values = values.with_columns(pl.Series(SPLIT_COLUMN, split[values["row"].to_numpy()]))
            _write(values, list_file(target, name))
        for name in piece.strings.keys() - dict(options.hash_sizes).keys():
            _write(piece.strings[name], strings_file(target, name))
        record = {
            "num_rows": len(frame),
            "num_train": int((split == 0).sum()),
            "num_lines": piece.num_lines,
            "num_names": _num_names(job, options.schema),
            "num_extra": piece.num_extra,
            "num_positives": _num_positives(frame, options.schema),
            "cut": piece.cut,
            "label_cells": piece.label_cells,
            "counts": piece.bad.counts,
            "examples": piece.bad.examples,
            "crc32": _crc32(target, options),
        }
        write_record(path, record)
    bad = BadLines(record["counts"], [tuple(example) for example in record["examples"]])
    known = {key: record[key] for key in _PIECE_KEYS}
    return StagedPiece(path=target, file=job.source.path, bad=bad, **known)


def _write(frame: pl.DataFrame, path: Path) -> None:
    with replacing(path) as unfinished:
        frame.write_ipc(unfinished, compression="uncompressed")


def _num_positives(frame: pl.DataFrame, schema: Schema) -> int:
    return int((frame[schema.label] == 1).sum()) if schema.label in frame.columns else 0


def _with_split(
    job: _Job, piece: Piece, options: PrepareOptions
) -> tuple[pl.DataFrame, NDArray[np.uint8]]:
    """Return the rows with added columns of crosses and splits, and the splits as a separate
    array.
    """
    frame, rule, schema = piece.frame, options.split, options.schema
    if rule.kind == "date" and schema.time is not None:
        split = rule.of_times(frame[TIME].to_numpy(), schema.time[1])
    else:
        key = (options.seed, job.source.order, job.index)
        split = rule.of_piece(job.source.path.name, key, len(frame))
    crosses = (cross_key(frame, pair, schema) for pair in options.crosses)
    return frame.with_columns(*crosses, pl.Series(SPLIT_COLUMN, split)), split


def list_file(target: Path, name: str) -> Path:
    """Return the path of the file with the values of list column ``name`` in a piece."""
    return target.with_suffix(f".{name}.list")


def strings_file(target: Path, name: str) -> Path:
    """Return the path of the file with the distinct strings of column ``name`` in a piece.

    Unlike staged rows, these strings are kept until the set is complete.
    """
    return target.with_suffix(f".{name}.strings")


def staged_files(target: Path, options: PrepareOptions) -> list[Path]:
    """Return the paths of the staged files of a piece, except its record and its strings."""
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


def _is_whole(target: Path, record: Mapping[str, Any], options: PrepareOptions) -> bool:
    """Return whether the staged files of a piece are unchanged or no longer needed."""
    if read_record(encoded_record(target), ENCODED_KEYS) is not None:
        return True
    files = staged_files(target, options)
    return all(map(Path.is_file, files)) and _crc32(target, options) == record["crc32"]


def cross_key(frame: pl.DataFrame, pair: tuple[str, str], schema: Schema) -> pl.Series:
    """Return the 64-bit keys of a pair of columns, or null where one of the values is missing."""
    left, right = (frame[name].cast(pl.UInt64) for name in pair)
    a, b = (column.fill_null(0).to_numpy() for column in (left, right))
    keys = pair_keys(a, b, schema.kind(pair[0]) == schema.kind(pair[1]) == "hex")
    missing = left.is_null() | right.is_null()
    return pl.select(pl.when(~missing).then(pl.Series(keys))).to_series().alias("x".join(pair))

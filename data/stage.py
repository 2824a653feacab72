"""The stage: every input piece parsed once into an uncompressed Arrow file of typed columns.

Columns: label uint8, dense int32, one key per sparse column and cross (null = missing), split
uint8. A piece is done when its ``.json`` is there; it is written last.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from data.options import PrepareOptions
from data.parquet import PIECE_ROWS, count_rows, parquet_piece
from data.parse import BadLines, Piece, parse_piece
from data.schema import Schema
from data.source import Input, gzip_pieces, read_piece
from sbpflow.errors import DataError
from sbpflow.sbp import balanced_sizes

Advance = Callable[[int], None]
SPLIT_COLUMN = "__split"

_EARLY_LINES = 10_000
_EARLY_BAD = 0.5
"""A file of another format is refused after its first lines, not after its last."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One piece on disk: its rows, the lines it came from and what was left out."""

    path: Path
    file: Path
    num_rows: int
    num_lines: int
    bad: BadLines


def stage_inputs(
    inputs: Sequence[Input], options: PrepareOptions, folder: Path, advance: Advance
) -> tuple[Staged, ...]:
    """Stage all pieces, ``options.workers`` at a time, and check the limit on bad rows."""
    folder.mkdir(exist_ok=True)
    staged: list[Staged] = []
    waiting: deque[tuple[int, Future[Staged]]] = deque()

    def finish() -> None:
        num_bytes, future = waiting.popleft()
        staged.append(future.result())
        advance(num_bytes)
        if sum(piece.num_lines for piece in staged) >= _EARLY_LINES:
            check_bad(staged, max(_EARLY_BAD, options.max_bad_fraction))

    with ThreadPoolExecutor(options.workers) as pool:
        for job in _jobs(inputs, options, folder):
            waiting.append((job.num_bytes, pool.submit(_stage_piece, job, options)))
            if len(waiting) > options.workers:
                finish()
        while waiting:
            finish()
    check_bad(staged, options.max_bad_fraction)
    return tuple(staged)


@dataclass(frozen=True, slots=True)
class _Job:
    """One piece to stage; ``text`` only where the file must be read in order."""

    target: Path
    source: Input
    index: int
    num_bytes: int
    text: bytes | None = None


def _jobs(inputs: Sequence[Input], options: PrepareOptions, folder: Path) -> Iterator[_Job]:
    size = options.piece_bytes
    for source in inputs:
        if source.is_gzip:
            for index, (text, num_bytes) in enumerate(gzip_pieces(source.path, size)):
                yield _Job(_target(folder, source, index), source, index, num_bytes, text)
            continue
        count = -(-source.num_bytes // size)
        if source.is_parquet:
            count = -(-count_rows(source.path, options.schema) // PIECE_ROWS)
        for index, num_bytes in enumerate(balanced_sizes(source.num_bytes, max(count, 1))):
            yield _Job(_target(folder, source, index), source, index, num_bytes)


def _target(folder: Path, source: Input, index: int) -> Path:
    return folder / f"{source.order:05d}-{index:06d}.arrow"


def _stage_piece(job: _Job, options: PrepareOptions) -> Staged:
    record = job.target.with_suffix(".json")
    if not _is_whole(job.target, record):
        piece = _read(job, options)
        key = (options.seed, job.source.order, job.index)
        split = options.split.of_piece(job.source.path.name, key, len(piece.frame))
        frame = piece.frame.with_columns(
            *(cross_key(piece.frame, pair, options.schema) for pair in options.crosses),
            pl.Series(SPLIT_COLUMN, split),
        )
        frame.write_ipc(job.target, compression="uncompressed")
        _write_record(record, piece, job.target.stat().st_size)
    return _read_record(job.target, job.source)


def _read(job: _Job, options: PrepareOptions) -> Piece:
    if job.source.is_parquet:
        return parquet_piece(job.source.path, job.index, options.schema)
    text = job.text
    if text is None:
        text = read_piece(job.source.path, job.index, options.piece_bytes)
    return parse_piece(text, options.schema)


def _is_whole(target: Path, record: Path) -> bool:
    """Whether a piece was staged: its record is there, and the file has the size it says."""
    try:
        size = json.loads(record.read_text(encoding="ascii"))["bytes"]
        return target.stat().st_size == size
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_record(record: Path, piece: Piece, num_bytes: int) -> None:
    bad = {"counts": piece.bad.counts, "examples": piece.bad.examples}
    content = {"rows": len(piece.frame), "lines": piece.num_lines, "bytes": num_bytes, **bad}
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="ascii")
    os.replace(partial, record)


def _read_record(target: Path, source: Input) -> Staged:
    raw: dict[str, Any] = json.loads(target.with_suffix(".json").read_text(encoding="ascii"))
    bad = BadLines(raw["counts"], [tuple(example) for example in raw["examples"]])
    return Staged(target, source.path, raw["rows"], raw["lines"], bad)


def cross_key(frame: pl.DataFrame, pair: tuple[str, str], schema: Schema) -> pl.Series:
    """64-bit keys of a pair of columns, null where either is missing; exact for hex columns."""
    left, right = (frame[name].cast(pl.UInt64) for name in pair)
    a, b = (column.fill_null(0).to_numpy() for column in (left, right))
    if schema.kind(pair[0]) == schema.kind(pair[1]) == "hex":
        keys = (a << np.uint64(32)) | b
    else:
        keys = (a * np.uint64(0x9E3779B97F4A7C15)) ^ (b + (a >> np.uint64(29)))
    missing = left.is_null() | right.is_null()
    return pl.select(pl.when(~missing).then(pl.Series(keys))).to_series().alias("x".join(pair))


def check_bad(staged: Sequence[Staged], limit: float) -> None:
    """Raise DataError, with counts and the first bad lines, when more than ``limit`` are bad."""
    num_lines = sum(piece.num_lines for piece in staged)
    num_bad = sum(piece.bad.total for piece in staged)
    if num_lines - num_bad == 0:
        raise DataError(f"--input: no usable row in {num_lines} lines{describe_bad(staged)}")
    if num_bad > limit * num_lines:
        raise DataError(
            f"--input: {num_bad} of {num_lines} lines are bad, more than --max-bad-fraction "
            f"{limit:g}{describe_bad(staged)}"
        )


def bad_counts(staged: Sequence[Staged]) -> dict[str, int]:
    """Bad lines by reason over all pieces."""
    counts: dict[str, int] = {}
    for piece in staged:
        for reason, count in piece.bad.counts.items():
            counts[reason] = counts.get(reason, 0) + count
    return dict(sorted(counts.items()))


def describe_bad(staged: Sequence[Staged], shown: int = 5) -> str:
    """Counts per reason and the first bad lines with file and line number; empty if none."""
    text = "".join(f"\n  {count} x {reason}" for reason, count in bad_counts(staged).items())
    line_of_file: dict[Path, int] = {}
    for piece in staged:
        first = line_of_file.get(piece.file, 1)
        line_of_file[piece.file] = first + piece.num_lines
        for number, reason, line in piece.bad.examples[:shown]:
            text += f"\n  {piece.file}:{first + number}: {reason}: {line!r}"
        shown -= min(shown, len(piece.bad.examples))
    return text

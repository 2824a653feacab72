"""The stage: every input piece parsed once into an uncompressed Arrow file of typed columns.

Columns: label uint8, dense int32, one key per sparse column and cross (null = missing), split
uint8. A piece is done when its ``.json`` is there; it is written last.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from data.format.npy import file_crc32
from data.format.schema import SPLIT_COLUMN, Schema
from data.prepare.options import PrepareOptions
from data.prepare.parquet import PIECE_ROWS, count_rows, parquet_piece
from data.prepare.parse import BadLines, Piece, parse_piece
from data.prepare.source import Input, gzip_pieces, read_piece
from data.prepare.workspace import read_record, write_record
from sbpflow.errors import DataError
from sbpflow.sbp.sbp import balanced_sizes

Advance = Callable[[int], None]
ENCODED_KEYS = ("shards", "clamped")
_STAGED_KEYS = ("rows", "train", "lines", "crc32", "counts", "examples")

_EARLY_LINES = 10_000
_EARLY_BAD = 0.5
"""A file of another format is refused after its first lines, not after its last."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One piece on disk: its rows, the lines it came from and what was left out."""

    path: Path
    file: Path
    num_rows: int
    num_train: int
    """Rows for train by ratio or by file; all of them where the split is by time."""
    num_lines: int
    bad: BadLines


def stage_inputs(
    inputs: Sequence[Input], options: PrepareOptions, work: Path, advance: Advance
) -> tuple[Staged, ...]:
    """Stage all pieces, ``options.workers`` at a time; check the bad rows and the train part."""
    for name in ("stage", "encoded"):
        (work / name).mkdir(exist_ok=True)
    staged: list[Staged] = []
    waiting: deque[tuple[int, Future[Staged]]] = deque()

    def finish() -> None:
        num_bytes, future = waiting.popleft()
        staged.append(future.result())
        advance(num_bytes)
        if sum(piece.num_lines for piece in staged) >= _EARLY_LINES:
            check_bad(staged, max(_EARLY_BAD, options.max_bad_fraction))

    with ThreadPoolExecutor(options.workers) as pool:
        for job in _jobs(inputs, options, work):
            waiting.append((job.num_bytes, pool.submit(_stage_piece, job, options)))
            if len(waiting) > options.workers:
                finish()
        while waiting:
            finish()
    check_bad(staged, options.max_bad_fraction)
    num_train = None if options.split.kind == "time" else sum(p.num_train for p in staged)
    options.split.check_train(sum(piece.num_rows for piece in staged), num_train)
    return tuple(staged)


def encoded_record(work: Path, number: int) -> Path:
    """Where it says that piece ``number`` is encoded; its staged file is then of no more use."""
    return work / "encoded" / f"{number:06d}.json"


@dataclass(frozen=True, slots=True)
class _Job:
    """One piece to stage; ``text`` only where the file must be read in order."""

    target: Path
    encoded: Path
    source: Input
    index: int
    num_bytes: int
    text: bytes | None = None


def _jobs(inputs: Sequence[Input], options: PrepareOptions, work: Path) -> Iterator[_Job]:
    size = options.piece_bytes
    numbers = count()

    def job(source: Input, index: int, num_bytes: int, text: bytes | None = None) -> _Job:
        target = work / "stage" / f"{source.order:05d}-{index:06d}.arrow"
        return _Job(target, encoded_record(work, next(numbers)), source, index, num_bytes, text)

    for source in inputs:
        if source.is_gzip:
            for index, (text, num_bytes) in enumerate(gzip_pieces(source.path, size)):
                yield job(source, index, num_bytes, text)
            continue
        num_pieces = -(-source.num_bytes // size)
        if source.is_parquet:
            num_pieces = -(-count_rows(source.path, options.schema) // PIECE_ROWS)
        for index, num_bytes in enumerate(balanced_sizes(source.num_bytes, max(num_pieces, 1))):
            yield job(source, index, num_bytes)


def _stage_piece(job: _Job, options: PrepareOptions) -> Staged:
    path = job.target.with_suffix(".json")
    record = read_record(path, _STAGED_KEYS)
    if record is None or not _is_whole(job, record):
        piece = _read(job, options)
        key = (options.seed, job.source.order, job.index)
        split = options.split.of_piece(job.source.path.name, key, len(piece.frame))
        frame = piece.frame.with_columns(
            *(cross_key(piece.frame, pair, options.schema) for pair in options.crosses),
            pl.Series(SPLIT_COLUMN, split),
        )
        frame.write_ipc(job.target, compression="uncompressed")
        record = {
            "rows": len(frame),
            "train": int((split == 0).sum()),
            "lines": piece.num_lines,
            "crc32": file_crc32(job.target),
            "counts": piece.bad.counts,
            "examples": piece.bad.examples,
        }
        write_record(path, record)
    bad = BadLines(record["counts"], [tuple(example) for example in record["examples"]])
    return Staged(
        job.target, job.source.path, record["rows"], record["train"], record["lines"], bad
    )


def _read(job: _Job, options: PrepareOptions) -> Piece:
    if job.source.is_parquet:
        return parquet_piece(job.source.path, job.index, options.schema)
    text = job.text
    if text is None:
        text = read_piece(job.source.path, job.index, options.piece_bytes)
    return parse_piece(text, options.schema)


def _is_whole(job: _Job, record: Mapping[str, Any]) -> bool:
    """Whether the staged file is what an earlier run wrote, or not needed any more."""
    if read_record(job.encoded, ENCODED_KEYS) is not None:
        return True
    return job.target.is_file() and file_crc32(job.target) == record["crc32"]


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
        for reason, number in piece.bad.counts.items():
            counts[reason] = counts.get(reason, 0) + number
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

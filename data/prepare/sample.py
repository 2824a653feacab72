"""Read the first rows of tables with column names, from which a schema is proposed."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from sbpflow.data.format.schema import CRITEO, CSV_SEPARATORS, SEPARATORS, Kind, Schema
from sbpflow.data.prepare.cells import REAL_PATTERN
from sbpflow.data.prepare.csv_text import read_records, split_cells, split_record
from sbpflow.data.prepare.piece import BadLines
from sbpflow.data.prepare.source import Input, open_text
from sbpflow.data.prepare.tables import plain_types, table_columns, table_head
from sbpflow.errors import ConfigError, DataError

MAX_ROWS = 100_000
_MAX_FILES = 8
_MAX_BYTES = 16 << 20
_FIRST_LINES = 50
_QUOTE = '"'


@dataclass(frozen=True)
class Sample:
    """The first rows of some files. Cells of text files are strings; empty cells are null."""

    frame: pl.DataFrame
    files: tuple[str, ...]
    separator: str | None = None
    """Separator of text files, or None for Parquet and Arrow"""
    quote: bool = False


def needs_schema(source: Input) -> bool:
    """Return whether the file is a table whose column names are not Criteo's."""
    if source.is_table:
        is_local = isinstance(source.path, Path)
        return is_local and not set(CRITEO.features) <= set(table_columns(source.path))
    text = _head(source, 1 << 20, errors="replace")  # ``prepare`` skips lines with broken encoding
    if text.partition("\n")[0].count("\t") + 1 == len(CRITEO.columns):
        return False
    return _separator(text) is not None


def read_sample(inputs: Sequence[Input]) -> Sample:
    """Return the first rows of up to eight files. Raises DataError if the first file is text
    without column names, and ConfigError for a remote file.
    """
    count = min(len(inputs), _MAX_FILES)
    chosen = [inputs[k * len(inputs) // count] for k in range(count)]
    names = tuple(source.path.name for source in chosen)
    if remote := [source.path for source in chosen if not isinstance(source.path, Path)]:
        raise ConfigError(
            f"{remote[0]}: a schema is proposed from local files only; copy one of the files, and "
            "run `sbpflow schema` on the copy"
        )
    if chosen[0].is_table:
        frames = [table_head(source.path, MAX_ROWS // count) for source in chosen]
        frame = plain_types(_joined(frames, names))
        return Sample(frame.with_columns(pl.col(pl.Float32, pl.Float64).fill_nan(None)), names)
    texts = [_head(source, _MAX_BYTES // count) for source in chosen]
    separator = _separator(texts[0])
    if separator is None:
        raise DataError(
            f"{chosen[0].path}: the first line is not a list of column names; list the columns in "
            "a --schema file (docs/data.md)"
        )
    quote = _quote("\n".join(texts), separator)
    frames = [
        _cells(source, text, separator, quote, MAX_ROWS // count)
        for source, text in zip(chosen, texts, strict=True)
    ]
    return Sample(pl.concat(frames, how="diagonal"), names, separator, quote is not None)


def _joined(frames: Sequence[pl.DataFrame], names: Sequence[str]) -> pl.DataFrame:
    try:
        return pl.concat(frames, how="diagonal_relaxed")
    except pl.exceptions.PolarsError as error:
        kinds: dict[str, dict[str, None]] = {}
        for frame in frames:
            for name, kind in frame.schema.items():
                kinds.setdefault(name, {})[str(kind)] = None
        differ = [f"{name} ({', '.join(of)})" for name, of in kinds.items() if len(of) > 1]
        raise DataError(
            f"{', '.join(names)}: the types of a column differ: {'; '.join(differ)}; write each "
            "column with the same type in all files"
        ) from error


def _head(source: Input, num_bytes: int, errors: str = "strict") -> str:
    """Return the complete lines in the first ``num_bytes`` bytes of a text file.

    ``errors`` is the error handler for bytes that are not UTF-8 text.
    """
    with open_text(source.path) as text:
        raw = text.file.read(num_bytes)
    if len(raw) == num_bytes:
        raw = raw[: raw.rfind(b"\n") + 1]
    try:
        return raw.decode(errors=errors).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source.path}: the first rows are not UTF-8 text; convert the file"
        ) from error


def _separator(text: str) -> str | None:
    """Return the separator that splits the header and at least 90% of the first rows into the same
    number of cells, or None.
    """
    first = "\n".join(text.split("\n", _FIRST_LINES)[:_FIRST_LINES])
    best, most = None, 1
    for mark in SEPARATORS:
        lines = [line for line in _quoted(mark).sub("q", first).split("\n") if line]
        counts = [line.count(mark) + 1 for line in lines]
        if counts and counts[0] > most and counts.count(counts[0]) >= 0.9 * len(counts):
            best, most = mark, counts[0]
    if best is None:
        return None
    names, _ = _names(text, best, _quote(first, best))
    return best if _are_names(names) else None


def _quoted(separator: str) -> re.Pattern[str]:
    """Return a pattern that matches quotes around a whole cell, with the cell."""
    end = f"[\n{re.escape(separator)}]"
    return re.compile(f'(?:^|(?<={end}))"(?:[^"]|"")*+"(?={end}|$)')


def _quote(text: str, separator: str) -> str | None:
    """Return the quote character, or None if no quote in the text encloses a whole cell. CSV may
    have quotes after the sample.
    """
    if _QUOTE not in text:
        return _QUOTE if separator in CSV_SEPARATORS else None
    return _QUOTE if _quoted(separator).search(text) else None


def _schema(names: tuple[str, ...], separator: str, quote: str | None) -> Schema:
    """Return a schema that reads all columns as strings."""
    label, *sparse = names or ("",)
    kinds: tuple[Kind, ...] = ("string",) * len(sparse)
    return Schema(
        columns=names,
        label=label,
        dense=(),
        sparse=tuple(sparse),
        kinds=kinds,
        separator=separator,
        quote=quote,
    )


def _names(text: str, separator: str, quote: str | None) -> tuple[tuple[str, ...], bytes]:
    """Return the column names in the first record, and the text after that record. There are no
    names if a quote in the first record does not enclose a whole cell.
    """
    record, body = split_record(text.encode(), quote)
    try:
        names = split_cells(record.decode().rstrip("\n"), _schema((), separator, quote))
    except pl.exceptions.PolarsError:
        return (), body
    return tuple(names), body


def _are_names(cells: Sequence[str]) -> bool:
    return bool(cells) and all(cell and not re.fullmatch(REAL_PATTERN, cell) for cell in cells)


def _cells(
    source: Input, text: str, separator: str, quote: str | None, num_rows: int
) -> pl.DataFrame:
    names, body = _names(text, separator, quote)
    if not names:
        raise DataError(
            f"{source.path}: a quote in the first line does not enclose a whole cell; correct this "
            "list of column names"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(
            f"{source.path}: the header contains {twice[0]!r} twice; rename one of the columns"
        )
    while quote and body.count(b'"') % 2:  # the end of the sample may cut off a quoted cell
        body = body[: body.rfind(b'"')]
        body = body[: body.rfind(b"\n") + 1]
    if not body:
        raise DataError(f"{source.path} has no rows after the line of column names")
    try:
        frame = pl.read_csv(
            io.BytesIO(body),
            has_header=False,
            separator=separator,
            quote_char=quote,
            schema=dict.fromkeys(names, pl.String),
            n_rows=num_rows,
            truncate_ragged_lines=True,
        )
    except pl.exceptions.PolarsError:  # a record has bad quotes; ``prepare`` also skips it
        schema = _schema(names, separator, quote)
        frame = read_records(body, names, schema, BadLines())[0].head(num_rows)
    return frame.with_columns(pl.all().replace("", None))

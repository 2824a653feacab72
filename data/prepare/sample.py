"""Read the first rows of tables with column names, from which a schema is proposed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from sbpflow.data.format.schema import CRITEO, CSV_SEPARATORS, SEPARATORS, Kind, Schema
from sbpflow.data.prepare.cells import REAL_PATTERN
from sbpflow.data.prepare.csv_text import (
    RETURNS,
    is_utf8,
    read_records,
    split_cells,
    split_record,
)
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
    """The first rows of some files. Cells of text files are strings; missing cells are null."""

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
    # ``prepare`` skips lines with broken encoding
    text = _head(source, 1 << 20)[0].decode(errors="replace")
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
        frame = plain_types(_joined(frames, names)).with_columns(
            pl.col(pl.Float32, pl.Float64).fill_nan(None), pl.col(pl.String).replace("", None)
        )
        return Sample(frame, names)
    heads = [_head(source, _MAX_BYTES // count) for source in chosen]
    texts = [_utf8(source, raw) for source, (raw, _) in zip(chosen, heads, strict=True)]
    separator = _separator(texts[0])
    if separator is None:
        raise DataError(
            f"{chosen[0].path}: the first line is not a list of column names; list the columns in "
            "a --schema file (docs/data.md)"
        )
    quote = _quote("\n".join(text.rstrip("\n") for text in texts), separator)
    frames = [
        _cells(source, text, is_cut, separator, quote).head(MAX_ROWS // count)
        for source, text, (_, is_cut) in zip(chosen, texts, heads, strict=True)
    ]
    return Sample(pl.concat(frames, how="diagonal"), names, separator, quote is not None)


def _joined(frames: Sequence[pl.DataFrame], names: Sequence[str]) -> pl.DataFrame:
    try:
        return pl.concat(frames, how="diagonal_relaxed")
    except pl.exceptions.PolarsError as error:
        columns: dict[str, list[pl.DataFrame]] = {}
        for frame in frames:
            for name in frame.columns:
                columns.setdefault(name, []).append(frame[[name]])
        differ = [
            f"{name} ({', '.join(dict.fromkeys(str(part.dtypes[0]) for part in parts))})"
            for name, parts in columns.items()
            if not _can_join(parts)
        ]
        raise DataError(
            f"{', '.join(names)}: the types of a column differ: {'; '.join(differ)}; write each "
            "column with the same type in all files"
        ) from error


def _can_join(frames: Sequence[pl.DataFrame]) -> bool:
    try:
        pl.concat(frames, how="vertical_relaxed")
    except pl.exceptions.PolarsError:
        return False
    return True


def _head(source: Input, num_bytes: int) -> tuple[bytes, bool]:
    """Return the complete lines in the first ``num_bytes`` bytes of a text file, and whether the
    file may continue after them.
    """
    with open_text(source.path) as text:
        raw = text.file.read(num_bytes)
    is_cut = len(raw) == num_bytes
    if is_cut:
        raw = raw[: raw.rfind(b"\n") + 1]
    return raw.replace(b"\r\n", b"\n"), is_cut


def _utf8(source: Input, raw: bytes) -> str:
    """Return the text without lines that have broken encoding, as ``prepare`` skips these lines.

    Raises DataError if the first line or more than 1% of the lines have broken encoding.
    """
    if is_utf8(raw):
        return raw.decode()
    lines = raw.split(b"\n")
    good = [line for line in lines if is_utf8(line)]
    if good[:1] != lines[:1] or len(good) < 0.99 * len(lines):
        raise DataError(
            f"{source.path}: the encoding of the first rows is not UTF-8; convert the file, for "
            "example with `iconv -f LATIN1 -t UTF-8`"
        )
    return b"\n".join(good).decode()


def _separator(text: str) -> str | None:
    """Return the separator that splits the header and at least 90% of the first rows into the same
    number of cells, or None.
    """
    first = "\n".join(text.split("\n", _FIRST_LINES)[:_FIRST_LINES])
    best, most = None, 1
    for mark in SEPARATORS:
        lines = [line for line in _shortened(first, mark).split("\n") if line]
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


def _shortened(text: str, separator: str) -> str:
    """Return the text with each quoted cell replaced by a letter."""
    return _quoted(separator).sub(
        lambda found: "q" if _is_cell(found, separator) else found[0], text
    )


def _is_cell(found: re.Match[str], separator: str) -> bool:
    """Return whether the quotes enclose a cell. They do not if they are in different lines that,
    without the quotes, are complete rows.
    """
    if "\n" not in found[0]:
        return True
    text = found.string
    end = text.find("\n", found.end())
    lines = text[text.rfind("\n", 0, found.start()) + 1 : None if end < 0 else end].split("\n")
    count = text.partition("\n")[0].count(separator)
    return any(line.count(separator) != count for line in lines)


def _quote(text: str, separator: str) -> str | None:
    """Return the quote character, or None if no quote in the text encloses a whole cell. CSV may
    have quotes after the sample.
    """
    if _QUOTE not in text:
        return _QUOTE if separator in CSV_SEPARATORS else None
    matches = _quoted(separator).finditer(text)
    return _QUOTE if any(_is_cell(found, separator) for found in matches) else None


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
    source: Input, text: str, is_cut: bool, separator: str, quote: str | None
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
    if not body:
        problem = "has no rows after the line of column names"
        advice = f"; its {RETURNS}" if any("\r" in name for name in names) else ""
        raise DataError(f"{source.path} {problem}{advice}")
    is_quoted = quote is not None and b'"' in body
    if is_quoted and is_cut:
        body = _whole_records(body)
    # ``prepare`` skips the same records.
    frame = read_records(body, names, _schema(names, separator, quote), BadLines())[0]
    if frame.is_empty():
        advice = (
            ' with correct quotes; write a quote inside a quoted cell twice, such as "5"" wide"'
            if is_quoted
            else f", as the header has; check the separator {separator!r}"
        )
        raise DataError(f"{source.path}: none of the first rows has {len(names)} cells{advice}")
    return frame.with_columns(pl.all().replace("", None))


def _whole_records(body: bytes) -> bytes:
    """Remove a record whose quoted cell is cut off by the end of the sample.

    The last line with an odd number of quotes starts this record. If that line is in the first half
    of the sample, it is treated as a bad row instead.
    """
    if body.count(b'"') % 2 == 0:
        return body
    start = end = len(body)
    while body.count(b'"', start, end) % 2 == 0:
        start, end = body.rfind(b"\n", 0, start - 1) + 1, start
    return body[:start] if 2 * start > len(body) else body

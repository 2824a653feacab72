"""Find the columns of a file, and divide a file into pieces if it must be read sequentially.

``data.prepare.source`` reads piece k of a plain file at its offset. Compressed text must be read
sequentially, and so must text with quotes, because a newline may be inside a cell.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import IO

import polars as pl

from sbpflow.data.format.schema import CSV_SEPARATORS, SEPARATORS, Schema
from sbpflow.data.prepare.csv_text import RETURNS, count_byte, split_cells
from sbpflow.data.prepare.source import MAX_LINE_BYTES, Input, open_text, read_line
from sbpflow.data.prepare.tables import table_columns
from sbpflow.errors import DataError
from sbpflow.runtime.files.remote_path import AnyPath

_SHOWN_COLUMNS, _SHOWN_CHARS = 8, 60
_QUOTE = '"'
_LEAST_NAMES = 2  # a line with a single known name could also be a row
_MAX_QUOTED_BYTES = 1 << 16
"""A quote that is still open this many bytes after the end of a piece is assumed never to be
closed
"""


def columns_of(source: Input, schema: Schema, may_lack_labels: bool) -> tuple[str, ...]:
    """Return the columns of a file in file order. Raises DataError if a required column is missing.

    With ``may_lack_labels``, labels are optional: a text file without column names is unlabeled if
    its first line lacks only the label cells.
    """
    labels = (schema.label, *schema.labels) if may_lack_labels else ()
    if source.is_table:
        columns = table_columns(source.path)
    elif schema.header:
        line = _first_record(source.path, schema.quote)
        if not line:
            problem = "the first line is empty" if source.num_bytes else "the file is empty"
            raise DataError(
                f"{source.path}: {problem}; with `header: true` in the schema, the first "
                f"line must name the columns (for example, "
                f"{schema.separator.join(schema.used[:4])!r})"
            )
        columns = _split_first(source.path, line, schema)
    else:
        columns = schema.columns
        if labels:
            other_columns = tuple(name for name in columns if name not in labels)
            record = _first_record(source.path, schema.quote)
            if len(_split_first(source.path, record, schema)) == len(other_columns):
                columns = other_columns
    wanted = [name for name in schema.used if name not in labels]
    if absent := [name for name in wanted if name not in columns]:
        shown = ", ".join(map(repr, absent[:_SHOWN_COLUMNS]))
        has = ", ".join(columns[:_SHOWN_COLUMNS]) + (
            ", ..." if len(columns) > _SHOWN_COLUMNS else ""
        )
        advice = _how_to_find(
            absent[0],
            columns,
            schema,
            is_fixed=may_lack_labels,
            is_text=not source.is_table,
        )
        raise DataError(
            f"{source.path} has no column{'s' if len(absent) > 1 else ''} {shown}; its columns "
            f"are {has}; {advice}"
        )
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise DataError(f"{source.path}: the header names {twice[0]!r} twice; rename one column")
    return columns


def with_text_format(sources: Sequence[Input], schema: Schema) -> Schema:
    """Return ``schema`` with the text format of new rows.

    If the first line of the first text file contains the names of all columns that new rows need,
    in any order and with any separator, the result has this separator and a header. Otherwise, the
    result is ``schema`` itself.
    """
    source = next((source for source in sources if not source.is_table), None)
    needed = set(schema.used) - {schema.label, *schema.labels}
    if source is None or len(needed) < _LEAST_NAMES:
        return schema
    record = _first_record(source.path, schema.quote or _QUOTE)
    for mark in sorted(SEPARATORS, key=lambda mark: mark != schema.separator):
        if schema.header and mark == schema.separator:
            quote = schema.quote
        else:
            needs_quote = mark in CSV_SEPARATORS or _QUOTE in record
            quote = schema.quote or (_QUOTE if needs_quote else None)
        found = replace(schema, separator=mark, header=True, quote=quote)
        with suppress(pl.exceptions.PolarsError):
            if needed <= set(split_cells(record, found)):
                return found
    return schema


def _how_to_find(
    name: str, columns: Sequence[str], schema: Schema, *, is_fixed: bool, is_text: bool
) -> str:
    """Return advice on a missing column: to change the schema or, if the schema is fixed, the
    rows.
    """
    if is_text and any("\r" in other for other in columns):
        return f"its {RETURNS}"
    near = get_close_matches(name, [other for other in columns if other not in schema.used], 1)
    if is_fixed:
        rule = "new rows need all columns of the training set except the labels"
        if is_text and schema.header:
            rule += f", separated by {json.dumps(schema.separator)} as in the training set"
        return f"rename {near[0]!r} to {name!r}; {rule}" if near else rule
    for mark in SEPARATORS:
        cells = [cell.strip('"') for column in columns for cell in column.split(mark)]
        if mark != schema.separator and len(columns) == 1 and name in cells:
            return f"write `separator: {json.dumps(mark)}` in the schema"
    if schema.quote is None and f'"{name}"' in columns:
        return "write `quote: '\"'` in the schema"
    return (
        f"write {near[0]!r} in the schema" if near else "the schema must name columns of the table"
    )


def _first_record(path: AnyPath, quote: str | None) -> str:
    """Return the first record: the first line, and further lines if a quoted cell is still open."""
    with open_text(path) as text:
        line = text.file.readline(MAX_LINE_BYTES)
        if quote is not None and count_byte(line, quote) % 2:
            line += _to_quote(text.file, path, quote)
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the first line is not UTF-8 text ({error.reason})") from error


def _split_first(path: AnyPath, record: str, schema: Schema) -> tuple[str, ...]:
    try:
        return tuple(split_cells(record, schema))
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"{path}: the first record, {record[:_SHOWN_CHARS]!r}, has a quote {schema.quote} that "
            'does not enclose a whole cell; write, for example, "a ""b"" c"'
        ) from error


def pieces_in_order(path: AnyPath, size: int, quote: str | None) -> Iterator[tuple[bytes, int]]:
    """Yield pieces of whole records in order, each with the number of file bytes read to obtain
    it.
    """
    with open_text(path) as (file, raw):
        taken = 0
        while head := file.read(size):
            text = head if head.endswith(b"\n") else head + read_line(file, path)
            if quote is not None and count_byte(text, quote) % 2:
                text += _to_quote(file, path, quote)
            position = raw.tell()
            yield text, position - taken
            taken = position


def _to_quote(file: IO[bytes], path: AnyPath, quote: str) -> bytes:
    """Return the following lines up to the end of an open quote, at most ``_MAX_QUOTED_BYTES``
    bytes.
    """
    more, is_open = b"", True
    while is_open and len(more) < _MAX_QUOTED_BYTES and (line := read_line(file, path)):
        more += line
        is_open ^= line.count(quote.encode()) % 2 == 1
    return more

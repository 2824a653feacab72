"""Parse text that the fast parser (``data.prepare.parse``) does not support, such as text with
column names, quotes or several values per cell.

This module finds records by strict rules, and Polars splits the records into cells. Inside quotes,
a separator or newline is part of the cell, and a doubled quote stands for one quote.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import polars as pl

from sbpflow.data.format.schema import Schema
from sbpflow.data.prepare.cells import typed_piece
from sbpflow.data.prepare.piece import BLANK, BadLines, Piece
from sbpflow.errors import DataError
from sbpflow.serving.cells import cell_pattern

_MAX_LINES = 1000
"""Maximum number of lines in a record"""
STRAY_RETURN = "stray carriage return"
RETURNS = "lines end in carriage returns; convert the file with `tr '\\r' '\\n'`"
"""Advice for text without newlines"""


def split_cells(line: str, schema: Schema) -> list[str]:
    """Return the cells of one record, such as the header. Raises PolarsError for bad quotes."""
    if schema.quote is None or schema.quote not in line:
        return line.split(schema.separator)
    cells = pl.read_csv(
        io.BytesIO(line.encode()),
        has_header=False,
        separator=schema.separator,
        quote_char=schema.quote,
        infer_schema=False,
    )
    return [cell or "" for cell in cells.row(0)]


def split_record(text: bytes, quote: str | None) -> tuple[bytes, bytes]:
    """Return the first record of ``text`` and the rest of the text. A newline inside quotes does
    not end the record.
    """
    end = num_quotes = 0
    while end < len(text) and (end == 0 or num_quotes % 2):
        start, end = end, text.find(b"\n", end) + 1 or len(text)
        num_quotes += 0 if quote is None else text.count(quote.encode(), start, end)
    return text[:end], text[end:]


def count_byte(text: bytes, byte: str) -> int:
    """Return the number of times that ``byte`` occurs in ``text``. Counting in cache-sized blocks
    with numpy is faster than ``bytes.count``.
    """
    raw = np.frombuffer(text, dtype=np.uint8)
    step = 1 << 17
    starts = range(0, len(raw), step)
    return sum(int(np.count_nonzero(raw[i : i + step] == ord(byte))) for i in starts)


def parse_table(
    text: bytes,
    columns: tuple[str, ...],
    schema: Schema,
    skip: int = 0,
    keep_strings: bool = False,
) -> Piece:
    """Parse the records after ``skip`` header lines. ``columns`` are the columns in file order."""
    num_extra = 0  # lines of the header beyond one per record
    for _ in range(skip):
        header, text = split_record(text, schema.quote)
        num_extra += max(header.count(b"\n") - 1, 0)
    bad = BadLines()
    frame, numbers, num_records, num_lines = read_records(text, columns, schema, bad)

    def raw_row(row: int) -> bytes:
        cells = (cell or "" for cell in frame.row(row))
        return schema.separator.join(cells).encode()

    piece = typed_piece(frame, schema, num_records, raw_row, keep_strings)
    for row, reason, line, cell in piece.bad.examples:
        bad.examples.append((row if numbers is None else numbers[row], reason, line, cell))
    for reason, count in piece.bad.counts.items():
        bad.counts[reason] = bad.counts.get(reason, 0) + count
    bad.examples = [
        (row + num_extra, reason, line, cell)
        for row, reason, line, cell in sorted(bad.examples)[:5]
    ]
    return replace(piece, bad=bad, num_extra=num_extra + num_lines - num_records)


def read_records(
    text: bytes, columns: tuple[str, ...], schema: Schema, bad: BadLines
) -> tuple[pl.DataFrame, list[int] | None, int, int]:
    """Return the cells of the good records, as strings, in the columns that the schema uses; add
    all other records to ``bad``.

    Also return the line number at which each good record starts (None if every line is a good
    record), and the total numbers of records and lines.
    """
    quoted = schema.quote is not None and schema.quote.encode() in text
    if b"\r" in text and not quoted:  # inside quotes, \r is part of the cell
        text = text.replace(b"\r\n", b"\n")
    if text and not text.endswith(b"\n"):
        text += b"\n"
    numbers: list[int] | None = None
    num_lines = num_records = count_byte(text, "\n")
    if not _is_clean(text, num_lines, len(columns), schema):
        text, numbers, num_records = _sort_out(text, len(columns), schema, bad)
    frame = _cells(text, columns, schema)
    if numbers is not None and len(frame) != len(numbers):
        raise DataError(
            f"{len(numbers)} records were parsed as {len(frame)} rows; this is a bug in sbpflow"
        )
    return frame, numbers, num_records, num_lines


def _is_clean(text: bytes, num_lines: int, num_columns: int, schema: Schema) -> bool:
    """Return True if every line is a record with ``num_columns`` cells."""
    if schema.quote is not None and schema.quote.encode() in text:
        return False
    if b"\r" in text or text.startswith(b"\n") or b"\n\n" in text:
        return False
    if count_byte(text, schema.separator) != num_lines * (num_columns - 1):
        return False
    if not is_utf8(text):
        return False
    # The total number of separators can be correct even if some lines have the wrong number of
    # cells. Polars reports such lines.
    try:
        frame = _read(text, tuple(map(str, range(num_columns))), schema)
    except pl.exceptions.PolarsError:
        return False
    return len(frame) == num_lines


def is_utf8(text: bytes) -> bool:
    """Return True if the bytes are valid UTF-8."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _sort_out(
    text: bytes, num_columns: int, schema: Schema, bad: BadLines
) -> tuple[bytes, list[int], int]:
    """Return the concatenated good records, the line number at which each of them starts, and the
    total number of records.
    """
    good: list[str] = []
    numbers: list[int] = []
    fits = _record_pattern(num_columns, schema.separator, schema.quote)
    line_number, num_records = 0, 0
    for record, num_lines in _records(text, fits, schema.quote):
        reason, decoded = BLANK, ""
        if record:
            try:
                decoded = record.decode("utf-8")
                reason = _fault(decoded, fits, num_columns, schema)
            except UnicodeDecodeError:
                reason = "broken encoding"
        if reason is None:
            good.append(decoded)
            numbers.append(line_number)
        else:
            bad.add(line_number, reason, record)
        line_number += num_lines
        num_records += 1
    return "".join(record + "\n" for record in good).encode(), numbers, num_records


def _records(text: bytes, fits: re.Pattern[str], quote: str | None) -> Iterator[tuple[bytes, int]]:
    """Yield each record and its number of lines. If a record of several lines is invalid, its first
    line becomes a record by itself, and the next line starts a new record, because an unclosed
    quote would otherwise swallow all lines up to the next quote.
    """
    lines = text.split(b"\n")[:-1]
    if quote is None or quote.encode() not in text:
        yield from ((line, 1) for line in lines)
        return
    odd = [line.count(quote.encode()) % 2 == 1 for line in lines]
    start = 0
    while start < len(lines):
        stop = start + 1
        if odd[start]:
            last = min(len(lines), start + _MAX_LINES)
            stop = next((end + 1 for end in range(start + 1, last) if odd[end]), stop)
            whole = b"\n".join(lines[start:stop]).removesuffix(b"\r").decode("utf-8", "replace")
            if stop > start + 1 and not fits.fullmatch(whole):
                stop = start + 1
        yield b"\n".join(lines[start:stop]).removesuffix(b"\r"), stop - start
        start = stop


def _fault(record: str, fits: re.Pattern[str], num_columns: int, schema: Schema) -> str | None:
    # here, a carriage return before a newline can only be inside quotes
    if "\r" in record.replace("\r\n", ""):
        return STRAY_RETURN
    if schema.quote is None or schema.quote not in record:
        num_cells = record.count(schema.separator) + 1
        return None if num_cells == num_columns else f"{num_cells} fields instead of {num_columns}"
    if fits.fullmatch(record):
        return None
    cell = cell_pattern(schema.separator, schema.quote)
    whole = re.fullmatch(f"{cell}(?:{re.escape(schema.separator)}{cell})*+", record, re.DOTALL)
    if whole is None:
        return "a quote does not enclose a whole cell"
    num_cells = len(re.findall(f"(?:^|{re.escape(schema.separator)}){cell}", record, re.DOTALL))
    return f"{num_cells} fields instead of {num_columns}"


@lru_cache(maxsize=8)
def _record_pattern(num_columns: int, separator: str, quote: str | None) -> re.Pattern[str]:
    cell = cell_pattern(separator, quote)
    return re.compile(f"{cell}(?:{re.escape(separator)}{cell}){{{num_columns - 1}}}", re.DOTALL)


def _cells(text: bytes, columns: tuple[str, ...], schema: Schema) -> pl.DataFrame:
    """Return the columns that the schema uses, as strings."""
    used = [name for name in schema.used if name in columns]
    if not text:
        return pl.DataFrame(schema=dict.fromkeys(used, pl.String))
    return _read(text, columns, schema)[used]  # unlike ``select``, this reads no patterns in names


def _read(text: bytes, columns: tuple[str, ...], schema: Schema) -> pl.DataFrame:
    quote = schema.quote if schema.quote and schema.quote.encode() in text else None
    return pl.read_csv(
        io.BytesIO(text),
        separator=schema.separator,
        has_header=False,
        schema=dict.fromkeys(columns, pl.String),
        quote_char=quote,
    )

"""Parse text lines to typed columns. Clean pieces are parsed fast, by Polars or a compiled loop;
other pieces are parsed by ``data.prepare.csv_text``, which sorts out the bad lines.

A piece consists of whole lines of the input. Bad lines are counted by reason; values are never
repaired or guessed. Hex categories become uint32 values, other categories become 64-bit keys, and
empty cells become null.
"""

import io
from dataclasses import replace

import numpy as np
import polars as pl

from sbpflow.data.compiled import find_loops
from sbpflow.data.format.schema import Schema
from sbpflow.data.prepare.cells import LABELS
from sbpflow.data.prepare.csv_text import count_byte, is_utf8, parse_table
from sbpflow.data.prepare.keys import key_expression, with_string_keys
from sbpflow.data.prepare.piece import BadLines, Piece
from sbpflow.serving.cells import INTEGER_PATTERN, KEY_PATTERNS

_MIN_COMPILED_BYTES = 1 << 22
"""Minimum size of a piece, in bytes, for which the compiled loop saves time"""


def parse_piece(text: bytes, schema: Schema) -> Piece:
    """Parse a piece of whole lines, the last of which may lack a newline."""
    if text and not text.endswith(b"\n"):
        text += b"\n"
    lines = text.replace(b"\r\n", b"\n") if b"\r" in text else text
    num_lines = count_byte(lines, "\n")
    frame = _by_loop(lines, num_lines, schema)
    if frame is None:
        frame = _parse_clean(lines, num_lines, schema)
    if frame is not None:
        return Piece(frame, num_lines, BadLines())
    piece = parse_table(text, schema.columns, schema)
    return replace(piece, label_cells=[])  # advice on label rules is for other schemas


def _by_loop(text: bytes, num_lines: int, schema: Schema) -> pl.DataFrame | None:
    """Parse labels, integers and hex values in one compiled pass. Return None for any other
    content, or if the compiled loop is not available.
    """
    loops = find_loops(len(text), _MIN_COMPILED_BYTES)
    uses_all = len(schema.columns) == 1 + len(schema.dense) + len(schema.sparse)
    if loops is None or not uses_all or set(schema.kinds) != {"hex"}:
        return None
    of_name = {schema.label: loops.LABEL, **dict.fromkeys(schema.dense, loops.INTEGER)}
    kinds = np.array([of_name.get(name, loops.HEX) for name in schema.columns], dtype=np.uint8)
    dense = [name for name in schema.columns if name in schema.dense]
    sparse = [name for name in schema.columns if name in schema.sparse]
    labels = np.empty(num_lines, dtype=np.uint8)
    integers = np.empty((len(dense), num_lines), dtype=np.int32)
    keys = np.empty((len(sparse), num_lines), dtype=np.uint32)
    present = [np.empty(columns.shape, dtype=np.bool_) for columns in (integers, keys)]
    raw, mark = np.frombuffer(text, dtype=np.uint8), ord(schema.separator)
    out = (labels, integers, present[0], keys, present[1])
    if not loops.parse_lines(raw, mark, kinds, *out):
        return None
    values = dict(zip((*dense, *sparse), (*integers, *keys), strict=True))
    masks = dict(zip((*dense, *sparse), (*present[0], *present[1]), strict=True))
    frame = pl.DataFrame({schema.label: labels, **values})
    flags = pl.DataFrame(masks)
    return frame.select(
        pl.col(schema.label),
        *(pl.when(flags[name]).then(pl.col(name)) for name in (*schema.dense, *schema.sparse)),
    )


def _parse_clean(text: bytes, num_lines: int, schema: Schema) -> pl.DataFrame | None:
    """Parse a clean piece. Return None if the piece may contain a bad line."""
    if not _shape_fits(text, num_lines, schema):
        return None
    try:
        frame = pl.read_csv(
            io.BytesIO(text),
            separator=schema.separator,
            has_header=False,
            schema=_text_types(schema),
            quote_char=None,
        )
    except pl.exceptions.PolarsError:
        return None
    if len(frame) != num_lines or frame[schema.label].null_count():
        return None
    if not _dense_fits(text, schema):
        return None
    # All columns are evaluated in one call, because each Polars call costs a round trip to its
    # threads.
    hexes = [n for n, kind in zip(schema.sparse, schema.kinds, strict=True) if kind == "hex"]
    checks = [pl.col(schema.label).is_in(tuple(LABELS)), pl.col(hexes).str.len_bytes() == 8]
    if not all(frame.select(check.all() for check in checks).row(0)):
        return None
    typed = _typed(frame, schema)
    if any(typed[name].null_count() != frame[name].null_count() for name in schema.sparse):
        return None
    return typed


def _shape_fits(text: bytes, num_lines: int, schema: Schema) -> bool:
    """Return whether the number of separators is correct and no byte needs the strict check."""
    if count_byte(text, schema.separator) != num_lines * (len(schema.columns) - 1):
        return False
    if b"\r" in text:
        return False  # Polars would drop \r at the end of any cell
    if any(kind in KEY_PATTERNS for kind in schema.kinds) and b"+" in text:
        return False  # ``to_integer`` would accept the hex cell +1234567 as a number
    return text.isascii() or is_utf8(text)


def _dense_fits(text: bytes, schema: Schema) -> bool:
    """Return True unless a dense cell contains blanks or tabs that Polars would wrongly accept. The
    cells are read as text only in the rare case that the piece contains a blank, or a tab that is
    not a separator.
    """
    odd = [blank for blank in " \t" if blank != schema.separator and blank.encode() in text]
    if not odd or not schema.dense:
        return True
    types = dict.fromkeys(schema.columns, pl.String)
    cells = pl.read_csv(
        io.BytesIO(text),
        separator=schema.separator,
        has_header=False,
        schema=types,
        columns=sorted(schema.columns.index(name) for name in schema.dense),
        quote_char=None,
    )
    fits = cells.select(pl.all().str.contains(f"^{INTEGER_PATTERN}$").all())
    return all(fits.row(0))


def _text_types(schema: Schema) -> dict[str, type[pl.DataType]]:
    dense = dict.fromkeys(schema.dense, pl.Int32)
    return {name: dense.get(name, pl.String) for name in schema.columns}


def _typed(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """Convert the columns to uint8 labels, int32 dense values, and keys, with null for missing
    cells.
    """
    label = pl.col(schema.label).replace_strict(LABELS, return_dtype=pl.UInt8)
    columns = [label, *(pl.col(name) for name in schema.dense)]
    columns += [
        key_expression(pl.col(n), k) for n, k in zip(schema.sparse, schema.kinds, strict=True)
    ]
    strings = [n for n, k in zip(schema.sparse, schema.kinds, strict=True) if k == "string"]
    return with_string_keys(frame.select(columns), strings)

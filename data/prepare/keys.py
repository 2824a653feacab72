"""Convert cells to keys: integers keep their bits, and strings become 64-bit blake2b hashes."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from sbpflow.data.format.schema import CHECK, Kind
from sbpflow.errors import unknown_value
from sbpflow.serving.cells import KEY_PATTERNS, string_digest


def key_expression(cell: pl.Expr, kind: Kind) -> pl.Expr:
    """Return an expression for the key of a text cell: a uint32 for hex, the bits of an int64 for
    an integer, or the unchanged string.
    """
    if kind == "hex":
        return cell.str.to_integer(base=16, dtype=pl.UInt32, strict=False)
    if kind == "integer":
        return cell.str.to_integer(dtype=pl.Int64, strict=False).reinterpret(signed=False)
    if kind == "string":
        return cell
    raise unknown_value("kind", kind, Kind)


def with_string_keys(frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Replace string columns with their keys, and add columns ``NAME__check`` with 32 more bits of
    the hash.
    """
    columns: list[pl.Series] = []
    for name in names:
        keys, checks = string_keys(frame[name])
        columns += [keys.alias(name), checks.alias(name + CHECK)]
    return frame.with_columns(columns)


def string_keys(cells: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Return the key (uint64) and check (uint32) of each string, and null for null.

    The key is the first 64 bits, and the check the next 32 bits, of a 96-bit blake2b hash, so
    neither depends on library versions.
    """
    distinct = cells.drop_nulls().unique()
    raw = np.frombuffer(
        b"".join(map(string_digest, distinct)), dtype=[("key", "<u8"), ("check", "<u4")]
    )
    places = pl.Series(np.arange(len(distinct), dtype=np.uint32))
    if len(distinct) == 0:
        empty = pl.repeat(None, len(cells), dtype=pl.UInt64, eager=True)
        return empty, empty.cast(pl.UInt32)
    place = cells.replace_strict(distinct, places, default=None, return_dtype=pl.UInt32)
    rows = place.fill_null(0).to_numpy()
    is_null = place.is_null()
    keys, checks = (pl.Series(raw[part][rows]).set(is_null, None) for part in ("key", "check"))
    return keys, checks


def key_of(cells: pl.Series, kind: Kind) -> pl.Series:
    """Return the keys of cells, or the strings of string cells, with null for cells that do not fit
    ``kind``.
    """
    return cells.to_frame().select(_key(cells, kind)).to_series().alias(cells.name)


def _key(cells: pl.Series, kind: Kind) -> pl.Expr:
    if cells.dtype == pl.String:
        key = key_expression(pl.col(cells.name), kind)
        if kind not in KEY_PATTERNS:
            return key
        return pl.when(pl.col(cells.name).str.contains(f"^({KEY_PATTERNS[kind]})$")).then(key)
    if cells.dtype == pl.Null or (cells.dtype == pl.Boolean and kind != "string"):
        types = {"hex": pl.UInt32, "integer": pl.UInt64, "string": pl.String}
        return pl.repeat(None, pl.len(), dtype=types[kind])
    number = pl.col(cells.name)
    if cells.dtype.is_float():  # 7.0 is the category 7, but 7.5 is not a category
        whole = number == number.floor()
        number = pl.when(whole).then(number.cast(pl.Int64, strict=False))
    if kind == "hex":
        return number.cast(pl.UInt32, strict=False)
    if kind == "integer":
        return number.cast(pl.Int64, strict=False).reinterpret(signed=False)
    if kind == "string":
        if cells.dtype == pl.Int128:  # as in ``sbpflow.serving``, integers have up to 64 bits
            number = pl.when(number.is_between(-(2**63), 2**64 - 1)).then(number)
        return number.cast(pl.String)
    raise unknown_value("kind", kind, Kind)

"""Parquet rows to the same typed columns as text; bad rows are counted by the same reasons."""

from pathlib import Path

import polars as pl

from data.format.schema import Kind, Schema
from data.prepare.parse import DENSE_PATTERN, LABELS, PATTERNS, BadLines, Piece, key_expression
from sbpflow.errors import DataError

PIECE_ROWS = 1 << 18
_COLUMN_TYPES = (
    *(pl.String, pl.Null, pl.Float32, pl.Float64, pl.Boolean),
    *(pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
)


def count_rows(path: Path, schema: Schema) -> int:
    """Rows of a file, from its footer; DataError when it is damaged or lacks columns."""
    try:
        frame = pl.scan_parquet(path)
        have = frame.collect_schema().names()
        rows = int(frame.select(pl.len()).collect().item())
    except BaseException as error:
        raise _unreadable(path, error) from error
    wanted = (schema.label, *schema.dense, *schema.sparse)
    if absent := [name for name in wanted if name not in have]:
        raise DataError(
            f"{path}: no column {absent[0]!r}; it has {', '.join(have[:8])}, ...; "
            "name its columns in a --schema file"
        )
    return rows


def _unreadable(path: Path, error: BaseException) -> BaseException:
    """A DataError for what a damaged file causes; anything else as it is.

    Polars' Rust side panics on some damage; its PanicException is no Exception and has no public
    name to catch it by.
    """
    panicked = type(error).__name__ == "PanicException"
    if panicked or isinstance(error, (pl.exceptions.PolarsError, OSError)):
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return DataError(f"{path}: cannot be read as Parquet: {first}")
    return error


def parquet_piece(path: Path, index: int, schema: Schema) -> Piece:
    """Rows [index, index + 1) * PIECE_ROWS of a file."""
    wanted = (schema.label, *schema.dense, *schema.sparse)
    try:
        lazy = pl.scan_parquet(path).select(wanted)
        frame = lazy.slice(index * PIECE_ROWS, PIECE_ROWS).collect()
    except BaseException as error:
        raise _unreadable(path, error) from error
    frame = frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    odd = [f"{n} ({frame[n].dtype})" for n in wanted if frame[n].dtype not in _COLUMN_TYPES]
    if odd:
        raise DataError(
            f"{path}: columns {', '.join(odd)} are of a type that is not read; write strings or "
            "whole numbers"
        )
    return _typed_piece(frame, schema)


def _typed_piece(frame: pl.DataFrame, schema: Schema) -> Piece:
    frame = frame.with_columns(
        pl.col(pl.Float32, pl.Float64).fill_nan(None),
        *(
            pl.col(name).replace("", None)
            for name in (*schema.dense, *schema.sparse)
            if frame[name].dtype == pl.String
        ),
    )
    label = _label(frame[schema.label])
    typed = frame.select(
        label,
        *(_integer(frame[name]) for name in schema.dense),
        *(_key(frame[n], k) for n, k in zip(schema.sparse, schema.kinds, strict=True)),
    )
    faults = _faults(frame, typed, schema)
    bad = BadLines()
    is_bad = faults.select(pl.any_horizontal(pl.all())).to_series()
    for number in is_bad.arg_true():
        reason = next(name for name in faults.columns if faults[name][number])
        bad.add(number, reason, str(frame.row(number)).encode("ascii", "backslashreplace"))
    return Piece(typed.filter(~is_bad) if bad.total else typed, len(frame), bad)


def _label(cells: pl.Series) -> pl.Series:
    """uint8, null where the cell is not 0 or 1 (text: to the letter, as in text files)."""
    if cells.dtype == pl.String:
        fits = cells.is_in(LABELS)
    else:
        cells = cells.cast(pl.Float64)
        fits = cells.is_in([0.0, 1.0])
    return cells.set(~fits.fill_null(False), None).cast(pl.UInt8)


def _integer(cells: pl.Series) -> pl.Expr:
    """int32, null where the cell is no whole number of 32 bits (text: written as in text files)."""
    cell = pl.col(cells.name)
    if cells.dtype == pl.String:
        pattern = f"^{DENSE_PATTERN}$"
        plain = cell.str.replace(pattern, "${1}${2}")
        number = plain.str.to_integer(dtype=pl.Int32, strict=False)
        return pl.when(cell.str.contains(pattern)).then(number).alias(cells.name)
    number = cell.cast(pl.Float64, strict=False)
    whole = number == number.floor()
    return pl.when(whole).then(number.cast(pl.Int32, strict=False)).alias(cells.name)


def _key(cells: pl.Series, kind: Kind) -> pl.Expr:
    if cells.dtype == pl.String:
        key = key_expression(pl.col(cells.name), kind)
        if kind not in PATTERNS:
            return key
        return pl.when(pl.col(cells.name).str.contains(f"^({PATTERNS[kind]})$")).then(key)
    if cells.dtype == pl.Boolean:
        return pl.lit(None, dtype=pl.UInt32 if kind == "hex" else pl.UInt64).alias(cells.name)
    if cells.dtype.is_float():  # 7.0 is the category 7, 7.5 is none
        whole = pl.col(cells.name) == pl.col(cells.name).floor()
        number = pl.col(cells.name).cast(pl.Int64, strict=False)
        if kind == "hex":
            number = number.cast(pl.UInt32, strict=False)
        elif kind == "integer":
            number = number.reinterpret(signed=False)
        else:
            number = key_expression(number.cast(pl.String), kind)
        return pl.when(whole).then(number).alias(cells.name)
    if kind == "hex":
        return pl.col(cells.name).cast(pl.UInt32, strict=False)
    if kind == "integer":
        return pl.col(cells.name).cast(pl.Int64, strict=False).reinterpret(signed=False)
    return key_expression(pl.col(cells.name).cast(pl.String), kind)


def _faults(frame: pl.DataFrame, typed: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """One flag per row and reason: a cell that is there but did not convert."""

    def lost(names: tuple[str, ...]) -> pl.Series:
        flags = [frame[name].is_not_null() & typed[name].is_null() for name in names]
        if not flags:
            return pl.repeat(False, len(frame), dtype=pl.Boolean, eager=True)
        return pl.DataFrame(flags).select(pl.any_horizontal(pl.all())).to_series()

    return pl.DataFrame(
        {
            "label is not 0 or 1": typed[schema.label].is_null(),
            "dense value is not a 32-bit integer": lost(schema.dense),
            "category does not fit its kind": lost(schema.sparse),
        }
    )

"""Read rows of Parquet and Arrow files into the same typed columns as text rows."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from sbpflow.data.format.schema import Schema
from sbpflow.data.prepare.cells import typed_piece
from sbpflow.data.prepare.piece import Piece
from sbpflow.errors import DataError

PIECE_ROWS = 1 << 18
COLUMN_TYPES = (
    *(pl.String, pl.Null, pl.Float32, pl.Float64, pl.Boolean),
    *(pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
    pl.Int128,
)


def _scan(path: Path) -> pl.LazyFrame:
    if path.suffix.lower() == ".parquet":
        return pl.scan_parquet(path, glob=False)
    return pl.scan_ipc(path, glob=False)


def count_rows(path: Path) -> int:
    """Return the number of rows in a file, as stated in its footer. Raises DataError if the file is
    damaged.
    """
    with _reading(path):
        return int(_scan(path).select(pl.len()).collect().item())


def table_columns(path: Path) -> tuple[str, ...]:
    """Return the column names of a file. Raises DataError if the file is damaged."""
    with _reading(path):
        return tuple(_scan(path).collect_schema().names())


def table_head(path: Path, num_rows: int) -> pl.DataFrame:
    """Return the first rows of a file. Raises DataError if the file is damaged."""
    with _reading(path):
        return _scan(path).head(num_rows).collect()


def plain_types(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with categories converted to strings, decimals without decimal places to
    integers, and other decimals to real numbers.
    """
    columns = [
        cells.cast(pl.Float64 if cells.dtype.scale else pl.Int128)
        for cells in frame.get_columns()
        if isinstance(cells.dtype, pl.Decimal)
    ]
    return frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String), *columns)


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Raise DataError for an error that a damaged file can cause.

    Some damage causes a panic in Polars' Rust code, which raises PanicException. PanicException
    derives from BaseException and is not public, so it is recognized by name.
    """
    try:
        yield
    except BaseException as error:
        panicked = type(error).__name__ == "PanicException"
        if not (panicked or isinstance(error, (pl.exceptions.PolarsError, OSError))):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "an Arrow file (not a stream)"
        raise DataError(f"{path} cannot be read as {kind}: {first}") from error


def table_piece(path: Path, index: int, schema: Schema, keep_strings: bool = False) -> Piece:
    """Return piece ``index`` of a file: PIECE_ROWS rows, or fewer in the last piece."""
    columns = set(table_columns(path))
    wanted = [name for name in schema.used if name in columns]
    with _reading(path):
        lazy = _scan(path).select(wanted)
        frame = lazy.slice(index * PIECE_ROWS, PIECE_ROWS).collect()
    frame = plain_types(frame)
    if unsupported := [
        f"{name} ({frame[name].dtype})" for name in wanted if not _fits(frame, name, schema)
    ]:
        raise DataError(
            f"{path}: columns {', '.join(unsupported)} have unsupported types; use strings or "
            "integers (dates need `time: NAME` in the schema and cannot be features, and structs "
            "in lists must contain a value and then its weight)"
        )

    def raw_row(row: int) -> bytes:
        return str(frame.row(row)).encode("ascii", "backslashreplace")

    return typed_piece(frame, schema, len(frame), raw_row, keep_strings)


def _fits(frame: pl.DataFrame, name: str, schema: Schema) -> bool:
    """Return True if the schema accepts the type of column ``name``."""
    kind = frame[name].dtype
    if isinstance(kind, pl.List | pl.Array):
        column = schema.list_column(name)
        if column is not None and column.inline is not None and isinstance(kind.inner, pl.Struct):
            names = [part.name.lower() for part in kind.inner.fields]
            parts = [part.dtype for part in kind.inner.fields]
            is_pair = len(parts) == 2 and not names[0].startswith("weight")
            return is_pair and all(part in COLUMN_TYPES for part in parts)
        lists = {name for column in schema.many for name in (column.name, column.weights)}
        return name in lists and kind.inner in COLUMN_TYPES
    if schema.time is not None and name == schema.time[0]:
        # If dates were read as integers, their unit, such as days, would depend on the file.
        is_date = kind == pl.Date or isinstance(kind, pl.Datetime)
        is_date = is_date and name not in schema.features
        return kind in COLUMN_TYPES or (is_date and schema.time[1] != "integer")
    return kind in COLUMN_TYPES

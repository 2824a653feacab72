"""Read cells with several values (``a|b|c`` in text, lists in Parquet) and optional weights.

Text cannot distinguish an empty cell, an empty list, and a list with one empty element, so all
three are read as an empty list. Any other empty element is a missing value.
"""

import re
from typing import NamedTuple

import numpy as np
import polars as pl

from sbpflow.data.format.schema import Beyond, Kind, ListColumn
from sbpflow.data.prepare.keys import key_of, string_keys
from sbpflow.errors import unknown_value
from sbpflow.serving.cells import REAL_PATTERN


class ListValues(NamedTuple):
    """The values of a list column, and flags that mark the rows with each kind of fault."""

    values: pl.DataFrame
    """Columns: ``row`` (uint32) and ``key``; ``check`` and ``text`` for strings; ``weight`` for
    weighted lists
    """
    misfits: pl.Series
    too_long: pl.Series
    unpaired: pl.Series
    bad_weights: pl.Series
    num_cut: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    """Number of values dropped from each row"""


def read_list(frame: pl.DataFrame, column: ListColumn, kind: Kind) -> ListValues:
    """Return the values of ``column`` in row order. Unless ``beyond`` is "error", each row is cut
    to the maximum length.
    """
    cells = _flat(frame[column.name], column.separator)
    if column.inline is not None:
        cells = _split_text(cells, column.inline)
    rows, total = cells["row"].to_numpy(), len(frame)
    keys = key_of(cells["value"], kind)
    lost = cells["value"].is_not_null() & keys.is_null()
    columns = {"row": cells["row"], "key": keys}
    if kind == "string":
        columns["key"], columns["check"] = string_keys(keys)
        columns["text"] = keys
    lengths = np.bincount(rows, minlength=total)
    none = _rows_of(rows[:0], total)
    unpaired, bad_weights = none, none
    if column.inline is not None:
        values = _weights(cells["weight"])
        columns["weight"] = values
        bad_weights = _rows_of(rows[~values.is_finite().fill_null(False).to_numpy()], total)
    if column.weights is not None:
        weights = _flat(frame[column.weights], column.separator)
        others = np.bincount(weights["row"].to_numpy(), minlength=total)
        differ = lengths != others
        unpaired = pl.Series(differ)
        values = _weights(weights["value"])
        bad = ~values.is_finite().fill_null(False)
        bad_weights = _rows_of(weights["row"].filter(bad).to_numpy(), total)
        if differ.any():
            # Exclude rows whose numbers of values and weights differ, so that the rest form pairs.
            keep = pl.Series(~differ[rows])
            columns = {name: column.filter(keep) for name, column in columns.items()}
            values = values.filter(pl.Series(~differ[weights["row"].to_numpy()]))
            lost, rows = lost.filter(keep), rows[~differ[rows]]
            lengths = np.bincount(rows, minlength=total)
        columns["weight"] = values
    long = lengths > column.most
    table = pl.DataFrame(columns)
    num_cut = np.zeros(total, dtype=np.int64)
    if long.any() and column.beyond != "error":
        place = np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
        if column.beyond == "last":
            place = lengths[rows] - 1 - place
        elif column.beyond != "first":
            raise unknown_value("beyond", column.beyond, Beyond)
        num_cut = np.maximum(lengths - column.most, 0)
        table = table.filter(pl.Series(place < column.most))
    misfits = _rows_of(rows[lost.to_numpy()], total)
    return ListValues(table, misfits, pl.Series(long), unpaired, bad_weights, num_cut)


def _weights(cells: pl.Series) -> pl.Series:
    """Return the weights as float32, with null for cells that are not numbers."""
    if cells.dtype == pl.String:
        cells = cells.str.extract(f"^{REAL_PATTERN}$", 1)
    return cells.cast(pl.Float64, strict=False).cast(pl.Float32)


def _rows_of(rows: "np.ndarray[tuple[int], np.dtype[np.uint32]]", total: int) -> pl.Series:
    flags = np.zeros(total, dtype=np.bool_)
    flags[rows] = True
    return pl.Series(flags)


def _flat(cells: pl.Series, separator: str) -> pl.DataFrame:
    """Return the ``row`` and ``value`` of every list element, with null for empty elements."""
    if cells.dtype == pl.String:
        cells = cells.str.split(separator)
    elif isinstance(cells.dtype, pl.Array):
        cells = cells.arr.to_list()
    rows = pl.Series("row", np.arange(len(cells), dtype=np.uint32))
    frame = pl.DataFrame({"row": rows, "value": cells}).filter(pl.col("value").is_not_null())
    if isinstance(cells.dtype, pl.List):
        frame = frame.filter(pl.col("value").list.len() > 0)
        is_single = frame["value"].list.len() == 1
        frame = frame.with_columns(is_single=is_single).explode("value")
    else:
        frame = frame.with_columns(is_single=pl.lit(True))
    frame = frame.with_columns(_with_nulls(frame["value"]))
    return frame.filter(~(pl.col("is_single") & pl.col("value").is_null())).drop("is_single")


def _split_text(cells: pl.DataFrame, mark: str) -> pl.DataFrame:
    """Split each element into its ``value`` and its ``weight`` (null if absent)."""
    elements = cells["value"]
    if isinstance(elements.dtype, pl.Struct):
        first, second = elements.struct.fields
        value, weight = elements.struct.field(first), elements.struct.field(second)
    else:
        texts = elements.cast(pl.String)
        pattern = f"(?s)^(.*){re.escape(mark)}(.*?)$"
        weight = texts.str.extract(pattern, 2)
        value = pl.select(pl.coalesce(texts.str.extract(pattern, 1), texts)).to_series()
    return pl.DataFrame({"row": cells["row"], "value": _with_nulls(value), "weight": weight})


def _with_nulls(values: pl.Series) -> pl.Series:
    """Return the values with null in place of empty strings and NaN."""
    if values.dtype == pl.String:
        return values.replace("", None)
    return values.fill_nan(None) if values.dtype.is_float() else values

"""Cells with several values: ``a|b|c`` in text, lists in Parquet, and weights beside or in them.

An empty cell, an empty list and a list of nothing but one empty element are all no values at all
(text can write only the first); any other empty element is a missing value.
"""

import re
from typing import NamedTuple

import numpy as np
import polars as pl

from sbpflow.data.format.schema import Beyond, Kind, Many
from sbpflow.data.prepare.keys import key_of, string_keys
from sbpflow.errors import unknown_value


class Several(NamedTuple):
    """One column with several values: the values, and the rows (flags) with a fault."""

    values: pl.DataFrame
    """``row`` uint32, ``key``, ``check`` of strings, ``weight`` where there is one"""
    misfits: pl.Series
    too_long: pl.Series
    unpaired: pl.Series
    bad_weights: pl.Series
    num_cut: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    """Values left out of each row"""


def read_list(frame: pl.DataFrame, many: Many, kind: Kind) -> Several:
    """The values of column ``many.name``, row by row, cut to the most that a row may have."""
    cells = _flat(frame[many.name], many.separator)
    if many.inline is not None:
        cells = _apart(cells, many.inline)
    rows, total = cells["row"].to_numpy(), len(frame)
    keys = key_of(cells["value"], kind)
    lost = cells["value"].is_not_null() & keys.is_null()
    columns = {"row": cells["row"], "key": keys}
    if kind == "string":
        columns["key"], columns["check"] = string_keys(keys)
    lengths = np.bincount(rows, minlength=total)
    none = _rows_of(rows[:0], total)
    unpaired, bad_weights = none, none
    if many.inline is not None:
        values = cells["weight"].cast(pl.Float64, strict=False).cast(pl.Float32)
        columns["weight"] = values
        bad_weights = _rows_of(rows[~values.is_finite().fill_null(False).to_numpy()], total)
    if many.weights is not None:
        weights = _flat(frame[many.weights], many.separator)
        others = np.bincount(weights["row"].to_numpy(), minlength=total)
        differ = lengths != others
        unpaired = pl.Series(differ)
        values = weights["value"].cast(pl.Float64, strict=False).cast(pl.Float32)
        bad = ~values.is_finite().fill_null(False)
        bad_weights = _rows_of(weights["row"].filter(bad).to_numpy(), total)
        if differ.any():  # those rows go; what stays must pair up
            keep = pl.Series(~differ[rows])
            columns = {name: column.filter(keep) for name, column in columns.items()}
            values = values.filter(pl.Series(~differ[weights["row"].to_numpy()]))
            lost, rows = lost.filter(keep), rows[~differ[rows]]
            lengths = np.bincount(rows, minlength=total)
        columns["weight"] = values
    long = lengths > many.most
    table = pl.DataFrame(columns)
    num_cut = np.zeros(total, dtype=np.int64)
    if long.any() and many.beyond != "error":
        place = np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
        if many.beyond == "last":
            place = lengths[rows] - 1 - place
        elif many.beyond != "first":
            raise unknown_value("beyond", many.beyond, Beyond)
        stays = place < many.most
        num_cut = np.maximum(lengths - many.most, 0)
        table = table.filter(pl.Series(stays))
    misfits = _rows_of(rows[lost.to_numpy()], total)
    return Several(table, misfits, pl.Series(long), unpaired, bad_weights, num_cut)


def _rows_of(rows: "np.ndarray[tuple[int], np.dtype[np.uint32]]", total: int) -> pl.Series:
    flags = np.zeros(total, dtype=np.bool_)
    flags[rows] = True
    return pl.Series(flags)


def _flat(cells: pl.Series, separator: str) -> pl.DataFrame:
    """``row`` and ``value`` of every element of every cell; empty ones are null."""
    if cells.dtype == pl.String:
        cells = cells.str.split(separator)
    elif isinstance(cells.dtype, pl.Array):
        cells = cells.arr.to_list()
    rows = pl.Series("row", np.arange(len(cells), dtype=np.uint32))
    frame = pl.DataFrame({"row": rows, "value": cells}).filter(pl.col("value").is_not_null())
    if isinstance(cells.dtype, pl.List):
        frame = frame.filter(pl.col("value").list.len() > 0)
        lone = frame["value"].list.len() == 1
        frame = frame.with_columns(lone=lone).explode("value")
    else:
        frame = frame.with_columns(lone=pl.lit(True))
    if frame["value"].dtype == pl.String:
        frame = frame.with_columns(pl.col("value").replace("", None))
    elif frame["value"].dtype.is_float():
        frame = frame.with_columns(pl.col("value").fill_nan(None))
    return frame.filter(~(pl.col("lone") & pl.col("value").is_null())).drop("lone")


def _apart(cells: pl.DataFrame, mark: str) -> pl.DataFrame:
    """Each element as its ``value`` and its ``weight``, which is null where there is none."""
    elements = cells["value"]
    if isinstance(elements.dtype, pl.Struct):
        first, second = elements.struct.fields
        value, weight = elements.struct.field(first), elements.struct.field(second)
    else:
        texts = elements.cast(pl.String)
        pattern = f"(?s)^(.*){re.escape(mark)}(.*?)$"
        weight = texts.str.extract(pattern, 2)
        value = pl.select(pl.coalesce(texts.str.extract(pattern, 1), texts)).to_series()
    if value.dtype == pl.String:
        value = value.replace("", None)
    elif value.dtype.is_float():
        value = value.fill_nan(None)
    return pl.DataFrame({"row": cells["row"], "value": value, "weight": weight})

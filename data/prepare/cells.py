"""Cells to typed columns: one meaning for text and Parquet, bad rows counted by reason.

A frame comes as it was read, all strings or with types of its own; a row with a cell that is there
and does not fit its column is a bad line, whatever the rest of it is. Nothing is guessed.
"""

from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.schema import SPLIT_COLUMN, Kind, Many, Number, Schema
from sbpflow.data.prepare.keys import key_of, with_string_keys
from sbpflow.data.prepare.lists import read_list
from sbpflow.data.prepare.piece import BadLines, Piece

LABELS = ("0", "1")
"""A label is one of these to the letter: " 1", "01" and "1.0" are bad lines."""
INTEGER_PATTERN = r" *([+-]?)0*([0-9]{1,10})"
"""Leading blanks and a plus sign are what Polars accepts, so every way must; eleven digits, leading
zeros aside, are too many (and Python refuses to convert thousands)."""
REAL_PATTERN = r" *\+?(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_NO_NUMBER = r"(?i)^ *[+-]?nan$"
_INFINITE = r"(?i)^ *([+-]?)inf(?:inity)?$"
_TIMES = ("%Y-%m-%d", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f")
_FULL_YEAR = "^ *[0-9]{4}-"
EXPECTED: dict[Kind, str] = {
    "hex": "eight hex digits",
    "integer": "an integer",
    "string": "a string",
}

Faults = dict[str, pl.Series]
Shown = Callable[[int], bytes]


def typed_piece(frame: pl.DataFrame, schema: Schema, num_lines: int, shown: Shown) -> Piece:
    """The rows of ``frame`` typed, those with a fault left out; ``shown`` is a row as it was read.

    ``frame`` has the used columns of the schema; without the label, the rows are unlabelled.
    """
    frame = frame.with_columns(
        pl.col(pl.Float32, pl.Float64).fill_nan(None), pl.col(pl.String).replace("", None)
    )
    columns: list[pl.Series] = []
    faults: Faults = {}
    if schema.label in frame.columns:
        columns.append(label := _label(frame[schema.label]))
        faults["label is not 0 or 1"] = label.is_null()
    for name in schema.dense:
        columns.append(_dense(frame[name], schema.number(name), faults))
    lists: dict[str, pl.DataFrame] = {}
    cut: dict[str, NDArray[np.int64]] = {}
    for name, kind in zip(schema.sparse, schema.kinds, strict=True):
        many = schema.several(name)
        if many is None:
            columns.append(keys := key_of(frame[name], kind))
            text = f"category is not {EXPECTED[kind]}"
            _add(faults, text, frame[name].is_not_null() & keys.is_null())
        else:
            lists[name], cut[name] = _several(frame, many, kind, faults)
    columns += _beside(frame, schema, faults)
    if not columns:  # every column holds lists; the frame must have rows all the same
        columns.append(pl.Series(SPLIT_COLUMN, np.zeros(len(frame), dtype=np.uint8)))
    typed = pl.DataFrame(columns)
    strings = [
        name
        for name, kind in zip(schema.sparse, schema.kinds, strict=True)
        if kind == "string" and name not in lists
    ]
    return _without_faults(with_string_keys(typed, strings), faults, lists, cut, num_lines, shown)


def _without_faults(
    typed: pl.DataFrame,
    faults: Faults,
    lists: dict[str, pl.DataFrame],
    cut: dict[str, NDArray[np.int64]],
    num_lines: int,
    shown: Shown,
) -> Piece:
    bad = BadLines()
    flags = pl.DataFrame(faults) if faults else pl.DataFrame({"": [False] * len(typed)})
    is_bad = flags.select(pl.any_horizontal(pl.all())).to_series()
    for number in is_bad.arg_true():
        reason = next(name for name in flags.columns if flags[name][number])
        bad.add(number, reason, shown(number))
    stays = ~is_bad.to_numpy()
    place = np.cumsum(stays) - 1
    counts: list[pl.Series] = []
    for name, values in lists.items():
        rows = values["row"].to_numpy()
        if bad.total:
            values = values.filter(pl.Series(stays[rows]))
            rows = place[values["row"].to_numpy()]
            values = values.with_columns(pl.Series("row", rows, dtype=pl.UInt32))
        lists[name] = values
        number = np.bincount(rows, minlength=int(stays.sum())).astype(np.uint16)
        counts.append(pl.Series(name, number))
    frame = typed.filter(~is_bad) if bad.total else typed
    num_cut = {name: int(values[stays].sum()) for name, values in cut.items()}
    return Piece(frame.with_columns(counts), num_lines, bad, lists, num_cut)


def _add(faults: Faults, reason: str, flags: pl.Series) -> None:
    faults[reason] = faults[reason] | flags if reason in faults else flags


def _label(cells: pl.Series) -> pl.Series:
    """uint8, null where the cell is not 0 or 1 (text: to the letter, as in text files)."""
    if cells.dtype == pl.String:
        fits = cells.is_in(LABELS)
    else:
        cells = cells.cast(pl.Float64)
        fits = cells.is_in([0.0, 1.0])
    return cells.set(~fits.fill_null(False), None).cast(pl.UInt8)


def _dense(cells: pl.Series, number: Number, faults: Faults) -> pl.Series:
    if number.whole:
        values = cells.to_frame().select(_integer(cells)).to_series().alias(cells.name)
        text = "dense value is not a 32-bit integer"
        _add(faults, text, cells.is_not_null() & values.is_null())
        return values
    values, is_number = _real(cells)
    _add(faults, "dense value is not a number", ~is_number)
    if number.clip is None and not number.buckets:
        text = "dense value is infinite, or beyond float32 (clip takes those as its ends)"
        _add(faults, text, values.is_infinite().fill_null(False))
    return values


def _integer(cells: pl.Series) -> pl.Expr:
    """int32, null where the cell is no whole number of 32 bits (text: written as in text files)."""
    cell = pl.col(cells.name)
    if cells.dtype == pl.String:
        pattern = f"^{INTEGER_PATTERN}$"
        plain = cell.str.replace(pattern, "${1}${2}")
        number = plain.str.to_integer(dtype=pl.Int32, strict=False)
        return pl.when(cell.str.contains(pattern)).then(number).alias(cells.name)
    number = cell.cast(pl.Float64, strict=False)
    whole = number == number.floor()
    return pl.when(whole).then(number.cast(pl.Int32, strict=False)).alias(cells.name)


def _real(cells: pl.Series) -> tuple[pl.Series, pl.Series]:
    """float32, null where missing (NaN too), and whether a cell that is there is a number."""
    if cells.dtype != pl.String:
        return cells.cast(pl.Float64).cast(pl.Float32), pl.repeat(True, len(cells), eager=True)
    cell = pl.col(cells.name)
    frame = cells.to_frame().select(
        number=cell.str.extract(f"^{REAL_PATTERN}$", 1).cast(pl.Float64, strict=False),
        infinite=cell.str.extract(_INFINITE, 1).replace_strict(
            ["", "+", "-"], [np.inf, np.inf, -np.inf], default=None, return_dtype=pl.Float64
        ),
        fits=cell.is_null() | cell.str.contains(_NO_NUMBER),
    )
    values = frame.select(pl.coalesce("number", "infinite").cast(pl.Float32)).to_series()
    return values.alias(cells.name), values.is_not_null() | frame["fits"]


def _several(
    frame: pl.DataFrame, many: Many, kind: Kind, faults: Faults
) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    found = read_list(frame, many, kind)
    expected = EXPECTED[kind]
    _add(faults, f"category is not {expected}", found.misfits)
    if many.beyond == "error":
        _add(faults, f"{many.name} has more than {many.most} values", found.too_long)
    if many.weighted:
        _add(faults, f"{many.name} has other numbers of values and weights", found.unpaired)
        _add(faults, f"a weight of {many.name} is not a finite number", found.bad_weights)
    return found.values, found.num_cut


def _beside(frame: pl.DataFrame, schema: Schema, faults: Faults) -> list[pl.Series]:
    """The columns that are no features; each must be there, but for further labels."""
    columns: list[pl.Series] = []
    for name in schema.labels:
        if name in frame.columns:
            columns.append(label := _label(frame[name]).cast(pl.Float32))
            text = f"{name} is not 0 or 1 or missing"
            _add(faults, text, frame[name].is_not_null() & label.is_null())
    if schema.weight:
        weight, _ = _real(frame[schema.weight])
        columns.append(weight)
        fits = (weight >= 0) & weight.is_finite()
        _add(faults, f"{schema.weight} is no sample weight (0 or more)", ~fits.fill_null(False))
    if schema.group:
        name, kind = schema.group
        cells = key_of(frame[name], kind)
        if kind == "string":
            cells = with_string_keys(cells.to_frame(), [name])[name]
        columns.append(cells.cast(pl.UInt64))
        _add(faults, f"{name} is no group ({kind})", cells.is_null())
    if schema.time:
        name, kind = schema.time
        columns.append(time := _time(frame[name], kind))
        _add(faults, f"{name} is no time ({kind})", time.is_null())
    if schema.row_key:
        name, kind = schema.row_key
        cells = key_of(frame[name], kind)
        if kind == "integer":
            cells = cells.reinterpret(signed=True)
        columns.append(cells)
        _add(faults, f"{name} is no row key ({kind})", cells.is_null())
    return columns


def _time(cells: pl.Series, kind: str) -> pl.Series:
    """int64: the number given, or microseconds since 1970 (UTC) of a date or date and time."""
    if kind == "integer":
        return key_of(cells, "integer").reinterpret(signed=True)
    if kind != "date":
        raise ValueError(f"time: kind {kind!r}; use date or integer")
    if cells.dtype == pl.String:
        cell = pl.col(cells.name).str.strip_suffix("Z")
        moments = [cell.str.to_datetime(form, strict=False, time_unit="us") for form in _TIMES]
        # To the parser 24-05-01 is a day of the year 24.
        moment = pl.when(cell.str.contains(_FULL_YEAR)).then(pl.coalesce(moments))
        return cells.to_frame().select(moment.alias(cells.name)).to_series().cast(pl.Int64)
    if cells.dtype == pl.Date or isinstance(cells.dtype, pl.Datetime):
        return cells.cast(pl.Datetime("us")).cast(pl.Int64).alias(cells.name)
    return pl.repeat(None, len(cells), dtype=pl.Int64, eager=True).alias(cells.name)

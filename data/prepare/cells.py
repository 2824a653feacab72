"""Convert cells to typed columns, by the same rules for text and Parquet, and count bad rows by
reason.

The columns of the input frame contain strings, or have the types of a Parquet file. A row is bad if
a cell does not fit its column, or is missing although its column must have a value. Values are
never guessed.
"""

import operator
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.schema import (
    CHECK,
    GROUP,
    ROW_KEY,
    SPLIT_COLUMN,
    TIME,
    DenseColumn,
    Kind,
    LabelRule,
    ListColumn,
    Schema,
    TimeKind,
)
from sbpflow.data.prepare.keys import key_of, with_string_keys
from sbpflow.data.prepare.lists import read_list
from sbpflow.data.prepare.piece import BadLines, Piece
from sbpflow.serving.cells import (
    EXPECTED,
    INFINITE_PATTERN,
    INTEGER_PATTERN,
    NAN_PATTERN,
    REAL_PATTERN,
)

LABELS = {
    text: number
    for number, texts in enumerate(("0 0.0 false False FALSE", "1 1.0 true True TRUE"))
    for text in texts.split()
}
"""The accepted labels, which must match exactly: lines with the label " 1", "01" or "yes" are
bad.
"""
_SHOWN_LABELS = 5
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_NAN = f"{NAN_PATTERN[:4]}^{NAN_PATTERN[4:]}$"
_INFINITE = f"{INFINITE_PATTERN[:4]}^{INFINITE_PATTERN[4:]}$"
_TIMES = ("%Y-%m-%d", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f")
_FULL_YEAR = "^ *[0-9]{4}-"
_CODE = re.compile("%[-_0]?(.)")
_FRACTION = re.compile(r"%(?=[.369])(\.?)([369]?)f")
_HOURS, _MINUTES = set("HIkl"), set("McXTRrs+")
"""Codes of ``strptime`` that contain an hour, and codes that contain minutes"""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOMENT = datetime(2009, 5, 13, 16, 7, 8, 500_000, tzinfo=UTC)
NOT_A_NUMBER, NOT_A_TIME, NOT_A_KEY = "is not a number", "is not a time", "is not a row key"

Faults = dict[tuple[str, str], pl.Series]
"""For each column and rule, flags that mark the rows whose cell breaks the rule"""
RawRow = Callable[[int], bytes]


def typed_piece(
    frame: pl.DataFrame,
    schema: Schema,
    num_lines: int,
    raw_row: RawRow,
    keep_strings: bool = False,
) -> Piece:
    """Return the good rows of ``frame`` as typed columns. ``frame`` contains the columns that the
    schema uses; if it has no label column, the rows are unlabeled. ``raw_row`` returns the original
    text of a row for error messages.
    """
    absent = list(dict.fromkeys(["", *schema.missing_values]))
    frame = frame.with_columns(
        pl.col(pl.Float32, pl.Float64).fill_nan(None), pl.col(pl.String).replace(absent, None)
    )
    columns: list[pl.Series] = []
    faults: Faults = {}
    if schema.label in frame.columns:
        columns.append(label := _label(frame[schema.label], schema.label_rule))
        faults[schema.label, _label_rule(schema)] = label.is_null()
    for name in schema.dense:
        columns.append(_dense(frame[name], schema.dense_column(name), faults))
    lists: dict[str, pl.DataFrame] = {}
    cut: dict[str, NDArray[np.int64]] = {}
    texts: dict[str, pl.DataFrame] = {}
    for name, kind in zip(schema.sparse, schema.kinds, strict=True):
        if (column := schema.list_column(name)) is not None:
            values, cut[name] = _list(frame, column, kind, faults)
            if kind == "string":
                texts[name] = values.select("key", "check", "text")
            lists[name] = values.drop("text", strict=False)
            continue
        columns.append(keys := key_of(frame[name], kind))
        faults[name, f"is not {EXPECTED[kind]}"] = frame[name].is_not_null() & keys.is_null()
    columns += _side_columns(frame, schema, faults)
    if not columns:  # without any column, the frame would not know its number of rows
        columns.append(pl.Series(SPLIT_COLUMN, np.zeros(len(frame), dtype=np.uint8)))
    strings = [n for n in schema.sparse if schema.kind(n) == "string" and n not in lists]
    cells = pl.DataFrame(columns)
    typed = with_string_keys(cells, strings)
    for name in strings:
        series = (typed[name].alias("key"), typed[name + CHECK].alias("check"))
        texts[name] = pl.DataFrame([*series, cells[name].alias("text")])
    bad = BadLines()
    is_bad = _report(frame, faults, raw_row, bad)
    piece = _without_faults(typed, is_bad, bad, lists, cut, num_lines)
    if keep_strings:
        piece.strings.update({name: frame.drop_nulls().unique() for name, frame in texts.items()})
    if schema.label in frame.columns and (schema.label_rule or typed[schema.label].null_count()):
        piece.label_cells.extend(_some_labels(frame[schema.label], schema))
    return piece


def _report(frame: pl.DataFrame, faults: Faults, raw_row: RawRow, bad: BadLines) -> pl.Series:
    """Add the bad rows to ``bad``; return flags that mark the bad rows."""
    is_bad = pl.repeat(False, len(frame), eager=True)
    for flags in faults.values():
        is_bad |= flags
    for number in is_bad.arg_true():
        name, rule = next(place for place, flags in faults.items() if flags[number])
        cell = frame[name][number]
        reason = f"{name} {rule}"
        if cell is None:
            reason = f"{name} is missing"
            if rule.startswith(NOT_A_KEY):
                reason += " (it is the row_key, which must not be empty)"
        shown = "" if cell is None else str(cell.to_list() if isinstance(cell, pl.Series) else cell)
        bad.add(number, reason, raw_row(number), shown)
    return is_bad


def _without_faults(
    typed: pl.DataFrame,
    is_bad: pl.Series,
    bad: BadLines,
    lists: dict[str, pl.DataFrame],
    cut: dict[str, NDArray[np.int64]],
    num_lines: int,
) -> Piece:
    is_good = ~is_bad.to_numpy()
    new_row = np.cumsum(is_good) - 1
    counts: list[pl.Series] = []
    for name, values in lists.items():
        rows = values["row"].to_numpy()
        if bad.total:
            values = values.filter(pl.Series(is_good[rows]))
            rows = new_row[values["row"].to_numpy()]
            values = values.with_columns(pl.Series("row", rows, dtype=pl.UInt32))
        lists[name] = values
        lengths = np.bincount(rows, minlength=int(is_good.sum())).astype(np.uint16)
        counts.append(pl.Series(name, lengths))
    frame = typed.filter(~is_bad) if bad.total else typed
    num_cut = {name: int(values[is_good].sum()) for name, values in cut.items()}
    return Piece(frame.with_columns(counts), num_lines, bad, lists, num_cut)


def _some_labels(cells: pl.Series, schema: Schema) -> list[str]:
    """Return some distinct cells of the label column or, for numbers, some of their quantiles.

    Without a label rule, valid labels (0 and 1) are left out, unless all cells are valid labels.
    """
    labels = cells.drop_nulls().cast(pl.String)
    if schema.label_rule is None:
        others = labels.filter(~labels.is_in(list(LABELS)))
        labels = others if len(others) else labels
    distinct = labels.unique(maintain_order=True)
    numbers = labels.cast(pl.Float64, strict=False)
    if len(distinct) > _SHOWN_LABELS and not numbers.null_count():
        places = np.linspace(0, len(labels) - 1, _SHOWN_LABELS).round().astype(np.int64)
        distinct = labels.gather(numbers.arg_sort().gather(places)).unique(maintain_order=True)
    return distinct.head(_SHOWN_LABELS).to_list()


def _label(cells: pl.Series, rule: LabelRule | None = None) -> pl.Series:
    """Return the labels as uint8, with null for cells that are neither 0 nor 1 or, with ``rule``,
    that cannot be compared.
    """
    if rule is not None:
        return _by_rule(cells, rule).cast(pl.UInt8).alias(cells.name)
    if cells.dtype == pl.String:
        return cells.replace_strict(LABELS, default=None, return_dtype=pl.UInt8)
    cells = cells.cast(pl.Float64)
    fits = cells.is_in([0.0, 1.0])
    return cells.set(~fits.fill_null(False), None).cast(pl.UInt8)


def _by_rule(cells: pl.Series, rule: LabelRule) -> pl.Series:
    """Return whether each cell matches the rule, with null for cells that cannot be compared."""
    if rule.numbers is None:
        return cells.cast(pl.String).is_in(rule.values)
    values, limit = _numbers(cells)[0], rule.numbers[0]
    if rule.compare == "in":
        return values.is_in(rule.numbers)
    return _COMPARE[rule.compare](values, limit)


def _label_rule(schema: Schema) -> str:
    if schema.label_rule is None:
        return "is not 0 or 1"
    return "cannot be compared" if schema.label_rule.numbers is None else NOT_A_NUMBER


def _dense(cells: pl.Series, column: DenseColumn, faults: Faults) -> pl.Series:
    if column.whole:
        values = cells.to_frame().select(_integer(cells)).to_series().alias(cells.name)
        faults[cells.name, "is not a 32-bit integer"] = cells.is_not_null() & values.is_null()
        return values
    values, is_number = _real(cells, column.decimal)
    faults[cells.name, NOT_A_NUMBER] = ~is_number
    if column.clip is None and not column.buckets:
        rule = "is infinite or outside the float32 range (use clip to limit it)"
        faults[cells.name, rule] = values.is_infinite().fill_null(False)
    return values


def _integer(cells: pl.Series) -> pl.Expr:
    """Return the cells as int32, with null for cells that are not 32-bit integers."""
    cell = pl.col(cells.name)
    if cells.dtype == pl.String:
        pattern = f"^{INTEGER_PATTERN}$"
        plain = cell.str.replace(pattern, "${1}${2}")
        number = plain.str.to_integer(dtype=pl.Int32, strict=False)
        return pl.when(cell.str.contains(pattern)).then(number).alias(cells.name)
    number = cell.cast(pl.Float64, strict=False)
    whole = number == number.floor()
    return pl.when(whole).then(number.cast(pl.Int32, strict=False)).alias(cells.name)


def _real(cells: pl.Series, decimal: str = ".") -> tuple[pl.Series, pl.Series]:
    """Return the cells as float32, and flags that are False for cells that are not numbers. Such
    cells, missing cells, and NaN become null.
    """
    values, is_number = _numbers(cells, decimal)
    return values.cast(pl.Float32), is_number


def _numbers(cells: pl.Series, decimal: str = ".") -> tuple[pl.Series, pl.Series]:
    """Return the same as ``_real``, but with float64 values."""
    if cells.dtype != pl.String:
        return cells.cast(pl.Float64), pl.repeat(True, len(cells), eager=True)
    cell = pl.col(cells.name)
    if decimal == ",":  # 1.234,5 is rejected: digit grouping is not supported
        cell = cell.str.replace_all(".", "?", literal=True).str.replace(",", ".", literal=True)
    frame = cells.to_frame().select(
        number=cell.str.extract(f"^{REAL_PATTERN}$", 1).cast(pl.Float64, strict=False),
        infinite=cell.str.extract(_INFINITE, 1).replace_strict(
            ["", "+", "-"], [np.inf, np.inf, -np.inf], default=None, return_dtype=pl.Float64
        ),
        fits=cell.is_null() | cell.str.contains(_NAN),
    )
    values = frame.select(pl.coalesce("number", "infinite")).to_series()
    return values.alias(cells.name), values.is_not_null() | frame["fits"]


def _list(
    frame: pl.DataFrame, column: ListColumn, kind: Kind, faults: Faults
) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    lists = read_list(frame, column, kind)
    faults[column.name, f"has a value that is not {EXPECTED[kind]}"] = lists.misfits
    if column.beyond == "error":
        faults[column.name, f"has more than {column.most} values"] = lists.too_long
    if column.weighted:
        faults[column.name, "has different numbers of values and weights"] = lists.unpaired
        faults[column.name, "has a weight that is not a finite number"] = lists.bad_weights
    return lists.values, lists.num_cut


def _side_columns(frame: pl.DataFrame, schema: Schema, faults: Faults) -> list[pl.Series]:
    """Return the non-feature columns. Only additional labels may be missing."""
    columns: list[pl.Series] = []
    for name in schema.labels:
        if name in frame.columns:
            columns.append(label := _label(frame[name]).cast(pl.Float32))
            faults[name, "is not 0, 1 or missing"] = frame[name].is_not_null() & label.is_null()
    if schema.weight:
        weight, _ = _real(frame[schema.weight])
        columns.append(weight)
        fits = (weight >= 0) & weight.is_finite()
        faults[schema.weight, "is not a weight of 0 or more"] = ~fits.fill_null(False)
    if schema.group:
        name, kind = schema.group
        cells = key_of(frame[name], kind)
        if kind == "string":
            cells = with_string_keys(cells.to_frame(), [name])[name]
        columns.append(cells.cast(pl.UInt64).alias(GROUP))
        faults[name, f"is missing or does not fit the group's kind {kind}"] = cells.is_null()
    if schema.time:
        name, kind = schema.time
        columns.append(time := times(frame[name], kind).alias(TIME))
        faults[name, f"{NOT_A_TIME} ({kind})"] = time.is_null()
    if schema.row_key:
        name, kind = schema.row_key
        cells = key_of(frame[name], kind)
        if kind == "integer":
            cells = cells.reinterpret(signed=True)
        columns.append(cells.alias(ROW_KEY))
        faults[name, f"{NOT_A_KEY} ({kind})"] = cells.is_null()
    return columns


def times(cells: pl.Series, kind: TimeKind) -> pl.Series:
    """Return times as int64: integers unchanged, dates as microseconds since 1970 (UTC)."""
    if kind == "integer":
        return key_of(cells, "integer").reinterpret(signed=True)
    if kind != "date" and "%" not in kind:
        raise ValueError(
            f"the kind of time must be date, integer, or a format such as %d/%m/%Y, got {kind!r}"
        )
    if cells.dtype == pl.String and kind != "date":
        return _formatted_times(cells, kind)
    if cells.dtype == pl.String:
        cell = pl.col(cells.name).str.strip_suffix("Z")
        moments = [cell.str.to_datetime(form, strict=False, time_unit="us") for form in _TIMES]
        # Years must have four digits, because Polars would parse 24-05-01 as a date in the year 24.
        moment = pl.when(cell.str.contains(_FULL_YEAR)).then(pl.coalesce(moments))
        return cells.to_frame().select(moment.alias(cells.name)).to_series().cast(pl.Int64)
    if cells.dtype == pl.Date or isinstance(cells.dtype, pl.Datetime):
        return cells.cast(pl.Datetime("us")).cast(pl.Int64).alias(cells.name)
    return pl.repeat(None, len(cells), dtype=pl.Int64, eager=True).alias(cells.name)


def _formatted_times(cells: pl.Series, form: str) -> pl.Series:
    """Read times in the format ``form``, which has the codes of Python's ``strptime``.

    For Polars, %f is a number of nanoseconds, but .%f can be written as %.f. Polars rejects hours
    without minutes, so minutes are added to the format and to the cells. They come first, because a
    %Z at the end would match them too.
    """
    form = form.replace(".%f", "%.f")
    codes = set(_CODE.findall(form))
    if codes & _HOURS and not codes & _MINUTES:
        form, cells = f"%M:{form}", ("00:" + cells).alias(cells.name)
    return cells.str.to_datetime(form, strict=False, time_unit="us").cast(pl.Int64)


def time_text(moment: datetime, form: str) -> str:
    """Return a time in the format ``form``; %.3f, %.6f, and %.9f are Polars' codes for fractions
    of a second.
    """
    digits = f"{moment.microsecond:06d}000"
    form = _FRACTION.sub(lambda code: f"{code[1]}{digits[: int(code[2] or 6)]}", form)
    return moment.strftime(form)


def reads_times(form: str) -> bool:
    """Return whether times in the format ``form`` can be read, which a sample time shows."""
    if "f" in _CODE.findall(form.replace(".%f", "%.f")):
        return False
    try:
        text = time_text(_MOMENT, form.replace(".%f", "%.f"))
        (time,) = times(pl.Series([text]), form)
    except (ValueError, pl.exceptions.PolarsError):
        return False
    try:
        expected = datetime.strptime(text, form.replace("%.f", ".%f"))
    except ValueError:  # codes that only Polars supports, such as %e
        return time is not None
    expected = expected if expected.tzinfo else expected.replace(tzinfo=UTC)
    return bool(time == (expected - _EPOCH) // timedelta(microseconds=1))

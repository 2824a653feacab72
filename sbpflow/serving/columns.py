"""Reads raw rows as columns. Rows can be dicts, text lines, a mapping of columns, pandas or Polars
data frames, or Arrow tables. This module needs only numpy, because it is part of a bundle's
``scorer.py``.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbpflow.serving.cells import (
    EXAMPLES,
    EXPECTED,
    Misfit,
    cell_pattern,
    is_missing,
    key_of,
    real_number,
)

Array = NDArray[Any]
_NUMBERS = ("int", "uint", "float", "double")


def brief(value: object) -> str:
    """Return at most 80 characters of a value's representation, for a message."""
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


class RowError(ValueError):
    """Raised for a bad row. ``row`` counts from 0; ``column`` is None if the fault is not in one
    column.
    """

    def __init__(self, row: int, column: str | None, value: object, rule: str) -> None:
        self.row, self.column, self.value = row, column, value
        place = f"row {row}" if column is None else f"row {row}, column {column!r}"
        super().__init__(f"{place}: {brief(value)} {rule}")


class Column(NamedTuple):
    """A column of raw rows. Columns are listed in the order of the cells in a text line; columns
    that are not listed are ignored.
    """

    name: str
    kind: str
    """One of dense, hex, integer, string, list, weights, and label"""
    required: bool


class RawRows:
    """Reads rows in the format of the training file, as described by ``input`` of model.json."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.columns = tuple(Column(**column) for column in content["columns"])
        self.required = [column.name for column in self.columns if column.required]
        self.separator: str = content["separator"]
        self.quote: str | None = content["quote"]
        self.header: bool = content["header"]
        self.missing_values = frozenset[str](content["missing_values"])

    def columns_of(self, rows: Any) -> Mapping[str, Any]:
        """Return the required columns as arrays, masked arrays, or lists of cells."""
        if isinstance(rows, Mapping) or hasattr(rows, "columns"):
            names = list(getattr(rows, "column_names", None) or getattr(rows, "columns", rows))
            _check_distinct(names)
            self.check_names(0, names)
            return {name: _cells(name, rows[name]) for name in self.required}
        if not len(rows):
            return {name: [] for name in self.required}
        if isinstance(rows[0], Mapping):
            try:
                return {name: [row[name] for row in rows] for name in self.required}
            except KeyError:
                for number, row in enumerate(rows):
                    self.check_names(number, row)
        if isinstance(rows, str | bytes) or isinstance(rows[0], str | bytes):
            return self._text_columns(text_of(rows, self.header))
        raise TypeError(f"each row must be a dict or a text line, got {type(rows[0]).__name__}")

    def with_missing(self, cells: Any) -> Any:
        """Return a column with None in place of strings that mark a cell as missing."""
        absent = self.missing_values
        if not absent or (isinstance(cells, np.ndarray) and cells.dtype.kind in "iufb"):
            return cells
        return [None if isinstance(cell, str) and cell in absent else cell for cell in cells]

    def check_names(self, row: int, names: Any) -> None:
        """Raise RowError for the first required column that is not one of ``names``."""
        if absent := [name for name in self.required if name not in names]:
            rule = "lacks this column; add it, with null or empty cells for missing values"
            raise RowError(row, absent[0], list(names), rule)

    def check_header(self, names: Sequence[str]) -> None:
        """Raise RowError if ``names`` are not the header of text lines with the required
        columns.
        """
        if names and names[0].startswith("\ufeff"):
            raise RowError(0, None, names[0], "begins with a byte order mark; remove it")
        _check_distinct(names)
        self.check_names(0, names)

    def file_columns(self, num_cells: int) -> list[str]:
        """Return the column names for text lines without a header. The lines may omit the label
        columns.
        """
        others = [column.name for column in self.columns if column.kind != "label"]
        return others if num_cells == len(others) else [column.name for column in self.columns]

    def _text_columns(self, text: str) -> dict[str, Any]:
        """Return the cells of text lines, by column."""
        quote, separator = self.quote, self.separator
        quoted = quote is not None and quote in text
        if not quoted:
            text = text.replace("\r\n", "\n")
        lines = _records(text, quote) if quoted and quote else text.removesuffix("\n").split("\n")
        rows = [
            _split(line, separator, quote, max(number - self.header, 0))
            for number, line in enumerate(lines if text else [])
        ]
        if self.header:
            names, rows = rows[0] if rows else [], rows[1:]
            self.check_header(names)
        else:
            names = self.file_columns(len(rows[0]) if rows else 0)
            self.check_names(0, names)
        for number, row in enumerate(rows):
            if len(row) != len(names):
                rule = f"has {len(row)} cells instead of {len(names)}: {separator.join(names)!r}"
                raise RowError(number, None, separator.join(row), rule)
        places = {name: place for place, name in enumerate(names)}
        return {name: [row[places[name]] for row in rows] for name in self.required}


def _check_distinct(names: Sequence[str]) -> None:
    """Raise RowError for the first name that occurs twice."""
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise RowError(0, twice, list(names), "names this column twice; rename one of them")


def text_of(rows: str | bytes | Sequence[str | bytes], header: bool) -> str:
    """Return text or a list of lines as one string; raise RowError if it is not UTF-8. The error's
    row number does not count the ``header``, if there is one.
    """
    if isinstance(rows, str):
        return rows
    if not isinstance(rows, bytes):
        ends = (
            line.rstrip(b"\r\n") if isinstance(line, bytes) else line.rstrip("\r\n")
            for line in rows
        )
        rows = b"\n".join(
            line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
            for line in ends
        )
    try:
        return rows.decode()
    except UnicodeDecodeError as error:
        row, value = rows.count(b"\n", 0, error.start), rows[error.start : error.start + 20]
        raise RowError(
            max(row - header, 0), None, value, "is not UTF-8 text; encode the rows in UTF-8"
        ) from error


def _records(text: str, quote: str) -> list[str]:
    """Split text into records, each of which may have several lines, because quoted cells can
    contain newlines.
    """
    records: list[str] = []
    open_record: list[str] = []
    is_quoted = False
    for line in text.removesuffix("\n").split("\n"):
        open_record.append(line)
        is_quoted ^= line.count(quote) % 2 == 1
        if not is_quoted:
            records.append("\n".join(open_record).removesuffix("\r"))
            open_record = []
    return records + ["\n".join(open_record)] * bool(open_record)


def _split(record: str, separator: str, quote: str | None, number: int) -> list[str]:
    if not record:
        raise RowError(number, None, record, "is a blank line; remove it")
    if quote is None or quote not in record:
        if "\r" in record:
            raise RowError(number, None, record, "has a stray carriage return; remove it")
        return record.split(separator)
    cell = cell_pattern(separator, quote)
    if not re.fullmatch(f"{cell}(?:{re.escape(separator)}{cell})*+", record, re.DOTALL):
        raise RowError(
            number, None, record, f"has a quote {quote} that does not enclose a whole cell"
        )
    found = re.findall(f"(?:^|{re.escape(separator)})({cell})", record, re.DOTALL)
    double = quote + quote
    return [c[1:-1].replace(double, quote) if c.startswith(quote) else c for c in found]


def _cells(name: str, column: Any) -> Any:
    """Return a column of a data frame as an array, a masked array, or a list.

    Integers with missing values become lists, because numpy would convert the integers to floats.
    """
    if isinstance(column, np.ndarray | list):
        return column
    if hasattr(column, "to_pylist"):  # Arrow
        if column.null_count == 0 and str(column.type).startswith(_NUMBERS):
            return column.to_numpy()
        return _arrow_list(name, column)
    if not hasattr(column, "to_list"):
        return list(column)
    # pandas columns have no ``null_count``; their float arrays mark missing values with NaN
    count = getattr(column, "null_count", int)
    dtype = str(column.dtype).lower()
    if dtype.startswith(_NUMBERS) and not count():
        array = column.to_numpy()
        # pandas converts nullable integers with missing values to floats, which can round them
        if array.dtype.kind == dtype[0].replace("d", "f"):
            return array
    return column.to_list()


def _arrow_list(name: str, column: Any) -> list[Any]:
    """Return an Arrow column as a list; raise RowError for the first cell that Python cannot
    represent, such as a time after the year 9999.
    """
    try:
        return column.to_pylist()
    except (OverflowError, ValueError) as error:
        row = next((row for row, cell in enumerate(column) if not _is_readable(cell)), 0)
        rule = f"has a cell that Python cannot read ({error}); send numbers, text, or lists of them"
        raise RowError(row, name, str(column.type), rule) from error


def _is_readable(cell: Any) -> bool:
    try:
        cell.as_py()
    except (OverflowError, ValueError):
        return False
    return True


class Lists(NamedTuple):
    """The values and weights of a list column, in row order, and the length of each row's list."""

    values: list[Any]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32]


def plain(cell: Any) -> Any:
    return cell.item() if isinstance(cell, np.generic) else cell


def _flat(cell: Any, separator: str) -> list[Any]:
    """Return the elements of a list cell. A list of one missing element counts as empty."""
    if is_missing(cell):
        return []
    if isinstance(cell, str):
        elements: list[Any] = cell.split(separator)
    elif isinstance(cell, list | tuple | np.ndarray):
        elements = [plain(each) for each in cell]
    else:
        elements = [cell]
    return [] if len(elements) == 1 and is_missing(elements[0]) else elements


def _weight(cell: Any) -> float:
    """Return a weight rounded to float32, or NaN if the cell is missing or not a number."""
    try:
        return float(np.float32(real_number(cell))) if not is_missing(cell) else np.nan
    except Misfit:
        return np.nan


def _pair_of(element: Any, mark: str) -> tuple[Any, Any]:
    """Return the value and the weight of a list element: text such as ``a:0.5``, where ``mark`` is
    ":", or a mapping that contains a value and then its weight. Raises Misfit for other mappings.
    """
    if isinstance(element, Mapping):
        names = list(element)
        # Mappings are read by position, so a weight in the first place would be read as the value.
        if len(names) != 2 or str(names[0]).lower().startswith("weight"):
            raise Misfit
        return element[names[0]], element[names[1]]
    value, separator, weight = str(element).rpartition(mark)
    return (value, weight) if separator else (element, None)


def read_list(entry: Mapping[str, Any], cells: Mapping[str, Any]) -> Lists:
    """Read a list column. Lists above the maximum length are cut, or raise RowError if the option
    ``beyond`` is error.
    """
    name, options = entry["name"], entry["list"]
    separator, inline, others = options["separator"], options["inline"], options["weights"]
    values: list[Any] = []
    weights: list[float] = []
    lengths: list[int] = []
    for row, raw in enumerate(cells[name]):
        elements = _flat(plain(raw), separator)
        own: list[Any] = [1.0] * len(elements)
        if inline is not None:
            try:
                pairs = [_pair_of(each, inline) for each in elements]
            except Misfit as error:
                rule = "has an element that is not a value and then its weight"
                raise RowError(row, name, raw, rule) from error
            elements, own = [value for value, _ in pairs], [_weight(w) for _, w in pairs]
        if others is not None:
            own = [_weight(each) for each in _flat(plain(cells[others][row]), separator)]
            if len(own) != len(elements):
                rule = f"has {len(elements)} values, but {others!r} has {len(own)} weights"
                raise RowError(row, name, raw, rule)
        if not np.isfinite(own).all():
            given = raw if others is None else cells[others][row]
            raise RowError(row, others or name, given, "has a weight that is not a finite number")
        if len(elements) > options["most"] and options["beyond"] == "error":
            raise RowError(row, name, raw, f"has more than {options['most']} values")
        kept = (
            slice(-options["most"], None) if options["beyond"] == "last" else slice(options["most"])
        )
        for each in elements:
            try:
                if not is_missing(each):
                    key_of(each, entry["kind"])
            except Misfit as error:
                kind = entry["kind"]
                rule = f"must be {EXPECTED[kind]}, such as {EXAMPLES[kind]}"
                raise RowError(row, name, each, rule) from error
        values += elements[kept]
        weights += own[kept]
        lengths.append(len(elements[kept]))
    sizes = np.array(lengths, dtype=np.int32)
    return Lists(values, sizes, np.array(weights, np.float32))

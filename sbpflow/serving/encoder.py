"""Encodes raw rows for a model: dicts, data frames, or text lines become ids and dense values.

The result equals the rows of ``sbpflow encode``. This module needs only numpy, because it is a part
of a bundle's ``scorer.py``. A bundle's ``model.json`` describes the columns (``input``), and the
file ``vocabulary.safetensors`` has one hash table of all vocabularies.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from sbpflow.runtime.random.splitmix import GAMMA
from sbpflow.serving.cells import (
    EXAMPLES,
    EXPECTED,
    MISSING_ID,
    RARE_ID,
    Misfit,
    bucket_ids,
    cell_pattern,
    hashed_key_ids,
    is_missing,
    key_of,
    pair_keys,
    real_number,
    transform,
    whole_number,
)

Array = NDArray[Any]
WHOLE, REAL = "a 32-bit integer", "a finite number within float32"


class RowError(ValueError):
    """A row cannot be encoded; ``row`` counts from 0, and ``column`` may be None."""

    def __init__(self, row: int, column: str | None, value: object, rule: str) -> None:
        self.row, self.column, self.value = row, column, value
        place = f"row {row}" if column is None else f"row {row}, column {column!r}"
        shown = repr(value)
        super().__init__(f"{place}: {shown if len(shown) < 80 else shown[:77] + '...'} {rule}")


class Column(NamedTuple):
    """A column of raw rows, in the order of text lines; other columns are ignored."""

    name: str
    kind: str
    """dense, hex, integer, string, or list, weights and label"""
    required: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded rows: ``ids`` int32 [n, columns], ``dense`` float32 [n, fields], and lists.

    ``bags`` maps ragged fields to (values int32, lengths int32 [n]), with weights float32 if
    weighted. ``missing`` and ``unknown`` count the empty values and the values without an id.
    """

    ids: NDArray[np.int32]
    dense: NDArray[np.float32]
    bags: Mapping[str, tuple[Array, ...]] = field(default_factory=dict[str, tuple[Array, ...]])
    missing: Mapping[str, int] = field(default_factory=dict[str, int])
    unknown: Mapping[str, int] = field(default_factory=dict[str, int])


class Keys(NamedTuple):
    """The keys of a field's values, with True for missing values."""

    keys: NDArray[np.uint64]
    checks: NDArray[np.uint32]
    missing: NDArray[np.bool_]


class Lists(NamedTuple):
    """The values of a list column, row by row."""

    values: list[Any]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32]
    rows: NDArray[np.int64]


class Vocabularies:
    """Open-addressing hash tables of all vocabularies in three arrays.

    An empty slot has key 0 and RARE_ID. ``checks`` has one entry per id of a string vocabulary.
    """

    def __init__(self, places: Mapping[str, Any], keys: Array, ids: Array, checks: Array) -> None:
        self.places, self.keys, self.ids, self.checks = places, keys, ids, checks

    def look_up(self, names: Sequence[str], keys: Keys) -> NDArray[np.int32]:
        """Return the ids int32 [rows, fields] of keys [rows, fields], field by vocabulary name."""
        places = [self.places[name] for name in names]
        start = np.array([place["start"] for place in places], dtype=np.int64)
        capacity = np.array([place["capacity"] for place in places], dtype=np.int64)
        spread = keys.keys * np.uint64(GAMMA) >> np.uint64(32)
        slots = (spread * capacity.astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        ids = self._probe(keys.keys, start, capacity, slots)
        for column, place in enumerate(places):
            if place["checks"] is not None:
                checks = self.checks[place["checks"] + ids[:, column]]
                ids[checks != keys.checks[:, column], column] = RARE_ID
        ids[keys.missing] = MISSING_ID
        return ids

    def _probe(self, keys: Array, start: Array, capacity: Array, slots: Array) -> Array:
        at = start + slots
        ids = self.ids[at]
        rest = np.nonzero((self.keys[at] != keys) & (ids != RARE_ID))
        while len(rest[0]):
            columns = rest[1]
            slots[rest] = (slots[rest] + 1) % capacity[columns]
            at = start[columns] + slots[rest]
            ids[rest] = self.ids[at]
            again = (self.keys[at] != keys[rest]) & (ids[rest] != RARE_ID)
            rest = (rest[0][again], columns[again])
        return ids

    def with_entries(self, entries: Mapping[str, tuple[Array, ...]]) -> "Vocabularies":
        """Return vocabularies that also have (keys, ids) or (keys, ids, checks) by name."""
        raise NotImplementedError


class Encoder:
    """Encodes rows by the ``input`` of a bundle's model.json."""

    def __init__(self, content: Mapping[str, Any], vocabularies: Vocabularies) -> None:
        self._content, self.vocabularies = content, vocabularies
        self.columns = tuple(Column(**column) for column in content["columns"])
        self._required = [column.name for column in self.columns if column.required]
        self._dense: list[dict[str, Any]] = content["dense"]
        self._fields: list[dict[str, Any]] = content["fields"]
        by_name = {each["name"]: each for each in self._fields}
        self._singles = [f for f in self._fields if f.get("kind") and not f.get("list")]
        self._lists = [f for f in self._fields if f.get("list")]
        self._pairs = [f for f in self._fields if f.get("parts")]
        self._place = {each["name"]: n for n, each in enumerate(self._singles)}
        self._looked_up = [f for f in (*self._singles, *self._pairs) if f["vocabulary"]]
        self._by_name = by_name

    def encode(self, rows: object) -> Encoded:
        """Encode a list of dicts, a data frame, a mapping of columns, or text lines."""
        return self.encode_columns(self.columns_of(rows))

    def columns_of(self, rows: Any) -> dict[str, Any]:
        """Return the required columns as arrays, masked arrays, or lists."""
        if isinstance(rows, bytes | bytearray | memoryview | str):
            return self._text_columns(rows if isinstance(rows, str) else bytes(rows))
        if isinstance(rows, Mapping):
            names = list(rows)
        elif hasattr(rows, "column_names") or hasattr(rows, "columns"):
            names = list(getattr(rows, "column_names", None) or rows.columns)
        elif not len(rows):
            return {name: [] for name in self._required}
        elif isinstance(rows[0], Mapping):
            try:
                return {name: [row[name] for row in rows] for name in self._required}
            except KeyError as error:
                (name,) = error.args
                row = next(n for n, each in enumerate(rows) if name not in each)
                self._absent(row, name, rows[row])
        elif isinstance(rows[0], bytes | str):
            lines = (each if isinstance(each, str) else self._decoded(each) for each in rows)
            return self._text_columns("\n".join(line.removesuffix("\n") for line in lines))
        else:
            raise TypeError(
                f"rows: {type(rows[0]).__name__} is not a row; give dicts, a data frame, or lines"
            )
        if absent := [name for name in self._required if name not in names]:
            self._absent(0, absent[0], names)
        return {name: _cells(rows[name]) for name in self._required}

    def _absent(self, row: int, name: str, given: object) -> NoReturn:
        raise RowError(
            row, name, list(given), "lacks this column; add it, with None for a missing value"
        )

    def encode_columns(self, columns: Mapping[str, Any]) -> Encoded:
        """Encode equally long columns by name: numpy arrays (also masked) or lists of cells."""
        cells = {name: columns[name] for name in self._required}
        num_rows = len(next(iter(cells.values())))
        for name, column in cells.items():
            if len(column) != num_rows:
                raise ValueError(
                    f"column {name!r}: has {len(column)} rows, but {self._required[0]!r} has "
                    f"{num_rows}; give columns of one length"
                )
        missing: dict[str, int] = {}
        dense, buckets = self._numbers(cells, num_rows, missing)
        single = self._keys(self._singles, [cells[f["name"]] for f in self._singles], num_rows)
        ids = self._ids(single, num_rows) | buckets
        bags: dict[str, tuple[Array, ...]] = {}
        for entry in self._lists:
            found = _read_list(entry, cells)
            keys = self._keys([entry], [found.values], len(found.values))
            values = self._ids_of(entry, keys, 0)
            if entry["ragged"]:
                weights = (found.weights,) if entry["weighted"] else ()
                bags[entry["name"]] = (values, found.lengths, *weights)
            else:
                matrix = np.full((num_rows, entry["hot"]), MISSING_ID, dtype=np.int32)
                first = np.cumsum(found.lengths) - found.lengths
                matrix[found.rows, np.arange(len(values)) - first[found.rows]] = values
                ids[entry["name"]] = matrix
            missing[entry["name"]] = int(np.count_nonzero(found.lengths == 0))
        names = [f["name"] for f in self._fields if f["name"] in ids]
        unknown = {
            name: int(np.count_nonzero(values == RARE_ID))
            for name, values in (ids | {name: bag[0] for name, bag in bags.items()}).items()
        }
        missing |= {
            n: int(np.count_nonzero(ids[n] == MISSING_ID)) for n in names if n not in missing
        }
        parts = [ids[name].reshape(num_rows, -1) for name in names]
        matrix = np.concatenate(parts, 1) if parts else np.empty((num_rows, 0), dtype=np.int32)
        return Encoded(matrix, dense, bags, missing, unknown)

    def _numbers(
        self, cells: Mapping[str, Any], num_rows: int, missing: dict[str, int]
    ) -> tuple[NDArray[np.float32], dict[str, Array]]:
        columns: list[Array] = []
        buckets: dict[str, Array] = {}
        for entry in self._dense:
            name = entry["name"]
            values, mask = _numbers_of(cells[name], entry)
            missing[name] = int(np.count_nonzero(mask))
            if entry["bounds"] is not None:
                buckets[name] = bucket_ids(values, mask, entry["bounds"])
                continue
            columns.append(transform(entry["transform"], entry["clip"], values, mask, entry)[0])
            if entry["indicator"]:
                columns.append(mask.astype(np.float32))
        if not columns:
            return np.empty((num_rows, 0), dtype=np.float32), buckets
        return np.stack(columns, 1), buckets

    def _keys(self, fields: Sequence[Any], columns: Sequence[Any], num_rows: int) -> Keys:
        shape = (num_rows, len(fields))
        found = Keys(
            np.zeros(shape, np.uint64), np.zeros(shape, np.uint32), np.zeros(shape, np.bool_)
        )
        for number, (entry, column) in enumerate(zip(fields, columns, strict=True)):
            _fill_keys(column, entry, *(part[:, number] for part in found))
        return found

    def _ids(self, single: Keys, num_rows: int) -> dict[str, Array]:
        """Return the ids of fields with one value per row, and of their pairs."""
        keys, missing = [single.keys], [single.missing]
        for entry in self._pairs:
            left, right = (self._place[name] for name in entry["parts"])
            both = pair_keys(single.keys[:, left], single.keys[:, right], entry["both_hex"])
            mask = single.missing[:, left] | single.missing[:, right]
            both[mask] = 0
            keys.append(both[:, None])
            missing.append(mask[:, None])
        checks = np.zeros((num_rows, len(self._pairs)), dtype=np.uint32)
        joined = Keys(
            np.concatenate(keys, 1),
            np.concatenate([single.checks, checks], 1),
            np.concatenate(missing, 1),
        )
        fields = [*self._singles, *self._pairs]
        chosen = [n for n, entry in enumerate(fields) if entry["vocabulary"]]
        names = [fields[n]["vocabulary"] for n in chosen]
        table = self.vocabularies.look_up(names, Keys(*(part[:, chosen] for part in joined)))
        ids = {fields[n]["name"]: table[:, place] for place, n in enumerate(chosen)}
        for number, entry in enumerate(fields):
            if not entry["vocabulary"]:
                ids[entry["name"]] = self._ids_of(entry, joined, number)
        return ids

    def _ids_of(self, entry: Mapping[str, Any], keys: Keys, number: int) -> NDArray[np.int32]:
        one = Keys(*(part[:, number : number + 1] for part in keys))
        if entry["vocabulary"]:
            return self.vocabularies.look_up([entry["vocabulary"]], one)[:, 0]
        ids = hashed_key_ids(one.keys[:, 0], entry["rows"], entry["salt"])
        return np.where(one.missing[:, 0], np.int32(MISSING_ID), ids)

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            row = text.count(b"\n", 0, error.start)
            value = text[error.start : error.start + 20]
            raise RowError(
                row, None, value, "is not UTF-8 text; encode the rows in UTF-8"
            ) from error

    def _text_columns(self, given: str | bytes) -> dict[str, Any]:
        """Return the cells of text lines in the format of the training file."""
        text = given if isinstance(given, str) else self._decoded(given)
        quote, separator = self._content["quote"], self._content["separator"]
        quoted = quote is not None and quote in text
        if not quoted:
            text = text.replace("\r\n", "\n")
        records = _records(text, quote) if quoted else text.removesuffix("\n").split("\n")
        if not text:
            records = []
        rows = [_split(record, separator, quote, n) for n, record in enumerate(records)]
        names = [column.name for column in self.columns]
        if self._content["header"]:
            if not rows:
                raise RowError(0, None, text, f"lacks the line of column names {names}")
            names, rows = rows[0], rows[1:]
        elif rows:
            others = [c.name for c in self.columns if c.kind != "label"]
            names = others if len(rows[0]) == len(others) else names
        if absent := [name for name in self._required if name not in names]:
            self._absent(0, absent[0], names)
        for number, row in enumerate(rows):
            if len(row) != len(names):
                rule = f"has {len(row)} cells instead of {len(names)}: {separator.join(names)!r}"
                raise RowError(number, None, separator.join(row), rule)
        places = {name: place for place, name in enumerate(names)}
        return {name: [row[places[name]] for row in rows] for name in self._required}


def _records(text: str, quote: str) -> list[str]:
    """Join the lines of records whose quoted cells contain line ends."""
    records: list[str] = []
    open_record: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        open_record.append(line)
        if sum(part.count(quote) for part in open_record) % 2 == 0:
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


def _cells(column: Any) -> Any:
    """Return a data frame's column as an array, a masked array, or a list.

    Polars and Arrow integers with missing values would become floats, so they are masked.
    """
    if isinstance(column, np.ndarray | list):
        return column
    if hasattr(column, "to_pylist"):  # Arrow
        if column.null_count == 0 and str(column.type).startswith(
            ("int", "uint", "float", "double")
        ):
            return column.to_numpy()
        return column.to_pylist()
    if hasattr(column, "to_list"):  # Polars and pandas
        kind = str(getattr(column, "dtype", "")).lower()
        is_number = kind.startswith(("int", "uint", "float")) and "[" not in kind
        null_count = getattr(column, "null_count", None)
        if is_number and (not callable(null_count) or null_count() == 0):
            array = column.to_numpy()
            return array if array.dtype != object else list(array)
        return column.to_list()
    return list(column)


def _plain(cell: Any) -> Any:
    return cell.item() if isinstance(cell, np.generic) else cell


def _numbers_of(cells: Any, entry: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return float32 values and True for missing values; raise RowError for the first misfit."""
    limited = entry["clip"] is not None or entry["bounds"] is not None
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iufb":
        mask = np.ma.getmaskarray(cells) | (np.isnan(cells) if cells.dtype.kind == "f" else False)
        numbers = np.where(mask, 0.0, np.ma.getdata(cells).astype(np.float64))
        fits = np.ones(len(cells), dtype=np.bool_)
        if entry["whole"]:
            fits = (numbers == np.floor(numbers)) & (np.abs(numbers + 0.5) < 2.0**31)
    else:
        numbers, mask = np.zeros(len(cells)), np.zeros(len(cells), dtype=np.bool_)
        fits = np.ones(len(cells), dtype=np.bool_)
        parse = whole_number if entry["whole"] else real_number
        for row, raw in enumerate(cells):
            if is_missing(cell := _plain(raw)):
                mask[row] = True
                continue
            try:
                numbers[row] = parse(cell)
            except Misfit:
                fits[row] = False
        mask |= np.isnan(numbers)
        numbers[mask] = 0.0
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    if not limited:
        fits &= np.isfinite(values)
    if not fits.all():
        row = int(fits.argmin())
        rule = WHOLE if entry["whole"] else "a number" if limited else REAL
        raise RowError(row, entry["name"], _plain(cells[row]), f"must be {rule}, such as 3")
    return values, mask


def _fill_keys(
    cells: Any, entry: Mapping[str, Any], keys: Array, checks: Array, mask: Array
) -> None:
    """Write the keys, checks, and mask of a category column; raise RowError for a misfit."""
    kind = entry["kind"]
    row = 0
    rows = range(len(cells)) if "row" not in entry else entry["row"]
    for number, raw in enumerate(cells):
        if is_missing(cell := _plain(raw)):
            mask[number] = True
            continue
        try:
            keys[number], checks[number] = key_of(cell, kind)
        except Misfit as error:
            row = int(rows[number])
            raise RowError(
                row, entry["name"], cell, f"must be {EXPECTED[kind]}, such as {EXAMPLES[kind]}"
            ) from error


def _flat(cell: Any, separator: str) -> list[Any]:
    """Return the elements of a list cell; one missing element means no elements."""
    if is_missing(cell):
        return []
    if isinstance(cell, str):
        elements: list[Any] = cell.split(separator)
    elif isinstance(cell, list | tuple | np.ndarray):
        elements = [_plain(each) for each in cell]
    else:
        elements = [cell]
    return [] if len(elements) == 1 and is_missing(elements[0]) else elements


def _weight(cell: Any) -> float:
    """Return a weight as float32, or NaN if it is not a finite number."""
    try:
        return float(np.float32(real_number(cell))) if not is_missing(cell) else np.nan
    except Misfit:
        return np.nan


def _pair_of(element: Any, mark: str) -> tuple[Any, Any]:
    """Return the value and the weight of a list element such as ``a:0.5``."""
    if isinstance(element, Mapping):
        value, weight = element.values()
        return value, weight
    value, found, weight = str(element).rpartition(mark)
    return (value, weight) if found else (element, None)


def _read_list(entry: Mapping[str, Any], cells: Mapping[str, Any]) -> Lists:
    """Return the values and weights of a list column, cut to the maximum length."""
    name, options = entry["name"], entry["list"]
    separator, inline, others = options["separator"], options["inline"], options["weights"]
    values: list[Any] = []
    weights: list[float] = []
    lengths: list[int] = []
    for row, raw in enumerate(cells[name]):
        elements = _flat(_plain(raw), separator)
        own: list[Any] = [1.0] * len(elements)
        if inline is not None:
            pairs = [_pair_of(each, inline) for each in elements]
            elements, own = [value for value, _ in pairs], [_weight(w) for _, w in pairs]
        if others is not None:
            own = [_weight(each) for each in _flat(_plain(cells[others][row]), separator)]
            if len(own) != len(elements):
                rule = f"has {len(elements)} values, but {others!r} has {len(own)} weights"
                raise RowError(row, name, raw, rule)
        if not np.isfinite(own).all():
            raise RowError(row, others or name, raw, "has a weight that is not a finite number")
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
    return Lists(
        values, sizes, np.array(weights, np.float32), np.repeat(np.arange(len(sizes)), sizes)
    )

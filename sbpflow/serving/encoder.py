"""Encodes raw rows for a model: the ids of categories, and transformed dense values.

The results are the same as those of ``sbpflow encode``. This module needs only numpy, because it is
part of a bundle's ``scorer.py``. If numba is installed, ``encoder_loops`` encodes rows in a single
pass instead, if it supports their format. ``model.json`` describes the columns (``input``), and
``vocabulary.safetensors`` contains the hash tables of the vocabularies.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbpflow.runtime.random.splitmix import GAMMA
from sbpflow.serving.cells import (
    EXAMPLES,
    EXPECTED,
    MISSING_ID,
    MISSING_KEY,
    RARE_ID,
    Misfit,
    bucket_ids,
    clip_of,
    clipped,
    hashed_key_ids,
    is_missing,
    key_of,
    pair_keys,
    real_number,
    transform,
    whole_number,
)
from sbpflow.serving.columns import Array, Lists, RawRows, RowError, plain, read_list

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded rows: the ids (int32 [n, columns]), the dense values (float32 [n, values]), and
    lists.

    ``bags`` maps each ragged field to (values, lengths [n]), both int32, or, if it has weights, to
    (values, lengths, weights), where weights are float32. ``counts`` (int64 [2, names]) contains
    the numbers of missing values and of values without an id of their own, in the order of the
    column ``names``; the first ``num_numeric`` of these columns contain numbers. For growing fields
    that are part of hashed crosses, ``keys`` maps a column of ``ids`` to the keys of the column's
    field (int64 [n]).
    """

    ids: NDArray[np.int32]
    dense: NDArray[np.float32]
    bags: Mapping[str, tuple[Array, ...]] = field(default_factory=dict[str, tuple[Array, ...]])
    names: Sequence[str] = ()
    counts: Array = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))
    keys: Mapping[int, NDArray[np.int64]] = field(default_factory=dict[int, NDArray[np.int64]])
    num_numeric: int = 0

    @property
    def missing(self) -> dict[str, int]:
        """Return the number of missing values in each column."""
        return dict(zip(self.names, self.counts[0].tolist(), strict=True))

    @property
    def unknown(self) -> dict[str, int]:
        """Return the number of values without an id of their own in each column of categories."""
        first = self.num_numeric
        return dict(zip(self.names[first:], self.counts[1, first:].tolist(), strict=True))


class Cells(NamedTuple):
    """The parsed cells of rows: numbers and keys.

    ``numbers`` is float64 [rows, dense], where NaN means missing. ``keys`` (uint64), ``checks``
    (uint32), and ``missing`` (bool) have shape [rows, categories].
    """

    numbers: Array
    keys: Array
    checks: Array
    missing: Array

    @staticmethod
    def empty(num_rows: int, num_dense: int, num_keys: int) -> "Cells":
        """Return cells of zeros: [num_rows, num_dense] numbers and [num_rows, num_keys] keys."""
        shape = (num_rows, num_keys)
        return Cells(
            np.zeros((num_rows, num_dense)),
            np.zeros(shape, np.uint64),
            np.zeros(shape, np.uint32),
            np.zeros(shape, np.bool_),
        )


class Vocabularies:
    """The hash tables (open addressing) of all vocabularies, in three arrays. An empty slot has key
    0 and id RARE_ID. ``checks`` has one entry per id of each string vocabulary.
    """

    def __init__(
        self,
        places: Mapping[str, Any],
        keys: Array,
        ids: Array,
        checks: Array,
        added: Mapping[str, tuple[Array, ...]] | None = None,
    ) -> None:
        self.places, self.keys, self.ids, self.checks = places, keys, ids, checks
        self.added = added or {}

    def places_of(self, names: Sequence[str]) -> Array:
        """Return int64 [3, names]: the start of each vocabulary, its capacity, and the start of its
        checks, or -1 if it has no checks.
        """
        places = [self.places[name] for name in names]
        checks = [-1 if place["checks"] is None else place["checks"] for place in places]
        starts, sizes = ([place[key] for place in places] for key in ("start", "capacity"))
        return np.array([starts, sizes, checks], dtype=np.int64)

    def look_up(self, places: Array, cells: Cells) -> NDArray[np.int32]:
        """Return the ids of the cells' keys (int32 [rows, fields]); ``places`` is the result of
        ``places_of`` for the fields' vocabularies.
        """
        start, capacity, first_check = places
        spread = (cells.keys * np.uint64(GAMMA)) >> np.uint64(32)
        slots = ((spread * capacity.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
        ids = self._probe(cells.keys, start, capacity, slots)
        for column in np.flatnonzero(first_check >= 0):
            checks = self.checks[first_check[column] + ids[:, column]]
            ids[checks != cells.checks[:, column], column] = RARE_ID
        ids[cells.missing] = MISSING_ID
        return ids

    def add_new(self, name: str, ids: Array, keys: Array, checks: Array) -> None:
        """Overwrite the ids of those keys whose entries were added by ``with_entries``."""
        if name not in self.added or not len(self.added[name][0]):
            return
        new_keys, new_ids, new_checks = self.added[name]
        present = np.flatnonzero(ids != MISSING_ID)
        at = np.searchsorted(new_keys, keys[present]).clip(max=len(new_keys) - 1)
        hit = new_keys[at] == keys[present]
        if self.places[name]["checks"] is not None:
            hit &= new_checks[at] == checks[present]
        ids[present[hit]] = new_ids[at[hit]]

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
        """Return vocabularies with additional (keys, ids) or (keys, ids, checks), by name. A new
        entry of a key replaces the key's earlier entry, and the id RARE_ID removes the key.
        """
        added = dict(self.added)
        for name, (keys, ids, *rest) in entries.items():
            checks = rest[0] if rest else np.zeros(len(keys), dtype=np.uint32)
            old = added.get(name, (keys[:0], ids[:0], checks[:0]))
            # new entries come first, because ``np.unique`` keeps the first entry of a key
            parts = zip((keys, ids, checks), old, strict=True)
            joined = [np.concatenate(part) for part in parts]
            _, first = np.unique(joined[0], return_index=True)
            added[name] = (joined[0][first], joined[1][first], joined[2][first])
        return Vocabularies(self.places, self.keys, self.ids, self.checks, added)


class Encoder:
    """Encodes rows as described by ``input`` in the model.json of a bundle.

    ``loops`` is the module ``encoder_loops``, or None to use numpy. ``crossed`` contains the
    columns of ids for which ``Encoded.keys`` is computed.
    """

    def __init__(
        self,
        content: Entry,
        vocabularies: Vocabularies,
        loops: ModuleType | None = None,
        crossed: Collection[int] = (),
    ) -> None:
        self.content, self.vocabularies, self.crossed = content, vocabularies, crossed
        self.raw = RawRows(content)
        self._dense: list[Entry] = content["dense"]
        self._fields: list[Entry] = content["fields"]
        self.singles = [f for f in self._fields if f["kind"] and not f["list"]]
        self.lists = [f for f in self._fields if f["list"]]
        self.pairs = [f for f in self._fields if f["parts"]]
        place = {each["name"]: n for n, each in enumerate(self.singles)}
        self.parts = [[place[name] for name in pair["parts"]] for pair in self.pairs]
        self.keyed = [*self.singles, *self.pairs]
        self._looked_up = [n for n, each in enumerate(self.keyed) if each["vocabulary"]]
        names = [self.keyed[n]["vocabulary"] for n in self._looked_up]
        self._places = vocabularies.places_of(names)
        self.id_columns, self._width = _id_columns(self._fields)
        self.names = tuple(each["name"] for each in (*self._dense, *self.keyed, *self.lists))
        self.keyed_columns = [self.id_columns[each["name"]] for each in self.keyed]
        self._compiled = None if loops is None else loops.CompiledInput(self)

    def with_entries(self, entries: Mapping[str, tuple[Array, ...]]) -> "Encoder":
        """Return an encoder with additional entries (keys, ids) or (keys, ids, checks) by
        vocabulary.
        """
        vocabularies = self.vocabularies.with_entries(entries)
        other = Encoder(self.content, vocabularies, crossed=self.crossed)
        other._compiled = self._compiled
        return other

    def encode(self, rows: Any) -> Encoded:
        """Encode a list of dicts, a data frame, a mapping of columns, or text lines."""
        if self._compiled is not None and (cells := self._compiled.parse(rows)):
            return self._encoded(cells, {})
        given, required = self.raw.columns_of(rows), self.raw.required
        columns = {name: self.raw.with_missing(given[name]) for name in required}
        num_rows = len(columns[required[0]])
        for name in required:
            if len(columns[name]) != num_rows:
                raise ValueError(
                    f"column {name!r} has {len(columns[name])} rows, but {required[0]!r} has "
                    f"{num_rows}; give columns of equal length"
                )
        cells = Cells.empty(num_rows, len(self._dense), len(self.singles))
        # The compiled loops read the columns that are lists, unless a cell needs Python's parser.
        done = set[str]() if self._compiled is None else self._compiled.read_lists(columns, cells)
        for number, entry in enumerate(self._dense):
            if entry["name"] not in done:
                _read_numbers(columns[entry["name"]], entry, cells.numbers[:, number])
        for number, entry in enumerate(self.singles):
            if entry["name"] not in done:
                keys = (part[:, number] for part in cells[1:])
                _read_keys(columns[entry["name"]], entry["name"], entry["kind"], *keys)
        return self._encoded(cells, columns)

    def encode_json(self, text: bytes) -> Encoded | None:
        """Encode a JSON list of objects in compiled loops; return None if this is not possible."""
        cells = None if self._compiled is None else self._compiled.parse_json(text)
        return None if cells is None else self._encoded(cells, {})

    def _encoded(self, cells: Cells, columns: Mapping[str, Any]) -> Encoded:
        """Encode the rows of ``cells`` and of the list columns in ``columns``."""
        num_rows = len(cells.numbers)
        ids = np.zeros((num_rows, self._width), dtype=np.int32)
        finished = None if self._compiled is None else self._compiled.finish(cells, ids)
        dense, counts = finished or self._finish(cells, ids)
        if self.vocabularies.added:
            self._add_new(cells, ids)
            self._count(ids, counts)
        keys = self._crossed_keys(cells)
        bags: dict[str, tuple[Array, ...]] = {}
        for number, entry in enumerate(self.lists, len(self.names) - len(self.lists)):
            listed, values = _list_cells(entry, columns)
            bag = (self.ids_of(entry, values), listed.lengths, listed.weights)
            counts[MISSING_ID, number] = np.count_nonzero(bag[1] == 0)
            counts[RARE_ID, number] = np.count_nonzero(bag[0] == RARE_ID)
            if entry["ragged"]:
                bags[entry["name"]] = bag if entry["weighted"] else bag[:2]
            else:
                place = np.arange(len(bag[0])) - np.repeat(np.cumsum(bag[1]) - bag[1], bag[1])
                rows = np.repeat(np.arange(num_rows), bag[1])
                column = self.id_columns[entry["name"]]
                ids[rows, column + place] = bag[0]
                if column in self.crossed:  # only lists of one value can be crossed
                    keys[column] = np.full(num_rows, MISSING_KEY)
                    keys[column][rows] = _signed_keys(values, 0)
        return Encoded(ids, dense, bags, self.names, counts, keys, len(self._dense))

    def _check_finite(self, numbers: NDArray[np.float32], cells: Cells) -> None:
        """Raise RowError for the first infinite value of a column without clipping limits or
        buckets.
        """
        for row, column in np.argwhere(np.isinf(numbers)).tolist():
            entry = self._dense[column]
            if entry["clip"] is None and entry["bounds"] is None:
                value = float(cells.numbers[row, column])
                rule = "must be a finite number in the float32 range, such as 3"
                raise RowError(row, entry["name"], value, rule)

    def _finish(
        self, cells: Cells, ids: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Write the ids of single values, pairs, and buckets to ``ids``; return the dense values
        and the counts.
        """
        with np.errstate(over="ignore"):
            numbers = cells.numbers.astype(np.float32)
        self._check_finite(numbers, cells)
        mask = np.isnan(numbers)
        numbers = np.where(mask, np.float32(0), numbers)
        dense: list[Array] = []
        for number, entry in enumerate(self._dense):
            values, missing = numbers[:, number], mask[:, number]
            if entry["bounds"] is not None:
                place = self.id_columns[entry["name"]]
                inside = clipped(values, clip_of(entry))
                ids[:, place] = bucket_ids(inside, missing, entry["bounds"])
                continue
            dense.append(transform(entry["transform"], entry["clip"], values, missing, entry)[0])
            if entry["indicator"]:
                dense.append(missing.astype(np.float32))
        keyed = self._with_pairs(cells)
        table = self.vocabularies.look_up(
            self._places, Cells(numbers, *(part[:, self._looked_up] for part in keyed[1:]))
        )
        for column, number in enumerate(self._looked_up):
            ids[:, self.id_columns[self.keyed[number]["name"]]] = table[:, column]
        for number, entry in enumerate(self.keyed):
            if not entry["vocabulary"]:
                own = Cells(numbers, *(part[:, number, None] for part in keyed[1:]))
                ids[:, self.id_columns[entry["name"]]] = self.ids_of(entry, own)
        values = np.stack(dense, 1) if dense else np.empty((len(numbers), 0), dtype=np.float32)
        counts = np.zeros((2, len(self.names)), dtype=np.int64)
        counts[MISSING_ID, : len(self._dense)] = mask.sum(0)
        self._count(ids, counts)
        return values, counts

    def _count(self, ids: NDArray[np.int32], counts: Array) -> None:
        """Write the counts of single values and pairs to ``counts``."""
        own, first = ids[:, self.keyed_columns], len(self._dense)
        for value in (MISSING_ID, RARE_ID):
            counts[value, first : first + own.shape[1]] = (own == value).sum(0)

    def _with_pairs(self, cells: Cells) -> Cells:
        """Return ``cells`` with the keys of pairs appended to the keys of single values."""
        if not self.pairs:
            return cells
        keys, checks, missing = [cells.keys], [cells.checks], [cells.missing]
        for entry, (a, b) in zip(self.pairs, self.parts, strict=True):
            both = pair_keys(cells.keys[:, a], cells.keys[:, b], entry["both_hex"])
            keys.append(both[:, None])
            missing.append((cells.missing[:, a] | cells.missing[:, b])[:, None])
            checks.append(np.zeros((len(both), 1), dtype=np.uint32))
        joined = (np.concatenate(parts, 1) for parts in (keys, checks, missing))
        return Cells(cells.numbers, *joined)

    def _add_new(self, cells: Cells, ids: NDArray[np.int32]) -> None:
        keyed = self._with_pairs(cells)
        for number, entry in enumerate(self.keyed):
            if entry["vocabulary"]:
                column = ids[:, self.id_columns[entry["name"]]]
                keys, checks = keyed.keys[:, number], keyed.checks[:, number]
                self.vocabularies.add_new(entry["vocabulary"], column, keys, checks)

    def _crossed_keys(self, cells: Cells) -> dict[int, NDArray[np.int64]]:
        """Return ``Encoded.keys`` for single values and pairs."""
        if not self.crossed:
            return {}
        keyed = self._with_pairs(cells)
        return {
            column: _signed_keys(keyed, number)
            for number, entry in enumerate(self.keyed)
            if (column := self.id_columns[entry["name"]]) in self.crossed
        }

    def ids_of(self, entry: Entry, cells: Cells) -> NDArray[np.int32]:
        """Return the ids of one field (int32 [n]), whose keys are in column 0 of ``cells``."""
        if entry["vocabulary"]:
            places = self.vocabularies.places_of([entry["vocabulary"]])
            ids = self.vocabularies.look_up(places, cells)[:, 0]
            keys, checks = cells.keys[:, 0], cells.checks[:, 0]
            self.vocabularies.add_new(entry["vocabulary"], ids, keys, checks)
        else:
            ids = hashed_key_ids(cells.keys[:, 0], entry["rows"], entry["salt"])
            ids[cells.missing[:, 0]] = MISSING_ID
        return ids


def _list_cells(entry: Entry, columns: Mapping[str, Any]) -> tuple[Lists, Cells]:
    """Return the lists of a column, and the keys of all values in them."""
    listed = read_list(entry, columns)
    cells = Cells.empty(len(listed.values), 0, 1)
    _read_keys(listed.values, entry["name"], entry["kind"], *(part[:, 0] for part in cells[1:]))
    return listed, cells


def _signed_keys(cells: Cells, number: int) -> NDArray[np.int64]:
    """Return the keys of field ``number`` as signed integers ([n]), as in a prepared set."""
    keys = cells.keys[:, number].view(np.int64)
    return np.where(cells.missing[:, number], np.int64(MISSING_KEY), keys)


def _id_columns(fields: Sequence[Entry]) -> tuple[dict[str, int], int]:
    """Return the first id column of each field that is not ragged, and the number of id columns."""
    columns: dict[str, int] = {}
    width = 0
    for entry in fields:
        if not entry["ragged"]:
            columns[entry["name"]] = width
            width += entry["hot"]
    return columns, width


def _read_numbers(cells: Any, entry: Entry, out: NDArray[np.float64]) -> None:
    """Write the numbers of a dense column to ``out``, with NaN for missing cells; raise RowError
    for the first bad cell.
    """
    misfit = -1
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iufb":
        out[:] = np.ma.getdata(cells)
        out[np.ma.getmaskarray(cells)] = np.nan
        if entry["whole"]:
            fits = np.isnan(out) | ((out == np.floor(out)) & (np.abs(out + 0.5) < 2.0**31))
            misfit = -1 if fits.all() else int(fits.argmin())
    else:
        for row, raw in enumerate(cells):
            cell = plain(raw)
            try:
                if is_missing(cell):
                    out[row] = np.nan
                elif entry["whole"]:
                    out[row] = whole_number(cell)
                else:
                    out[row] = real_number(cell, entry["decimal"])
            except Misfit:
                misfit = row
                break
    if misfit >= 0:
        rule = "a 32-bit integer" if entry["whole"] else "a number"
        raise RowError(misfit, entry["name"], plain(cells[misfit]), f"must be {rule}, such as 3")


def _read_keys(
    cells: Any, name: str, kind: str, keys: Array, checks: Array, missing: Array
) -> None:
    """Write the keys, checks, and missing mask of a category column; raise RowError for the first
    bad cell.
    """
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iu" and kind == "integer":
        values = np.ma.getdata(cells)
        if values.dtype != np.uint64:
            missing[:] = np.ma.getmaskarray(cells)
            keys[:] = np.where(missing, 0, values.astype(np.int64).view(np.uint64))
            return
    masked = np.ma.getmaskarray(cells) if isinstance(cells, np.ma.MaskedArray) else None
    for row, raw in enumerate(cells):
        cell = plain(raw)
        if is_missing(cell) or (masked is not None and masked[row]):
            missing[row] = True
            continue
        try:
            keys[row], checks[row] = key_of(cell, kind)
        except Misfit as error:
            rule = f"must be {EXPECTED[kind]}, such as {EXAMPLES[kind]}"
            raise RowError(row, name, cell, rule) from error

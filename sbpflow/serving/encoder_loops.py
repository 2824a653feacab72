"""Encodes rows in single passes compiled by numba, where numpy would need dozens of calls.
``scorer`` imports this module only if numba is installed. Every loop produces the same results as
the functions in ``cells``, which also parse text that the loops do not support.
"""

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.runtime.compute.compiled import Array, compiled, prefetch
from sbpflow.runtime.random.splitmix import GAMMA
from sbpflow.serving.cells import FLOAT32_MAX, clip_of
from sbpflow.serving.columns import text_of
from sbpflow.serving.dense_loops import compile_model
from sbpflow.serving.encoder import Cells, Encoder
from sbpflow.serving.json_loops import JsonLines, count_lines
from sbpflow.serving.row_loops import gather_rows
from sbpflow.serving.text_loops import (
    HEX,
    INTEGER,
    POWERS,
    REAL,
    SKIPPED,
    STRING,
    WHOLE,
    parse_text,
)

__all__ = ["CompiledInput", "compile_model", "gather_rows"]
U8, U32, U64 = np.uint8, np.uint32, np.uint64
BUCKET, LOG3, LOG1, SQUARED_LOG, IDENTITY, STANDARDISE = range(6)
_TRANSFORMS = {"log3": LOG3, "log1": LOG1, "squared_log": SQUARED_LOG, "identity": IDENTITY,
               "standardise": STANDARDISE}  # fmt: skip
_KINDS = {"hex": HEX, "integer": INTEGER, "string": STRING}
_TAB = 9
_FACTOR, _MIX_1, _MIX_2 = U64(GAMMA), U64(0xFF51AFD7ED558CCD), U64(0xC4CEB9FE1A85EC53)
_NUMBERS, _TEXTS = frozenset((int, float, str, NoneType)), frozenset((str, NoneType))


@compiled
def transform_numbers(
    numbers: Array,
    codes: Array,
    clips: Array,
    fitted: Array,
    bounds: Array,
    ends: Array,
    places: Array,
    flags: Array,
    dense: Array,
    ids: Array,
    absences: Array,
) -> bool:
    """Write the transformed ``numbers`` [rows, columns] to ``dense`` and the ids of buckets to
    ``ids``; add the number of missing values of each column to ``absences``.

    ``flags`` [columns] contains each column's missing-value indicator column, or -1. Returns False
    if a number in a column without clipping limits or buckets is infinite in float32.
    """
    for row in range(numbers.shape[0]):
        for column in range(codes.size):
            code, place = codes[column], places[column]
            value = np.float32(numbers[row, column])
            absent = np.isnan(value)
            absences[column] += absent
            value = min(max(value, clips[0, column]), clips[1, column])  # unused if absent
            if code == BUCKET:
                first = 0 if column == 0 else ends[column - 1]
                bucket = np.searchsorted(bounds[first : ends[column]], value, side="right")
                ids[row, place] = 0 if absent else 2 + bucket
                continue
            out = np.float32(0)
            if not absent:
                if np.isinf(value):
                    return False
                if code == LOG3:
                    out = np.float32(np.log(np.float64(max(value, np.float32(-2)) + np.float32(3))))
                elif code == LOG1:
                    out = np.float32(np.log(np.float64(max(value, np.float32(0)) + np.float32(1))))
                elif code == SQUARED_LOG:
                    out = value
                    if value > 2:
                        log = np.log(np.float64(value))
                        out = np.float32(np.floor(log * log))
                elif code == IDENTITY:
                    out = value
                else:
                    even = (np.float64(value) - fitted[0, column]) / fitted[1, column]
                    out = np.float32(min(max(even, -FLOAT32_MAX), FLOAT32_MAX))
            dense[row, place] = out
            if flags[column] >= 0:
                dense[row, flags[column]] = np.float32(absent)
    return True


@compiled
def _key(keys: Array, parts: Array, row: int, number: int) -> Any:
    """Return the key of field ``number`` in a row; ``parts`` is as in ``look_up``."""
    left, right = parts[number, 0], parts[number, 1]
    key = keys[row, left]
    if right < 0:
        return key
    other = keys[row, right]
    if parts[number, 2]:
        return (key << U64(32)) | other
    return (key * _FACTOR) ^ (other + (key >> U64(29)))


@compiled
def _home_slot(key: int, size: int) -> Any:
    """Return the first slot to search for a key in a vocabulary of ``size`` slots."""
    return np.int64((((key * _FACTOR) >> U64(32)) * U64(size)) >> U64(32))


@compiled
def _prefetch_slots(
    keys: Array, parts: Array, where: Array, words: Array, slot_ids: Array, row: int
) -> None:
    """Start loading the slots of the vocabularies that ``look_up`` reads for a row."""
    for number in range(parts.shape[0]):
        start = where[number, 0]
        if start >= 0:
            slot = start + _home_slot(_key(keys, parts, row, number), where[number, 1])
            prefetch(words, slot)
            prefetch(slot_ids, slot)


@compiled
def look_up(
    keys: Array,
    checks: Array,
    missing: Array,
    parts: Array,
    where: Array,
    words: Array,
    slot_ids: Array,
    known_checks: Array,
    columns: Array,
    ids: Array,
    counts: Array,
) -> None:
    """Write the ids of single values and then of pairs to their ``columns`` of ``ids``; add the
    numbers of missing and unknown values to ``counts`` [2, fields].

    A row of ``parts`` [fields, 3] is (left, right, whether both are hex) for a pair, or (value, -1,
    0). A row of ``where`` [fields, 4] is (start, capacity, first check or -1, 0) of a vocabulary,
    or (-1, rows, 0, salt as int64) for a field without a vocabulary.
    """
    for row in range(ids.shape[0]):
        if row + 1 < ids.shape[0]:
            _prefetch_slots(keys, parts, where, words, slot_ids, row + 1)
        for number in range(columns.size):
            left, right = parts[number, 0], parts[number, 1]
            absent, check = missing[row, left], checks[row, left]
            if right >= 0:
                absent, check = absent or missing[row, right], U32(0)
            key = _key(keys, parts, row, number)
            start, size, first_check = where[number, 0], where[number, 1], where[number, 2]
            value_id = 0
            if absent:
                value_id = 0
            elif start < 0:
                mixed = key ^ U64(where[number, 3])
                mixed = (mixed ^ (mixed >> U64(33))) * _MIX_1
                mixed = (mixed ^ (mixed >> U64(33))) * _MIX_2
                mixed ^= mixed >> U64(33)
                value_id = np.int64(mixed % U64(size - 2)) + 2
            else:
                slot = _home_slot(key, size)
                while words[start + slot] != key and slot_ids[start + slot] != 1:
                    slot += 1
                    if slot == size:
                        slot = 0
                value_id = np.int64(slot_ids[start + slot])
                if first_check >= 0 and known_checks[first_check + value_id] != check:
                    value_id = 1
            ids[row, columns[number]] = value_id
            if value_id < 2:
                counts[value_id, number] += 1


@compiled
def encode_cells(
    cells: tuple[Array, Array, Array, Array],
    numeric: tuple[Array, Array, Array, Array, Array, Array, Array],
    keyed: tuple[Array, Array, Array, Array, Array, Array],
    dense: Array,
    ids: Array,
    counts: Array,
) -> bool:
    """Write the dense values and the ids of ``cells``, and the counts of missing and unknown
    values, in one call.

    ``numeric`` and ``keyed`` are the constant arguments of ``transform_numbers`` and ``look_up``.
    Returns the result of ``transform_numbers``.
    """
    numbers, keys, checks, missing = cells
    num_dense = numbers.shape[1]
    look_up(keys, checks, missing, *keyed, ids, counts[:, num_dense:])
    return transform_numbers(numbers, *numeric, dense, ids, counts[0])


class CompiledInput:
    """Describes an encoder's columns as arrays, and encodes rows with the compiled loops."""

    def __init__(self, encoder: Encoder) -> None:
        content, singles = encoder.content, encoder.singles
        self._kinds: dict[str, tuple[int, int]] = {
            entry["name"]: (WHOLE if entry["whole"] else REAL, n)
            for n, entry in enumerate(content["dense"])
        }
        self._kinds |= {e["name"]: (_KINDS[e["kind"]], n) for n, e in enumerate(singles)}
        self._commas = {e["name"] for e in content["dense"] if e["decimal"] != "."}
        self._parses = not self._commas and not encoder.lists and not encoder.raw.missing_values
        self._num_dense, self._num_keys = len(content["dense"]), len(singles)
        self._num_names = len(encoder.names)
        self._set_numbers(content["dense"], encoder.id_columns)
        parts = [(n, -1, 0) for n in range(len(singles))]
        pairs = zip(encoder.parts, encoder.pairs, strict=True)
        parts += [(left, right, int(pair["both_hex"])) for (left, right), pair in pairs]
        vocabularies = encoder.vocabularies
        where: list[tuple[int, ...]] = []
        for entry in encoder.keyed:
            if entry["vocabulary"]:
                start, size, check = vocabularies.places_of([entry["vocabulary"]])[:, 0].tolist()
                where.append((start, size, check, 0))
            else:
                salt = int(np.uint64(entry["salt"]).view(np.int64))
                where.append((-1, entry["rows"], 0, salt))
        self._keyed = (
            np.array(parts, dtype=np.int64).reshape(-1, 3),
            np.array(where, dtype=np.int64).reshape(-1, 4),
            vocabularies.keys,
            vocabularies.ids,
            vocabularies.checks,
            np.array(encoder.keyed_columns, dtype=np.int64),
        )
        self._lines: dict[int, tuple[Array, Array]] = {}
        self._raw = encoder.raw
        self._json = JsonLines(self._raw.required, (HEX, STRING))

    def _set_numbers(self, dense: Sequence[Mapping[str, Any]], columns: Mapping[str, int]) -> None:
        codes: list[int] = []
        places: list[int] = []
        flags: list[int] = []
        width = 0
        for entry in dense:
            is_bucket = entry["bounds"] is not None
            codes.append(BUCKET if is_bucket else _TRANSFORMS[entry["transform"]])
            places.append(columns[entry["name"]] if is_bucket else width)
            width += not is_bucket
            flags.append(width if entry["indicator"] else -1)
            width += entry["indicator"]
        self.width = width
        clips = [clip_of(entry) or (-np.inf, np.inf) for entry in dense]
        fitted = [(entry["mean"] or 0.0, entry["std"] or 1.0) for entry in dense]
        bounds = [entry["bounds"] or [] for entry in dense]
        self._numeric = (
            np.array(codes, dtype=np.int64),
            np.array(clips, dtype=np.float32).reshape(-1, 2).T.copy(),
            np.array(fitted).reshape(-1, 2).T.copy(),
            np.array([each for own in bounds for each in own], dtype=np.float32),
            np.cumsum([len(own) for own in bounds], dtype=np.int64),
            np.array(places, dtype=np.int64),
            np.array(flags, dtype=np.int64),
        )

    def parse(self, rows: Any) -> Cells | None:
        """Return the cells of text lines, or None for other rows and text that the loops do not
        parse.
        """
        if not self._parses or not len(rows):
            return None
        if not isinstance(rows, str | bytes):
            if not isinstance(rows, list | tuple) or not isinstance(rows[0], str | bytes):
                return None
            rows = text_of(rows, self._raw.header)
        try:
            text = rows.encode() if isinstance(rows, str) else rows
        except UnicodeEncodeError:
            return None
        raw = self._raw
        if b"\r" in text or (raw.quote is not None and raw.quote.encode() in text):
            return None
        if not text.isascii() and isinstance(rows, bytes):
            text_of(rows, raw.header)  # raises RowError for text that is not UTF-8
        text = text if text.endswith(b"\n") else text + b"\n"
        first = text[: text.index(b"\n")]
        if raw.header:
            names, text = first.decode().split(raw.separator), text[len(first) + 1 :]
            raw.check_header(names)
            kinds, targets = self._targets(names)
        else:
            names = raw.file_columns(first.count(raw.separator.encode()) + 1)
            if len(names) not in self._lines:
                self._lines[len(names)] = self._targets(names)
            kinds, targets = self._lines[len(names)]
        if len(kinds) != first.count(raw.separator.encode()) + 1 or len(kinds) == 1:
            return None
        return self._parse_lines(
            text, count_lines(np.frombuffer(text, dtype=U8)), raw.separator, kinds, targets
        )

    def _parse_lines(
        self, text: bytes | Array, num_rows: int, separator: str, kinds: Array, targets: Array
    ) -> Cells | None:
        cells = Cells.empty(num_rows, self._num_dense, self._num_keys)
        array = np.frombuffer(text, dtype=U8)
        fits = parse_text(array, ord(separator), kinds, targets, POWERS, *cells)
        return cells if fits else None

    def read_lists(self, columns: Mapping[str, Any], cells: Cells) -> set[str]:
        """Write the cells of those columns that are lists of text or numbers to ``cells``; return
        the names of these columns, or an empty set if a cell has a format that the loops do not
        parse.

        The cells are formatted as text lines and parsed, which is faster than a Python call per
        cell.
        """
        names: list[str] = []
        lists: list[Sequence[str]] = []
        for name, (kind, _) in self._kinds.items():
            column = columns[name]
            if not isinstance(column, list) or name in self._commas:
                continue
            types = set(map(type, column))
            if not types <= (_TEXTS if kind in (HEX, STRING) else _NUMBERS):
                continue
            if NoneType in types:
                column = ["" if cell is None else cell for cell in column]
            names.append(name)
            lists.append(column if types == {str} else list(map(str, column)))
        if len(names) < 2 or not lists[0]:  # a line with a single empty cell would be blank
            return set()
        num_rows, num_tabs = len(lists[0]), len(lists[0]) * (len(names) - 1)
        try:
            text = ("\n".join(map("\t".join, zip(*lists, strict=True))) + "\n").encode()
        except UnicodeEncodeError:
            return set()
        if text.count(b"\n") != num_rows or text.count(b"\t") != num_tabs:
            return set()  # a cell contains a separator or a newline
        array, (kinds, targets) = np.frombuffer(text, dtype=U8), self._targets(names)
        if parse_text(array, _TAB, kinds, targets, POWERS, *cells):
            return set(names)
        for part in cells:  # cells that were parsed before the cell that the loops do not parse
            part[:] = 0
        return set()

    def parse_json(self, text: bytes) -> Cells | None:
        """Return the cells of a JSON list of objects, or None for other JSON or invalid rows."""
        lines = self._json.lines(text, self._targets) if self._parses else None
        if lines is None:
            return None
        kinds, targets = lines.columns
        return self._parse_lines(lines.text, lines.num_rows, "\t", kinds, targets)

    def _targets(self, names: Sequence[str]) -> tuple[Array, Array]:
        cells = [self._kinds.get(name, (SKIPPED, 0)) for name in names]
        kinds, targets = zip(*cells, strict=True)
        return np.array(kinds, dtype=np.int64), np.array(targets, dtype=np.int64)

    def finish(self, cells: Cells, ids: NDArray[np.int32]) -> tuple[Array, Array] | None:
        """Write the ids of single values, pairs, and buckets to ``ids``; return the dense values
        and the counts, or None if ``transform_numbers`` returns False.
        """
        dense = np.empty((len(ids), self.width), dtype=np.float32)
        counts = np.zeros((2, self._num_names), dtype=np.int64)
        outputs = dense, ids, counts
        parts = cells.numbers, cells.keys, cells.checks, cells.missing
        if encode_cells(parts, self._numeric, self._keyed, *outputs):
            return dense, counts
        return None

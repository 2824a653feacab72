"""Make a few raw rows in the format of a set, and encode them as ``sbpflow encode`` does. A bundle
stores these rows with their scores, so that its scorer can check itself. The rows contain known,
unknown, and missing values. Known values come from the vocabularies, not from input rows.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sbpflow.data.bundle_input import Growing
from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import Kind, Schema, TimeKind
from sbpflow.data.format.vocabulary import Vocabulary, open_vocabularies
from sbpflow.data.prepare.cells import time_text
from sbpflow.data.prepare.content import like_options
from sbpflow.data.prepare.new_rows import encode
from sbpflow.data.values import decoded
from sbpflow.serving.cells import MISSING_KEY

NUM_ROWS = 6
_NUMBERS = {True: ("3", "0", "", "120", "-1", " +7"), False: ("1.5", "0", "", "1e2", "-.25", "nan")}
_UNKNOWN = {"hex": "00000001", "integer": "-987654321", "string": "an unknown value"}
_TIME = datetime(2024, 1, 31, tzinfo=UTC)
_KEY = "00000010"
"""A value of all kinds, because a group or row key column can also be a feature of another kind"""


def sample_rows(manifest: Manifest, growing: Growing) -> list[dict[str, Any]]:
    """Return rows with all columns that ``encode`` needs; cells are strings or lists of strings."""
    options = like_options(manifest)
    schema, known = options.schema, open_vocabularies(manifest)
    saved = {field: keys for keys in growing.values() for field in keys.fields}
    values: dict[str, list[str]] = {}
    for number, name in enumerate(schema.sparse):
        vocabulary = known.get(name)
        if name in saved:
            keys = saved[name].read()
            keys, none = keys[keys != MISSING_KEY].view(np.uint64), np.empty(0, np.int32)
            vocabulary = Vocabulary(name, 0, keys, ids=none, counts=none.astype(np.int64))
        values[name] = _values(schema.kind(name), vocabulary, number)
    side = dict.fromkeys(schema.shareable, _KEY)
    if schema.time:
        side[schema.time[0]] = _time(schema.time[1])
    rows: list[dict[str, Any]] = []
    for number in range(NUM_ROWS):
        row: dict[str, Any] = {} if schema.weight is None else {schema.weight: "1"}
        for place, name in enumerate(schema.dense):
            column = schema.dense_column(name)
            cell = _NUMBERS[column.whole][(number + place) % NUM_ROWS]
            row[name] = cell.replace(".", column.decimal)
        for name in schema.sparse:
            row |= _cells(schema, name, values[name], number)
        rows.append(row | side)
    return rows


def _time(kind: TimeKind) -> str:
    if kind == "integer":
        return _KEY
    return time_text(_TIME, "%Y-%m-%d" if kind == "date" else kind)


def _values(kind: Kind, vocabulary: Vocabulary | None, number: int) -> list[str]:
    """Return some known values from all parts of the vocabulary (strings only if they are stored),
    an unknown value, and a missing value, as strings.
    """
    texts: list[str] = []
    if vocabulary is not None and (kind != "string" or vocabulary.string_ends is not None):
        count = len(vocabulary.keys)
        places = np.arange(1, 5) * (number + 7) * count // 37 % max(count, 1)
        # An empty vocabulary has no values to show, so the slice removes place 0.
        texts = list(map(str, decoded(vocabulary, kind, np.unique(places)[:count])))
    return [*texts, _UNKNOWN[kind], ""]


def _cells(schema: Schema, name: str, values: list[str], number: int) -> dict[str, Any]:
    """Return the cell of a sparse column in row ``number`` and, if weights are in another column,
    the cell of that column.
    """
    column = schema.list_column(name)
    if column is None:
        return {name: values[number % len(values)]}
    count = min(number % 4, column.most)
    chosen = [values[(number + place) % len(values)] for place in range(count)]
    chosen = [] if chosen == [""] else chosen
    weights = [f"0.{place + 1}" for place in range(len(chosen))]
    if column.inline is not None:
        pairs = zip(chosen, weights, strict=True)
        return {name: [f"{value}{column.inline}{weight}" for value, weight in pairs]}
    return {name: chosen} | ({column.weights: weights} if column.weights else {})


def encode_sample(rows: Sequence[Mapping[str, Any]], manifest: Manifest, folder: Path) -> Manifest:
    """Encode the rows, as ``sbpflow encode`` does, into a set in ``folder``."""
    pl.DataFrame(list(rows), infer_schema_length=None).write_ipc(folder / "sample.arrow")
    return encode(
        [folder / "sample.arrow"],
        folder / "sample",
        like=manifest.origin,
        workers=1,
        max_bad_fraction=0.0,
    )

"""Encode staged pieces: transform dense values, look up keys, and write each split's shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.engine import Cached, Engine
from sbpflow.data.format.ids import Keys
from sbpflow.data.format.parts import LENGTH_TYPES, Parts, starts_of
from sbpflow.data.format.schema import CHECK, GROUP, ROW_KEY, SPLIT_COLUMN, TIME, DenseColumn
from sbpflow.data.format.shards import Words, write_splits
from sbpflow.data.format.vocabulary import Vocabulary
from sbpflow.data.prepare.bad_rows import StagedPiece
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.stage import ENCODED_KEYS, encoded_record, list_file, staged_files
from sbpflow.data.prepare.vocabulary_filter import FilteredVocabulary
from sbpflow.data.prepare.workspace import read_record, write_record
from sbpflow.serving.cells import (
    MISSING_ID,
    MISSING_KEY,
    RARE_ID,
    bucket_ids,
    clipped,
    hash_salt,
    hashed_key_ids,
    transform,
)

Record = dict[str, Any]


class FieldIds:
    """Maps the staged keys of a field to ids with the function ``look_up``; ids of int64 are keys.
    For strings of a vocabulary, the check must match, too.
    """

    def __init__(
        self, look_up: Callable[[Keys], "NDArray[Any]"], vocabulary: Vocabulary | None = None
    ) -> None:
        self._look_up = look_up
        self._checks: NDArray[np.uint32] | None = None
        if vocabulary is not None and vocabulary.checks is not None:
            self._checks = np.zeros(vocabulary.num_rows, dtype=np.uint32)
            self._checks[vocabulary.ids] = vocabulary.checks

    def lookup(
        self, keys: Keys, missing: NDArray[np.bool_] | None, checks: NDArray[np.uint32] | None
    ) -> "NDArray[Any]":
        """Return the ids [n] of ``keys`` [n], with the missing id or key where ``missing`` is
        True.
        """
        ids = self._look_up(keys)
        if self._checks is not None and checks is not None:
            np.copyto(ids, np.int32(RARE_ID), where=self._checks[ids] != checks)
        if missing is not None:
            np.copyto(ids, _missing(ids), where=missing)
        return ids


def raw_keys(keys: Keys) -> NDArray[np.int64]:
    """Return the bits of ``keys`` [n] as int64 [n]."""
    return keys.astype(np.uint64).view(np.int64)


def _missing(ids: "NDArray[Any]") -> int:
    return MISSING_KEY if ids.dtype == np.int64 else MISSING_ID


@dataclass(frozen=True)
class Encoding:
    """Settings that all pieces share. ``work`` and ``plan`` determine the vocabularies and
    options.
    """

    work: Path
    plan: str
    num_rows: int
    """Number of rows in all pieces"""
    vocabularies: Mapping[str, FilteredVocabulary] = field(compare=False)
    fitted: Mapping[str, Any] = field(compare=False)
    options: PrepareOptions = field(compare=False)


def tables_of(encoding: Encoding) -> dict[str, FieldIds]:
    """Return, by field, the table that maps staged keys to the ids or keys in the set."""
    options = encoding.options
    tables = dict.fromkeys(options.keys, FieldIds(raw_keys))
    for name, fields in options.counted.items():
        vocabulary = encoding.vocabularies[name].vocabulary()
        tables |= dict.fromkeys(fields, FieldIds(vocabulary.table().lookup, vocabulary))
    for name, num_rows in options.hash_sizes:
        salt = hash_salt(options.seed, options.schema.vocabulary(name))
        tables[name] = FieldIds(partial(hashed_key_ids, num_rows=num_rows, salt=salt))
    return tables


cached_tables = Cached(tables_of)
"""The tables of the current run, cached because building them takes seconds in each process"""


@dataclass(frozen=True, slots=True)
class _Job:
    index: int
    path: Path
    start: int
    """Number of rows in earlier pieces"""


def encode_all(
    staged: Sequence[StagedPiece],
    encoding: Encoding,
    engine: Engine,
    advance: Callable[[int], object],
) -> list[Record]:
    """Write the shards of all pieces to ``work/set``; return the records of the pieces.

    A piece is complete once its record exists; its staged files are then removed.
    """
    folder = encoding.work / "set"
    folder.mkdir(exist_ok=True)
    starts = accumulate((piece.num_rows for piece in staged), initial=0)
    jobs = [
        _Job(k, p.path, start) for k, (p, start) in enumerate(zip(staged, starts, strict=False))
    ]
    records: list[Record] = []
    try:
        for piece, record in zip(
            staged, engine.run(partial(_encode, encoding=encoding), jobs), strict=True
        ):
            records.append(record)
            advance(piece.num_rows)
    finally:
        cached_tables.clear()
    return records


def _encode(job: _Job, *, encoding: Encoding) -> Record:
    path, options = encoded_record(job.path), encoding.options
    record = read_record(path, ENCODED_KEYS)
    if record is None:
        piece = _PieceEncoder(job.path, cached_tables(encoding), encoding.fitted, options)
        split, folder = piece.splits(job.start, encoding.num_rows), encoding.work / "set"
        record = {
            "shards": write_splits(folder, job.index, piece.words, piece.parts, split),
            "clamped": piece.clamped,
            "rare": piece.rare,
            "ranges": piece.ranges,
        }
        write_record(path, record)
    for file in staged_files(job.path, options):
        file.unlink(missing_ok=True)
    return record


class _PieceEncoder:
    """Encodes a staged piece as words and parts, and counts values for the manifest."""

    def __init__(
        self,
        path: Path,
        tables: Mapping[str, FieldIds],
        fitted: Mapping[str, Any],
        options: PrepareOptions,
    ) -> None:
        self._tables, self._fitted, self._options = tables, fitted, options
        self._frame = pl.scan_ipc(path, glob=False).collect()
        names = (column.name for column in options.schema.many)
        self._lists = {
            name: pl.scan_ipc(list_file(path, name), glob=False).collect() for name in names
        }
        self.clamped: dict[str, int] = {}
        self.rare: dict[str, int] = {}
        """Number of lookups of values that are rare in train, or do not occur in it, by field"""
        self.ranges: dict[str, tuple[float, float]] = {}
        """Smallest and largest value of each dense column"""
        self._keys: list[NDArray[np.int64]] = []
        self.words: Words = self._words()
        keys: Parts = {"keys": np.stack(self._keys, axis=1)} if self._keys else {}
        self.parts: Parts = {**keys, **self._list_parts(), **self._side_parts()}

    def splits(self, start: int, total: int) -> NDArray[np.uint8]:
        """Return each row's split (uint8 [rows]).

        The input has ``total`` rows, ``start`` of them before this piece.
        """
        if self._options.split.kind != "time":
            return self._frame[SPLIT_COLUMN].to_numpy()
        rows = np.arange(start, start + len(self._frame))
        bounds = self._options.split.bounds(total)
        return np.searchsorted(bounds, rows, side="right").astype(np.uint8)

    def _words(self) -> Words:
        frame, options, schema = self._frame, self._options, self._options.schema
        has_label = schema.label in frame.columns
        labels = frame[schema.label].to_numpy() if has_label else np.full(len(frame), np.nan)
        columns = [labels.astype(np.float32).view(np.int32)]
        # All columns are selected in one call, because each Polars call costs a round trip to its
        # threads.
        single = [n for n in options.fields if n in self._tables and n not in self._lists]
        checked = [n + CHECK for n in single if n + CHECK in frame.columns]
        cells = frame.select(needed := [*schema.dense, *single, *checked])
        full, missing = cells.fill_null(0), cells.select(pl.all().is_null())
        has_missing = {name for name in needed if frame[name].null_count()}
        buckets: dict[str, NDArray[np.int32]] = {}
        for column in options.numbers:
            values = full[column.name].to_numpy().astype(np.float32)
            mask = missing[column.name].to_numpy()
            if column.buckets:
                buckets[column.name] = self._bucket_ids(column, values, mask)
            else:
                columns += self._dense_columns(column, values, mask)
        for name in options.fields:
            list_column = schema.list_column(name)
            out: list[Any] = self._keys if name in options.keys else columns
            if name in buckets:
                out.append(buckets[name])
            elif list_column is None:
                mask = missing[name].to_numpy() if name in has_missing else None
                checks = full[name + CHECK].to_numpy() if name + CHECK in full.columns else None
                out.append(self._ids(name, full[name].to_numpy(), mask, checks))
            elif list_column.fixed:
                out += _matrix(
                    self._lists[name], self._list_ids(name), len(frame), list_column.most
                )
        by_place = {str(place): array for place, array in enumerate(columns)}
        return pl.DataFrame(by_place).to_numpy(order="c")

    def _bucket_ids(
        self, column: DenseColumn, values: NDArray[np.float32], mask: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        fitted = self._fitted[column.name]
        inside = clipped(values, column.clip if fitted.get("clips") else None)
        self.clamped[column.name] = int(np.count_nonzero((inside != values) & ~mask))
        return bucket_ids(inside, mask, fitted["bounds"])

    def _dense_columns(
        self, column: DenseColumn, values: NDArray[np.float32], mask: NDArray[np.bool_]
    ) -> list[NDArray[np.int32]]:
        """Return the transformed column and, if the schema asks for one, its missing-value
        indicator.
        """
        name, constants = column.name, self._fitted.get(column.name, {})
        floats, self.clamped[name] = transform(
            column.transform or "identity", column.clip, values, mask, constants
        )
        arrays = {name: floats}
        if column.indicator:
            arrays[f"{name}_missing"] = mask.astype(np.float32)
        for array_name, array in arrays.items():
            if len(array):
                self.ranges[array_name] = (float(array.min()), float(array.max()))
        return [array.view(np.int32) for array in arrays.values()]

    def _ids(
        self,
        name: str,
        keys: Keys,
        missing: NDArray[np.bool_] | None,
        checks: NDArray[np.uint32] | None,
    ) -> "NDArray[Any]":
        ids = self._tables[name].lookup(keys, missing, checks)
        if name not in self._options.keys:
            self.rare[name] = int(np.count_nonzero(ids == RARE_ID))
        return ids

    def _list_ids(self, name: str) -> "NDArray[Any]":
        values = self._lists[name]
        checks = values["check"].fill_null(0).to_numpy() if "check" in values.columns else None
        missing = values["key"].is_null().to_numpy()
        return self._ids(name, values["key"].fill_null(0).to_numpy(), missing, checks)

    def _list_parts(self) -> Parts:
        """Return the lengths, starts, values and weights of ragged fields. Values are ordered by
        row and then by field.
        """
        schema = self._options.schema
        ragged = {column.name for column in schema.many if not column.fixed}
        names = [name for name in self._options.fields if name in ragged]
        if not names:
            return {}
        columns = [self._frame[name].to_numpy().astype(np.int64) for name in names]
        lengths = np.stack(columns, axis=1)
        flat = lengths.reshape(-1)
        begin = (np.cumsum(flat) - flat).reshape(lengths.shape)
        dtype = np.int64 if set(names) & set(self._options.keys) else np.int32
        values = np.empty(int(flat.sum()), dtype=dtype)
        weights = np.ones(len(values), dtype=np.float32)
        for number, name in enumerate(names):
            table, own = self._lists[name], lengths[:, number]
            # Each frame contains the values of one field; the result interleaves the values of all
            # fields.
            shift = begin[:, number] - (np.cumsum(own) - own)
            place = np.arange(len(table)) + np.repeat(shift, own)
            values[place] = self._list_ids(name)
            if "weight" in table.columns:
                weights[place] = table["weight"].to_numpy()
        parts: Parts = {
            "lengths": lengths.astype(length_type(self._options)),
            "starts": starts_of(lengths),
            "values": values,
        }
        return (
            {**parts, "value_weights": weights} if any(c.weighted for c in schema.many) else parts
        )

    def _side_parts(self) -> Parts:
        """Return the non-feature columns as arrays, which are stored next to the shard."""
        frame, schema = self._frame, self._options.schema
        parts: Parts = {}
        if names := [name for name in schema.labels if name in frame.columns]:
            labels = frame.select(pl.col(names).fill_null(float("nan"))).to_numpy()
            parts["labels"] = labels.astype(np.float32)
        if schema.weight:
            mean = self._fitted[schema.weight]["mean"]
            scaled = frame[schema.weight].to_numpy().astype(np.float64) / mean
            parts["weight"] = scaled.astype(np.float32)
        if schema.group:
            parts["group"] = frame[GROUP].to_numpy()
        if schema.time:
            parts["time"] = frame[TIME].to_numpy()
        if schema.row_key:
            keys = frame[ROW_KEY]
            if schema.row_key[1] == "integer":
                parts["row_key"] = keys.to_numpy()
            elif schema.row_key[1] == "string":
                parts["row_key_ends"] = np.cumsum(keys.str.len_bytes().to_numpy().astype(np.int64))
                text = "".join(keys.to_list()).encode()
                parts["row_key_bytes"] = np.frombuffer(text, dtype=np.uint8)
            else:
                raise ValueError(
                    f"the kind of row_key must be integer or string, got {schema.row_key[1]!r}"
                )
        return parts


def _matrix(
    values: pl.DataFrame, ids: "NDArray[Any]", num_rows: int, width: int
) -> "list[NDArray[Any]]":
    """Return the ids or keys of a list column with a fixed number of ids, as ``width`` columns
    ([num_rows] each). Shorter lists are padded with the missing id or key.
    """
    rows = values["row"].to_numpy()
    lengths = np.bincount(rows, minlength=num_rows)
    place = np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
    matrix = np.full((num_rows, width), _missing(ids), dtype=ids.dtype)
    matrix[rows, place] = ids
    return list(matrix.T)


def length_type(options: PrepareOptions) -> str:
    """Return the dtype of list lengths: uint8 if no list can have more than 255 values, and
    otherwise uint16.
    """
    most = max((column.most for column in options.schema.many if not column.fixed), default=0)
    return LENGTH_TYPES[most > np.iinfo(np.uint8).max]

"""Staged pieces to shards: transform dense values, look up keys, deal rows to their splits."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.ids import Ids, Keys
from sbpflow.data.format.manifest import SPLITS, shard_entry
from sbpflow.data.format.parts import LENGTH_TYPES, Parts, chosen_parts, starts_of
from sbpflow.data.format.schema import CHECK, MISSING_ID, RARE_ID, SPLIT_COLUMN, DenseColumn
from sbpflow.data.format.shards import Words, write_shard
from sbpflow.data.format.vocabulary import Vocabulary
from sbpflow.data.prepare.bad_rows import StagedPiece
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.stage import ENCODED_KEYS, encoded_record, list_file, staged_files
from sbpflow.data.prepare.transforms import bucket_ids, transform
from sbpflow.data.prepare.workspace import read_record, require_record, write_record

Record = dict[str, Any]


class FieldIds:
    """Maps the staged keys of a field to ids. Strings must also match the check of their key."""

    def __init__(self, table: Ids, vocabulary: Vocabulary | None = None) -> None:
        self._table = table
        self._checks: NDArray[np.uint32] | None = None
        if vocabulary is not None and vocabulary.checks is not None:
            self._checks = np.zeros(vocabulary.num_rows, dtype=np.uint32)
            self._checks[vocabulary.ids] = vocabulary.checks

    def lookup(
        self, keys: Keys, missing: NDArray[np.bool_] | None, checks: NDArray[np.uint32] | None
    ) -> NDArray[np.int32]:
        """Ids int32 [n] of ``keys`` uint64 [n]; MISSING_ID where ``missing`` (None: nowhere)."""
        ids = self._table.lookup(keys)
        if self._checks is not None and checks is not None:
            np.copyto(ids, np.int32(RARE_ID), where=self._checks[ids] != checks)
        if missing is not None:
            np.copyto(ids, np.int32(MISSING_ID), where=missing)
        return ids


@dataclass
class Encoded:
    """The rows of a piece as they are written, with counts."""

    words: Words
    parts: Parts
    clamped: dict[str, int] = field(default_factory=dict)
    rare: dict[str, int] = field(default_factory=dict)
    """Lookups of values that are rare or not in the train part, by field."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of each dense column."""


def encode_all(
    staged: Sequence[StagedPiece],
    tables: Mapping[str, FieldIds],
    fitted: Mapping[str, Any],
    options: PrepareOptions,
    work: Path,
    advance: Callable[[int], None],
) -> list[Record]:
    """Write the shards of this machine's pieces into ``work/set``; return a record of each.

    A piece is done once its record exists; its staged files are then removed.
    """
    (work / "set").mkdir(exist_ok=True)
    starts = list(accumulate((piece.num_rows for piece in staged), initial=0))

    def job(index: int) -> Record:
        path = encoded_record(staged[index].path)
        record = read_record(path, ENCODED_KEYS)
        if record is None:
            encoded, split = _encode_piece(
                staged[index].path, (starts[index], starts[-1]), tables, fitted, options
            )
            record = {
                "shards": write_splits(work / "set", index, encoded, split),
                "clamped": encoded.clamped,
                "rare": encoded.rare,
                "ranges": encoded.ranges,
            }
            write_record(path, record)
        for file in staged_files(staged[index].path, options):
            file.unlink(missing_ok=True)
        return record

    records: list[Record] = []
    mine = [k for k, piece in enumerate(staged) if piece.part == options.part.number]
    with ThreadPoolExecutor(options.workers) as pool:
        for index, record in zip(mine, pool.map(job, mine), strict=True):
            records.append(record)
            advance(staged[index].num_rows)
    return records


def all_records(staged: Sequence[StagedPiece]) -> list[Record]:
    """The records of all pieces, of every machine; DamagedWork if one is damaged."""
    return [require_record(encoded_record(piece.path), ENCODED_KEYS) for piece in staged]


def write_splits(folder: Path, index: int, encoded: Encoded, split: NDArray[np.uint8]) -> Record:
    """Write the rows of each split as a shard; return the manifest entries by split."""
    shards: Record = {}
    for number, name in enumerate(SPLITS):
        chosen = split == number
        if chosen.any():
            words, parts = encoded.words, encoded.parts
            if not chosen.all():
                words, parts = words[chosen], chosen_parts(parts, chosen)
            shards[name] = shard_entry(write_shard(folder, f"{name}-{index:06d}.npy", words, parts))
    return shards


def _encode_piece(
    path: Path,
    rows: tuple[int, int],
    tables: Mapping[str, FieldIds],
    fitted: Mapping[str, Any],
    options: PrepareOptions,
) -> tuple[Encoded, NDArray[np.uint8]]:
    frame = pl.read_ipc(path)
    lists = {c.name: pl.read_ipc(list_file(path, c.name)) for c in options.schema.many}
    encoded = encode_frame(frame, lists, tables, fitted, options)
    return encoded, _split_of(frame, *rows, options)


def encode_frame(
    frame: pl.DataFrame,
    lists: Mapping[str, pl.DataFrame],
    tables: Mapping[str, FieldIds],
    fitted: Mapping[str, Any],
    options: PrepareOptions,
) -> Encoded:
    """The words and parts of a staged piece."""
    schema = options.schema
    encoded = Encoded(np.empty((0, 0), dtype=np.int32), {})
    has_label = schema.label in frame.columns
    labels = frame[schema.label].to_numpy() if has_label else np.full(len(frame), np.nan)
    columns = [labels.astype(np.float32).view(np.int32)]
    buckets: dict[str, NDArray[np.int32]] = {}
    # Select all columns at once: each Polars call has the cost of a round trip to its threads.
    single = [n for n in options.fields if n in tables and not schema.list_column(n)]
    needed = [*schema.dense, *single, *(n + CHECK for n in single if n + CHECK in frame.columns)]
    cells = frame.select(needed)
    full, missing = cells.fill_null(0), cells.select(pl.all().is_null())
    has_missing = {name for name in needed if frame[name].null_count()}
    for column in options.numbers:
        values = full[column.name].to_numpy().astype(np.float32)
        mask = missing[column.name].to_numpy()
        if column.buckets:
            bounds = fitted[column.name]["bounds"]
            buckets[column.name] = bucket_ids(values, mask, bounds)
        else:
            _dense_columns(column, values, mask, fitted, encoded, columns)
    ragged: list[str] = []
    for name in options.fields:
        list_column = schema.list_column(name)
        if name in buckets:
            columns.append(buckets[name])
        elif list_column is None:
            mask = missing[name].to_numpy() if name in has_missing else None
            checks = full[name + CHECK].to_numpy() if name + CHECK in full.columns else None
            ids = tables[name].lookup(full[name].to_numpy(), mask, checks)
            columns.append(_counted(name, ids, encoded))
        elif list_column.fixed:
            ids = _ids_of(name, lists, tables, encoded)
            columns.extend(_matrix(lists[name], ids, len(frame), list_column.most).T)
        else:
            ragged.append(name)
    by_place = {str(place): array for place, array in enumerate(columns)}
    encoded.words = pl.DataFrame(by_place).to_numpy(order="c")
    if ragged:
        encoded.parts |= _list_parts(frame, ragged, lists, tables, options, encoded)
    encoded.parts |= _side_parts(frame, fitted, options)
    return encoded


def _dense_columns(
    column: DenseColumn,
    values: NDArray[np.float32],
    mask: NDArray[np.bool_],
    fitted: Mapping[str, Any],
    encoded: Encoded,
    columns: list[NDArray[np.int32]],
) -> None:
    """Append the transformed column, and the indicator of missing values if there is one."""
    name = column.name
    floats, encoded.clamped[name] = transform(
        column, column.transform or "identity", values, mask, fitted.get(name, {})
    )
    arrays = {name: floats}
    if column.indicator:
        arrays[f"{name}_missing"] = mask.astype(np.float32)
    for array_name, array in arrays.items():
        columns.append(array.view(np.int32))
        if len(array):
            encoded.ranges[array_name] = (float(array.min()), float(array.max()))


def _counted(name: str, ids: NDArray[np.int32], encoded: Encoded) -> NDArray[np.int32]:
    encoded.rare[name] = int(np.count_nonzero(ids == RARE_ID))
    return ids


def _ids_of(
    name: str,
    lists: Mapping[str, pl.DataFrame],
    tables: Mapping[str, FieldIds],
    encoded: Encoded,
) -> NDArray[np.int32]:
    values = lists[name]
    checks = values["check"].fill_null(0).to_numpy() if "check" in values.columns else None
    mask = values["key"].is_null().to_numpy()
    ids = tables[name].lookup(values["key"].fill_null(0).to_numpy(), mask, checks)
    return _counted(name, ids, encoded)


def _matrix(
    values: pl.DataFrame, ids: NDArray[np.int32], num_rows: int, width: int
) -> NDArray[np.int32]:
    """Ids int32 [num_rows, width]; MISSING_ID where a row has fewer values."""
    rows = values["row"].to_numpy()
    lengths = np.bincount(rows, minlength=num_rows)
    place = np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
    matrix = np.full((num_rows, width), MISSING_ID, dtype=np.int32)
    matrix[rows, place] = ids
    return matrix


def _list_parts(
    frame: pl.DataFrame,
    names: Sequence[str],
    lists: Mapping[str, pl.DataFrame],
    tables: Mapping[str, FieldIds],
    options: PrepareOptions,
    encoded: Encoded,
) -> Parts:
    """Lengths, starts, values and weights of the ragged fields, ordered by row, then field."""
    lengths = np.stack([frame[name].to_numpy().astype(np.int64) for name in names], axis=1)
    flat = lengths.reshape(-1)
    begin = (np.cumsum(flat) - flat).reshape(lengths.shape)
    total = int(flat.sum())
    values = np.empty(total, dtype=np.int32)
    weights = np.ones(total, dtype=np.float32)
    for number, name in enumerate(names):
        table, own = lists[name], lengths[:, number]
        shift = begin[:, number] - (np.cumsum(own) - own)
        place = np.arange(len(table)) + np.repeat(shift, own)
        values[place] = _ids_of(name, lists, tables, encoded)
        if "weight" in table.columns:
            weights[place] = table["weight"].to_numpy()
    parts: Parts = {
        "lengths": lengths.astype(length_type(options)),
        "starts": starts_of(lengths),
        "values": values,
    }
    if any(column.weighted for column in options.schema.many):
        parts["value_weights"] = weights
    return parts


def length_type(options: PrepareOptions) -> str:
    """The dtype of lengths: one byte if no row can have more than 255 values."""
    most = max((column.most for column in options.schema.many if not column.fixed), default=0)
    return LENGTH_TYPES[most > np.iinfo(np.uint8).max]


def _side_parts(frame: pl.DataFrame, fitted: Mapping[str, Any], options: PrepareOptions) -> Parts:
    """The columns that are not features, as arrays beside the shard."""
    schema, parts = options.schema, dict[str, "NDArray[Any]"]()
    if names := [name for name in schema.labels if name in frame.columns]:
        labels = frame.select(pl.col(names).fill_null(float("nan"))).to_numpy()
        parts["labels"] = labels.astype(np.float32)
    if schema.weight:
        mean = fitted[schema.weight]["mean"]
        scaled = frame[schema.weight].to_numpy().astype(np.float64) / mean
        parts["weight"] = scaled.astype(np.float32)
    if schema.group:
        parts["group"] = frame[schema.group[0]].to_numpy()
    if schema.time:
        parts["time"] = frame[schema.time[0]].to_numpy()
    if schema.row_key:
        keys = frame[schema.row_key[0]]
        if schema.row_key[1] == "integer":
            parts["row_key"] = keys.to_numpy()
        elif schema.row_key[1] == "string":
            parts["row_key_ends"] = np.cumsum(keys.str.len_bytes().to_numpy().astype(np.int64))
            text = "".join(keys.to_list()).encode()
            parts["row_key_bytes"] = np.frombuffer(text, dtype=np.uint8)
        else:
            raise ValueError(f"row_key: kind {schema.row_key[1]!r}; use integer or string")
    return parts


def _split_of(
    frame: pl.DataFrame, start: int, total: int, options: PrepareOptions
) -> NDArray[np.uint8]:
    if options.split.kind != "time":
        return frame[SPLIT_COLUMN].to_numpy()
    rows = np.arange(start, start + len(frame))
    return np.searchsorted(options.split.bounds(total), rows, side="right").astype(np.uint8)

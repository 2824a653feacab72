"""Staged pieces to shards: dense values transformed, keys looked up, rows dealt to their splits."""

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
from sbpflow.data.format.schema import CHECK, MISSING_ID, RARE_ID, SPLIT_COLUMN, Number
from sbpflow.data.format.shards import Words, write_shard
from sbpflow.data.format.vocabulary import Vocabulary
from sbpflow.data.prepare.bad_rows import Staged
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.stage import ENCODED_KEYS, encoded_record, list_file, staged_files
from sbpflow.data.prepare.transforms import bucket_ids, transform
from sbpflow.data.prepare.workspace import DamagedWork, read_record, write_record

Record = dict[str, Any]


class FieldIds:
    """From staged keys of a field to its ids; strings must have the further bits of their key."""

    def __init__(self, table: Ids, vocabulary: Vocabulary | None = None) -> None:
        self._table = table
        self._checks: NDArray[np.uint32] | None = None
        if vocabulary is not None and vocabulary.checks is not None:
            self._checks = np.zeros(vocabulary.num_rows, dtype=np.uint32)
            self._checks[vocabulary.ids] = vocabulary.checks

    def lookup(
        self, keys: Keys, missing: NDArray[np.bool_] | None, checks: NDArray[np.uint32] | None
    ) -> NDArray[np.int32]:
        """Ids [n]; MISSING_ID where ``missing``, if there are any."""
        ids = self._table.lookup(keys)
        if self._checks is not None and checks is not None:
            np.copyto(ids, np.int32(RARE_ID), where=self._checks[ids] != checks)
        if missing is not None:
            np.copyto(ids, np.int32(MISSING_ID), where=missing)
        return ids


@dataclass
class Encoded:
    """The rows of a piece as they are written, and what is counted on the way."""

    words: Words
    parts: Parts
    clamped: dict[str, int] = field(default_factory=dict)
    rare: dict[str, int] = field(default_factory=dict)
    """Lookups of values that are rare, or that the train part does not have, by field."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Least and greatest value of each dense column."""


def encode_all(
    staged: Sequence[Staged],
    tables: Mapping[str, FieldIds],
    fitted: Mapping[str, Any],
    options: PrepareOptions,
    work: Path,
    advance: Callable[[int], None],
) -> list[Record]:
    """Write the shards of this machine's pieces under ``work/set``; a record of each, with counts.

    A piece is done when its record is there; its staged files are then removed.
    """
    (work / "set").mkdir(exist_ok=True)
    starts = list(accumulate((piece.num_rows for piece in staged), initial=0))

    def job(index: int) -> Record:
        path = encoded_record(staged[index].path)
        done = read_record(path, ENCODED_KEYS)
        if done is None:
            encoded, split = _encode_piece(
                staged[index].path, (starts[index], starts[-1]), tables, fitted, options
            )
            shards = write_splits(work / "set", index, encoded, split)
            done = {
                "shards": shards,
                "clamped": encoded.clamped,
                "rare": encoded.rare,
                "ranges": encoded.ranges,
            }
            write_record(path, done)
        for file in staged_files(staged[index].path, options):
            file.unlink(missing_ok=True)
        return done

    records: list[Record] = []
    mine = [k for k, piece in enumerate(staged) if piece.part == options.part.number]
    with ThreadPoolExecutor(options.workers) as pool:
        for index, record in zip(mine, pool.map(job, mine), strict=True):
            records.append(record)
            advance(staged[index].num_rows)
    return records


def all_records(staged: Sequence[Staged]) -> list[Record]:
    """The records of all pieces, of every machine's; DamagedWork where one is not whole."""
    records = [read_record(encoded_record(piece.path), ENCODED_KEYS) for piece in staged]
    if None in records:
        path = encoded_record(staged[records.index(None)].path)
        raise DamagedWork(f"{path}: is not what was written there")
    return [record for record in records if record is not None]


def write_splits(folder: Path, index: int, encoded: Encoded, split: NDArray[np.uint8]) -> Record:
    """Write the rows of each split as a shard of its own."""
    shards: Record = {}
    for number, name in enumerate(SPLITS):
        here = split == number
        if here.any():
            words, parts = encoded.words, encoded.parts
            if not here.all():
                words, parts = words[here], chosen_parts(parts, here)
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
    lists = {many.name: pl.read_ipc(list_file(path, many.name)) for many in options.schema.many}
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
    if schema.label in frame.columns:
        columns = [_bits(frame[schema.label].to_numpy())]
    else:
        columns = [_bits(np.full(len(frame), np.nan))]
    buckets: dict[str, NDArray[np.int32]] = {}
    # All columns at once: a call of Polars goes through its own threads, and back.
    single = [name for name in options.fields if name in tables and not schema.several(name)]
    needed = [*schema.dense, *single, *(n + CHECK for n in single if n + CHECK in frame.columns)]
    cells = frame.select(needed)
    full, missing = cells.fill_null(0), cells.select(pl.all().is_null())
    has_missing = {name for name in needed if frame[name].null_count()}
    for number in options.numbers:
        values = full[number.name].to_numpy().astype(np.float32)
        mask = missing[number.name].to_numpy()
        if number.buckets:
            bounds = fitted[number.name]["bounds"]
            buckets[number.name] = bucket_ids(values, mask, bounds)
        else:
            _dense_columns(number, values, mask, fitted, encoded, columns)
    ragged: list[str] = []
    for name in options.fields:
        many = schema.several(name)
        if name in buckets:
            columns.append(buckets[name])
        elif many is None:
            mask = missing[name].to_numpy() if name in has_missing else None
            checks = full[name + CHECK].to_numpy() if name + CHECK in full.columns else None
            ids = tables[name].lookup(full[name].to_numpy(), mask, checks)
            columns.append(_counted(name, ids, encoded))
        elif many.fixed:
            ids = _ids_of(name, lists, tables, encoded)
            columns.extend(_matrix(lists[name], ids, len(frame), many.most).T)
        else:
            ragged.append(name)
    by_place = {str(place): column for place, column in enumerate(columns)}
    encoded.words = pl.DataFrame(by_place).to_numpy(order="c")
    if ragged:
        encoded.parts |= _list_parts(frame, ragged, lists, tables, options, encoded)
    encoded.parts |= _beside(frame, fitted, options)
    return encoded


def _dense_columns(
    number: Number,
    values: NDArray[np.float32],
    mask: NDArray[np.bool_],
    fitted: Mapping[str, Any],
    encoded: Encoded,
    columns: list[NDArray[np.int32]],
) -> None:
    """Append the column of a dense value, and the one that says where it is missing."""
    name = number.name
    made = transform(number, number.transform or "identity", values, mask, fitted.get(name, {}))
    floats, encoded.clamped[name] = made
    found = {name: floats}
    if number.indicator:
        found[f"{name}_missing"] = mask.astype(np.float32)
    for column, array in found.items():
        columns.append(array.view(np.int32))
        if len(array):
            encoded.ranges[column] = (float(array.min()), float(array.max()))


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
    """Ids [rows, width]; MISSING_ID where a row has fewer values."""
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
    """Lengths, starts, values and weights of the ragged fields, row by row, field by field."""
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
    if any(many.weighted for many in options.schema.many):
        parts["value_weights"] = weights
    return parts


def length_type(options: PrepareOptions) -> str:
    """The dtype of lengths: one byte where no row can have more than 255 values."""
    most = max((many.most for many in options.schema.many if not many.fixed), default=0)
    return LENGTH_TYPES[most > np.iinfo(np.uint8).max]


def _beside(frame: pl.DataFrame, fitted: Mapping[str, Any], options: PrepareOptions) -> Parts:
    """The columns that are no features."""
    schema, parts = options.schema, dict[str, "NDArray[Any]"]()
    if labels := [name for name in schema.labels if name in frame.columns]:
        found = frame.select(pl.col(labels).fill_null(float("nan"))).to_numpy()
        parts["labels"] = found.astype(np.float32)
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


def _bits(values: "NDArray[Any]") -> NDArray[np.int32]:
    return values.astype(np.float32).view(np.int32)


def _split_of(
    frame: pl.DataFrame, start: int, total: int, options: PrepareOptions
) -> NDArray[np.uint8]:
    if options.split.kind != "time":
        return frame[SPLIT_COLUMN].to_numpy()
    rows = np.arange(start, start + len(frame))
    return np.searchsorted(options.split.bounds(total), rows, side="right").astype(np.uint8)

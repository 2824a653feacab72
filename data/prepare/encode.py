"""Staged pieces to shards: dense values transformed, keys looked up, rows dealt to their splits."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from data.format.ids import Ids
from data.format.manifest import SPLITS, shard_entry
from data.format.schema import MISSING_ID, SPLIT_COLUMN
from data.format.shards import Words, write_shard
from data.prepare.options import PrepareOptions
from data.prepare.stage import ENCODED_KEYS, Staged, encoded_record
from data.prepare.transforms import TRANSFORMS
from data.prepare.workspace import read_record, write_record

Record = dict[str, Any]


def encode_all(
    staged: Sequence[Staged],
    tables: Mapping[str, Ids],
    options: PrepareOptions,
    work: Path,
    advance: Callable[[int], None],
) -> list[Record]:
    """Write the shards of every piece under ``work/set``; one record of shards and clamps each.

    A piece is done when its record is there; its staged file is then removed.
    """
    (work / "set").mkdir(exist_ok=True)
    starts = list(accumulate((piece.num_rows for piece in staged), initial=0))

    def job(index: int) -> Record:
        path = encoded_record(work, index)
        done = read_record(path, ENCODED_KEYS)
        if done is None:
            rows = (starts[index], starts[-1])
            done = _encode_piece(staged[index].path, index, rows, tables, options, work / "set")
            write_record(path, done)
        staged[index].path.unlink(missing_ok=True)
        return done

    records: list[Record] = []
    with ThreadPoolExecutor(options.workers) as pool:
        for index, record in enumerate(pool.map(job, range(len(staged)))):
            records.append(record)
            advance(staged[index].num_rows)
    return records


def _encode_piece(
    path: Path,
    index: int,
    rows: tuple[int, int],
    tables: Mapping[str, Ids],
    options: PrepareOptions,
    folder: Path,
) -> Record:
    frame = pl.read_ipc(path)
    words, clamped = encode_frame(frame, tables, options)
    split = _split_of(frame, *rows, options)
    shards: Record = {}
    for number, name in enumerate(SPLITS):
        here = split == number
        if here.any():
            part = words if here.all() else words[here]
            shards[name] = shard_entry(write_shard(folder, f"{name}-{index:06d}.npy", part))
    return {"shards": shards, "clamped": clamped}


def encode_frame(
    frame: pl.DataFrame, tables: Mapping[str, Ids], options: PrepareOptions
) -> tuple[Words, dict[str, int]]:
    """Words [rows, 1 + dense + fields] of a staged piece, and clamped values by dense column."""
    # All columns at once: a call of Polars goes through its own threads, and back.
    full, missing = frame.fill_null(0), frame.select(pl.all().is_null())
    columns = {options.schema.label: _bits(frame[options.schema.label].to_numpy())}
    clamped: dict[str, int] = {}
    for name in options.schema.dense:
        values = full[name].to_numpy().astype(np.float32)
        floats, clamped[name] = TRANSFORMS[options.transform](values, missing[name].to_numpy())
        columns[name] = floats.view(np.int32)
    for name, table in tables.items():
        ids = table.lookup(full[name].to_numpy())
        if frame[name].null_count():
            np.copyto(ids, np.int32(MISSING_ID), where=missing[name].to_numpy())
        columns[name] = ids
    return pl.DataFrame(columns).to_numpy(order="c"), clamped


def _bits(values: "NDArray[Any]") -> NDArray[np.int32]:
    return values.astype(np.float32).view(np.int32)


def _split_of(
    frame: pl.DataFrame, start: int, total: int, options: PrepareOptions
) -> NDArray[np.uint8]:
    if options.split.kind != "time":
        return frame[SPLIT_COLUMN].to_numpy()
    rows = np.arange(start, start + len(frame))
    return np.searchsorted(options.split.bounds(total), rows, side="right").astype(np.uint8)

"""Vocabularies: counts of the train part, which values are kept, and which id each gets."""

import os
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from data.format.ids import Counts, IdTable, Keys, NarrowIdTable, WideIdTable, assign_ids
from data.format.schema import MISSING_ID, NUM_RESERVED_IDS, RARE_ID, SPLIT_COLUMN
from data.prepare.options import PrepareOptions
from data.prepare.stage import Staged
from data.prepare.workspace import DamagedWork


@dataclass(frozen=True)
class Vocabulary:
    """The kept values of one field in key order, with lookups in the train part and ids."""

    name: str
    keys: Keys
    counts: Counts
    ids: NDArray[np.int32]
    missing: int
    rare: int
    rare_values: int

    @property
    def num_rows(self) -> int:
        """Rows of the embedding table."""
        return len(self.keys) + NUM_RESERVED_IDS

    def dropped(self) -> dict[str, int]:
        """What the manifest says of lookups without a value of their own."""
        return {
            "train_missing": self.missing,
            "train_rare": self.rare,
            "rare_values": self.rare_values,
        }

    def table(self) -> IdTable:
        """The lookup structure from keys to ids."""
        kind = NarrowIdTable if self.keys.dtype == np.uint32 else WideIdTable
        return kind(self.keys, self.ids, self.counts)

    def lookups(self) -> Counts:
        """Lookups per table row in the train part."""
        out = np.zeros(self.num_rows, dtype=np.int64)
        out[MISSING_ID], out[RARE_ID] = self.missing, self.rare
        out[self.ids] = self.counts
        return out


def train_rows(staged: Sequence[Staged], options: PrepareOptions) -> list[pl.LazyFrame]:
    """The train part of every piece, as one lazy frame each."""
    frames: list[pl.LazyFrame] = []
    left, _ = options.split.bounds(sum(piece.num_rows for piece in staged))
    for piece in staged:
        frame = pl.scan_ipc(piece.path)
        if options.split.kind == "time":
            frame, left = frame.head(max(left, 0)), left - piece.num_rows
        else:
            frame = frame.filter(pl.col(SPLIT_COLUMN) == 0)
        frames.append(frame)
    return frames


def build_vocabularies(
    staged: Sequence[Staged], names: Sequence[str], options: PrepareOptions, folder: Path
) -> list[Vocabulary]:
    """Count the fields over the train part in one pass and assign ids; kept in ``folder``.

    Raises DamagedWork if what an earlier run kept is damaged and the staged rows are gone.
    """
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.npz" for name in names]
    kept = [_load(path, name) for path, name in zip(paths, names, strict=True)]
    if None in kept:
        if gone := [piece.path for piece in staged if not piece.path.exists()]:
            raise DamagedWork(f"{folder}: a vocabulary is damaged, and {gone[0]} is encoded")
        rows = pl.concat(train_rows(staged, options))
        queries = [rows.select(name).group_by(name).len() for name in names]
        counts = pl.collect_all(queries, engine="streaming")
        with ThreadPoolExecutor(options.workers) as pool:
            kept = list(pool.map(partial(_build, options), paths, names, counts))
    return [vocabulary for vocabulary in kept if vocabulary is not None]


def _build(options: PrepareOptions, path: Path, name: str, counts: pl.DataFrame) -> Vocabulary:
    vocabulary = _vocabulary(name, counts, options)
    _save(path, vocabulary)
    return vocabulary


def _vocabulary(name: str, counts: pl.DataFrame, options: PrepareOptions) -> Vocabulary:
    missing = int(counts.filter(pl.col(name).is_null())["len"].sum())
    values = counts.drop_nulls()
    kept = values.filter(pl.col("len") >= options.min_count).sort(name)
    rare = values.filter(pl.col("len") < options.min_count)["len"]
    lookups = kept["len"].to_numpy().astype(np.int64)
    num_rare = int(rare.sum())
    ids = assign_ids(lookups, (missing, num_rare), options.seed, name)
    return Vocabulary(name, kept[name].to_numpy(), lookups, ids, missing, num_rare, len(rare))


def _save(path: Path, vocabulary: Vocabulary) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(
            file,
            keys=vocabulary.keys,
            counts=vocabulary.counts,
            ids=vocabulary.ids,
            other=np.array([vocabulary.missing, vocabulary.rare, vocabulary.rare_values]),
        )
    os.replace(partial, path)


def _load(path: Path, name: str) -> Vocabulary | None:
    """What ``_save`` wrote; None where it is not there or its checksums (zip's) do not fit."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            other = [int(value) for value in saved["other"]]
            return Vocabulary(name, saved["keys"], saved["counts"], saved["ids"], *other)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None

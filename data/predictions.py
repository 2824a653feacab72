"""Encode raw rows, collect their scores, and write the scores to a file in row order.

The columns are the row key, or the number among the valid rows (``row``) if rows have no keys;
``score``, the predicted click probability; and ``label`` if the rows have labels.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.lists import SplitPart
from sbpflow.data.format.manifest import MANIFEST, Manifest, ShardPart, load_manifest
from sbpflow.data.format.npy import open_array
from sbpflow.data.prepare.remote import input_path
from sbpflow.errors import ConfigError

if TYPE_CHECKING:
    import polars as pl

SCORE, LABEL, ROW = "score", "label", "row"
_LOG = logging.getLogger(__name__)
_WRITERS: Mapping[str, Callable[["pl.DataFrame", Path], object]] = {
    ".parquet": lambda scores, file: scores.write_parquet(file),
    ".csv": lambda scores, file: scores.write_csv(file),
    ".tsv": lambda scores, file: scores.write_csv(file, separator="\t"),
}


class Scoring:
    """Rows to score and an output file for the scores; every rank creates an equal instance.

    Only rank 0 calls ``open``, ``encode`` and ``close``. ``inputs`` are raw rows, or the folder of
    one prepared set to score its ``split``. ``like`` is the run's set with the vocabularies. Raise
    ConfigError for a prepared set if its ids may have another meaning, or for an unknown suffix.
    """

    def __init__(
        self, inputs: Sequence[str], output: Path, split: str, like: Manifest, *, overwrite: bool
    ) -> None:
        if output.suffix not in _WRITERS:
            raise ConfigError(
                f"--output {output}: must end in {', '.join(_WRITERS)}, which is the format of the "
                "file; use, for example, --output scores.parquet"
            )
        self._inputs, self._output, self.like = tuple(inputs), output, like
        self._overwrite = overwrite
        first, prepared = input_path(self._inputs[0]), None
        if len(self._inputs) == 1 and isinstance(first, Path) and (first / MANIFEST).is_file():
            prepared = first
            check_ids(load_manifest(prepared), like)
        self._is_set = prepared is not None
        self._folder = prepared or output.with_name(output.name + ".rows")
        self.split = split if self._is_set else "test"
        self._partial = output.with_name(output.name + ".partial")
        self._scores: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.float32]] = []

    def __str__(self) -> str:
        return f"{' '.join(self._inputs)} ({self.split})"

    def open(self) -> None:
        """Check that the file can be written before any row is scored."""
        path = self._output
        if path.exists() and not self._overwrite:
            raise ConfigError(f"--output {path} already exists; use --overwrite to replace it")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            reason = (error.strerror or "cannot be written").lower()
            raise ConfigError(
                f"--output {path}: {path.parent}: {reason}; use, for example, scores.parquet"
            ) from error

    def encode(self, max_bad_fraction: float) -> None:
        """Encode raw rows with the run's ids to a folder next to the output."""
        if self._is_set:
            return
        from sbpflow.data.prepare.new_rows import encode

        encode(
            [input_path(text) for text in self._inputs],
            self._folder,
            like=self.like.path,
            workers=os.cpu_count() or 1,
            max_bad_fraction=max_bad_fraction,
            overwrite=True,
        )

    def manifest(self) -> Manifest:
        """Return the set of the rows to score."""
        manifest = load_manifest(self._folder)
        if not manifest.splits[self.split]:
            names = ", ".join(name for name, rows in manifest.splits.items() if rows)
            raise ConfigError(
                f"--split: {self.split} of {self._folder} has no rows; non-empty splits: {names}; "
                f"use, for example, --split {names.split(', ')[0]}"
            )
        return manifest

    def write(self, scores: NDArray[np.float32], labels: NDArray[np.float32]) -> None:
        """Add scores and labels [n] of the next rows to memory (8 bytes per row)."""
        self._scores.append(scores)
        self._labels.append(labels)

    def close(self) -> None:
        """Write the file atomically, and remove the encoded rows."""
        import polars as pl

        manifest = self.manifest()
        scores = np.concatenate(self._scores)
        if len(scores) != manifest.splits[self.split]:
            raise RuntimeError(f"{len(scores)} scores, {manifest.splits[self.split]} rows")
        columns = row_keys(manifest, self.split)
        columns[SCORE] = pl.Series(scores)
        if manifest.labelled:
            columns[LABEL] = pl.Series(np.concatenate(self._labels))
        try:
            _WRITERS[self._output.suffix](pl.DataFrame(columns), self._partial)
            self._partial.replace(self._output)
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise ConfigError(f"--output {self._output} cannot be written ({error})") from error
        bad = sum(manifest.content.get("bad_lines", {}).values()) if not self._is_set else 0
        if bad:
            _LOG.warning("%d bad lines have no score and no row number", bad)
        if not self._is_set:
            shutil.rmtree(self._folder)
        _LOG.info("%s: %d scores, mean %.6f", self._output, len(scores), scores.mean())


def check_ids(manifest: Manifest, like: Manifest) -> None:
    """Raise ConfigError unless the ids of ``manifest`` have the same meaning in ``like``.

    The meaning is the same if the vocabularies are equal or if the vocabulary of ``like`` grew from
    the other vocabulary.
    """
    digest = manifest.vocabulary_digest
    if digest is None and like.vocabulary_digest is None:
        rows = [{field.name: field.rows for field in m.fields} for m in (manifest, like)]
        if rows[0] == rows[1] and manifest.dense == like.dense:
            return
    elif digest in (like.vocabulary_digest, *(ancestor.digest for ancestor in like.ancestors)):
        return
    raise ConfigError(
        f"--input {manifest.path}: the ids are not from the model's vocabulary; use the "
        f"raw rows as input, or encode them with `sbpflow encode --like {like.path}`"
    )


def row_keys(manifest: Manifest, split: str) -> "dict[str, pl.Series]":
    """Map the key column's name to the row keys of ``split``, or ``row`` to row numbers."""
    import polars as pl

    key = manifest.side_column("row_key")
    num_rows = manifest.splits[split]
    if key is None:
        return {ROW: pl.Series(np.arange(num_rows))}
    name = key.name if key.name not in (SCORE, LABEL) else "row_key"
    if key.type == "string":
        return {name: pl.Series(_texts(manifest, split), dtype=pl.String)}
    if key.type != "int64":
        raise ValueError(f"row key {key.name}: type {key.type!r}; use string or int64")
    out = np.empty(num_rows, dtype=np.int64)
    part = SplitPart(manifest, split, "row_key")
    part.read(0, num_rows, out)
    part.close()
    return {name: pl.Series(out)}


def _texts(manifest: Manifest, split: str) -> list[str]:
    """Split the concatenated text keys of each shard."""
    keys: list[str] = []
    for shard in manifest.shards(split):
        ends, raw = (_part(manifest, shard.rows, shard.parts, part) for part in ("ends", "bytes"))
        text, start = raw.tobytes(), 0
        for end in ends.tolist():
            keys.append(text[start:end].decode())
            start = end
    return keys


def _part(manifest: Manifest, rows: int, parts: Mapping[str, ShardPart], part: str) -> NDArray[Any]:
    kind = manifest.part_types[f"row_key_{part}"]
    file = parts[f"row_key_{part}"]
    return open_array(manifest.path / file.file, kind.dtype, kind.shape(rows, file.count))

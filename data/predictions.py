"""Encode raw rows, collect their scores, and write the scores to a file in row order.

``score_blocks`` writes a folder of files instead.

The first column of the file is the row key or, if rows have no keys, the row's number among valid
rows (``row``). ``score`` is the predicted click probability; ``label`` exists if the rows have
labels.
"""

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.engine import EngineOptions
from sbpflow.data.format.lists import SplitPart, open_part
from sbpflow.data.format.manifest import MANIFEST, SPLITS, Manifest, load_manifest
from sbpflow.data.prepare.remote import version
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.remote_path import input_path, redacted
from sbpflow.runtime.processes.launch import unwritable

if TYPE_CHECKING:
    import polars as pl

    from sbpflow.data.prepare.source import Input

SCORE, LABEL, ROW = "score", "label", "row"
_SMALL_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)
_WRITERS: Mapping[str, Callable[["pl.DataFrame", Path], object]] = {
    ".parquet": lambda scores, file: scores.write_parquet(file),
    ".csv": lambda scores, file: scores.write_csv(file),
    ".tsv": lambda scores, file: scores.write_csv(file, separator="\t"),
}


class Scoring:
    """The rows to score and the output for their scores. Every rank creates an equal instance.

    ``inputs`` are files of raw rows, or the folder of one prepared set, whose ``split`` is scored.
    ``like`` is the run's set, which has the vocabularies. ``output`` is a file, for which only rank
    0 calls ``open`` and ``close``, or a folder, which ``score_blocks`` fills. Raises ConfigError
    for a missing local input, a prepared set whose ids may have a different meaning, an unknown
    split, or an output without a name or with an unknown suffix.
    """

    def __init__(
        self, inputs: Sequence[str], output: Path, split: str, like: Manifest, *, overwrite: bool
    ) -> None:
        if not output.name:
            raise ConfigError(
                f"--output {output} is not the name of a file or a new folder; use, for example, "
                "--output scores.parquet"
            )
        if split not in SPLITS:
            raise ConfigError(
                f"split: {split!r} is not a split of a prepared set; use {' or '.join(SPLITS)}"
            )
        self.is_folder = not output.suffix
        if output.suffix not in _WRITERS and not self.is_folder:
            raise ConfigError(
                f"--output must end in one of {', '.join(_WRITERS)}, which sets the file format, "
                f"or have no suffix (for a folder of Parquet files), got {output}; use, for "
                "example, --output scores.parquet"
            )
        self._inputs, self.output, self.like = tuple(inputs), output, like
        self.overwrite = overwrite
        from sbpflow.data.prepare.source import check_exists

        check_exists([path for path in map(input_path, inputs) if isinstance(path, Path)])
        first, prepared = input_path(self._inputs[0]), None
        is_folder = isinstance(first, Path) or first.is_dir()
        if len(self._inputs) == 1 and is_folder and (first / MANIFEST).is_file():
            prepared = first
            check_ids(load_manifest(prepared), like)
        self.is_set = prepared is not None
        rows = output / "rows" if self.is_folder else output.with_name(output.name + ".rows")
        self.rows = prepared or rows
        self.split = split if self.is_set else "test"
        self._partial = output.with_name(output.name + ".partial")
        self._scores: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.float32]] = []

    def __str__(self) -> str:
        return f"{redacted(' '.join(self._inputs))} ({self.split})"

    def refuse_replaced_inputs(self) -> None:
        """Raise ConfigError if writing the output would replace an input."""
        output, partial = self.output.resolve(), self._partial.resolve()
        for path in [self.rows] if self.is_set else [source.path for source in self._files()]:
            if not isinstance(path, Path):
                continue
            if path.resolve().is_relative_to(output) or path.resolve() == partial:
                raise ConfigError(
                    f"--output {self.output} would replace the input {path}; use another name, for "
                    f"example, --output {self.output.with_name(f'scores-{self.output.name}')}"
                )

    def refuse_unused(
        self,
        split: str | None,
        max_bad_fraction: float | None,
        names: tuple[str, str] = ("split", "max_bad_fraction"),
    ) -> None:
        """Raise ConfigError for an option that would have no effect on these rows. ``names`` are
        the names of the two options in messages.
        """
        if split is not None and not self.is_set:
            raise ConfigError(
                f"{names[0]}: {split} needs a prepared set, but these are raw rows, which are all "
                f"scored; remove {names[0]}"
            )
        if max_bad_fraction is not None and self.is_set:
            raise ConfigError(
                f"{names[1]}: {max_bad_fraction:g} needs raw rows, but these are the rows of a "
                f"prepared set, which are all valid; remove {names[1]}"
            )

    def open(self) -> None:
        """Before any row is scored, check that the output can be written."""
        path = self.output
        if path.exists() and not self.overwrite and not self.is_folder:
            raise ConfigError(f"--output {path} already exists; use --overwrite to replace it")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            reason = (error.strerror or "cannot be written").lower()
            raise ConfigError(
                f"--output {path}: the folder {path.parent} cannot be used ({reason}); use, for "
                "example, scores.parquet"
            ) from error

    def encode(
        self,
        max_bad_fraction: float,
        engine: EngineOptions | None = None,
        workers: int | None = None,
    ) -> None:
        """Encode raw rows with the run's ids into a folder; resume an earlier call that was
        interrupted.
        """
        if self.is_set:
            return
        from sbpflow.data.prepare.new_rows import encode

        encode(
            [input_path(text) for text in self._inputs],
            self.rows,
            like=self.like.origin,
            workers=workers,
            max_bad_fraction=max_bad_fraction,
            overwrite=True,
            engine=engine,
        )

    def inputs_digest(self, max_bad_fraction: float) -> str:
        """Return a digest of the paths, sizes and modification times of the raw files, the
        fingerprint of the run's set, and ``max_bad_fraction``.
        """
        versions = [(*version(source.path), source.num_bytes) for source in self._files()]
        text = json.dumps([versions, self.like.fingerprint, max_bad_fraction], default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def is_small(self, max_rows: int) -> bool:
        """Return True if there are few rows to score: at most ``max_rows`` rows of a prepared set,
        or small files of raw rows.
        """
        if self.is_set:
            return self.manifest().splits[self.split] <= max_rows
        return sum(source.num_bytes for source in self._files()) <= _SMALL_BYTES

    def _files(self) -> "Sequence[Input]":
        from sbpflow.data.prepare.source import find_inputs

        return find_inputs([input_path(text) for text in self._inputs], log=False)

    def manifest(self) -> Manifest:
        """Return the manifest of the set whose rows are to be scored."""
        manifest = load_manifest(self.rows)
        check_split(manifest, self.split, self.rows)
        return manifest

    def write(self, scores: NDArray[np.float32], labels: NDArray[np.float32]) -> None:
        """Keep the scores and labels [n] of the next rows in memory (8 bytes per row)."""
        self._scores.append(scores)
        self._labels.append(labels)

    def close(self) -> None:
        """Write the output file atomically, and remove the encoded rows."""
        from polars.exceptions import ComputeError

        manifest = self.manifest()
        num_rows = manifest.splits[self.split]
        scores = np.concatenate(self._scores)
        if len(scores) != num_rows:
            raise RuntimeError(f"{len(scores)} scores, {num_rows} rows")
        labels = np.concatenate(self._labels)
        frame = scored_rows(manifest, self.split, 0, num_rows, scores, labels)
        try:
            _WRITERS[self.output.suffix](frame, self._partial)
            self._partial.replace(self.output)
        except (OSError, ComputeError) as error:  # Polars raises either for a full disk
            self._partial.unlink(missing_ok=True)
            raise ConfigError(f"--output {self.output} {unwritable(error)}") from error
        self.report_bad(manifest)
        if not self.is_set:
            shutil.rmtree(self.rows)
        _LOG.info("%s: %d scores, mean %.6f", self.output, len(scores), scores.mean())

    def report_bad(self, manifest: Manifest) -> None:
        """Log the number of bad raw lines."""
        from sbpflow.data.prepare.piece import BLANK

        counts = {} if self.is_set else manifest.content.get("bad_lines", {})
        bad = sum(count for reason, count in counts.items() if reason != BLANK)
        if bad:
            _LOG.warning("bad lines, which have no score and no row number: %d", bad)


def scored_rows(
    manifest: Manifest,
    split: str,
    start: int,
    stop: int,
    scores: NDArray[np.float32],
    labels: NDArray[np.float32],
) -> "pl.DataFrame":
    """Return rows [start, stop) of the output, with their keys, scores and labels."""
    import polars as pl

    columns = row_keys(manifest, split, start, stop)
    columns[SCORE] = pl.Series(scores)
    if manifest.labelled:
        columns[LABEL] = pl.Series(labels)
    return pl.DataFrame(columns)


def check_ids(manifest: Manifest, like: Manifest, key: str = "--input") -> None:
    """Raise ConfigError if ids or dense values in the set ``manifest``, given as ``key``, may have
    a different meaning in the set ``like``.

    Ids have the same meaning if the vocabularies are equal, or if the vocabulary of ``like`` grew
    from the vocabulary of ``manifest``. Sets without vocabularies must have equal tables. Dense
    values must have the same transforms with the same constants.
    """
    digest = manifest.vocabulary_digest
    if digest is None and like.vocabulary_digest is None:
        rows = [{field.name: field.rows for field in m.fields} for m in (manifest, like)]
        has_ids = rows[0] == rows[1]
    else:
        ancestors = (ancestor.digest for ancestor in like.ancestors)
        has_ids = digest in (like.vocabulary_digest, *ancestors)
    if has_ids and manifest.transforms == like.transforms:
        return
    what = f"ids in {manifest.path} are not from the model's vocabulary"
    if has_ids:
        what = f"dense values in {manifest.path} are not transformed as in the model's set"
    advice = "use the raw rows as input, or encode them" if key == "--input" else "encode its rows"
    raise ConfigError(f"{key}: the {what}; {advice} with `sbpflow encode --like {like.origin}`")


def check_split(manifest: Manifest, split: str, name: object) -> None:
    """Raise ConfigError for an unknown split and for one without rows; ``name`` is the set's path
    in the message.
    """
    if split not in SPLITS:
        raise ConfigError(
            f"--split: {split!r} is not a split of a prepared set; use {' or '.join(SPLITS)}"
        )
    if not manifest.splits[split]:
        names = ", ".join(name for name, rows in manifest.splits.items() if rows)
        raise ConfigError(
            f"--split: the split {split} of {name} has no rows; use a split with "
            f"rows ({names}), for example, --split {names.split(', ')[0]}"
        )


def row_keys(manifest: Manifest, split: str, start: int, stop: int) -> "dict[str, pl.Series]":
    """Return the key column of rows [start, stop) as {name: values}: row keys, or row numbers
    (``row``).
    """
    import polars as pl

    key = manifest.side_column("row_key")
    if key is None:
        return {ROW: pl.Series(np.arange(start, stop))}
    name = key.name if key.name not in (SCORE, LABEL) else "row_key"
    if key.type == "string":
        return {name: pl.Series(_texts(manifest, split, start, stop), dtype=pl.String)}
    if key.type != "int64":
        raise ValueError(f"row key {key.name} must have type string or int64, got {key.type!r}")
    return {name: pl.Series(SplitPart(manifest, split, "row_key", 0).rows(start, stop))}


def _texts(manifest: Manifest, split: str, start: int, stop: int) -> list[str]:
    """Return the text keys of rows [start, stop), cut from the concatenated keys of each shard."""
    keys: list[str] = []
    ends = SplitPart(manifest, split, "row_key_ends", 0)
    texts = open_part(manifest, split, "row_key_bytes", 0)
    for first, end in ends.pieces(start, stop):
        shard, row = (int(place[0]) for place in ends.maps_of(np.array([first])))
        bounds = ends.rows(first - min(row, 1), end).tolist()
        bounds = bounds if row else [0, *bounds]
        text = texts[shard][bounds[0] : bounds[-1]].tobytes()
        keys += [text[a - bounds[0] : b - bounds[0]].decode() for a, b in pairwise(bounds)]
    return keys

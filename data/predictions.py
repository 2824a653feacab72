"""Predictions as a Parquet file: one row per row of a split, in its order.

Columns: the row's key if the set has one, else its number in the split (``row``); ``score``, the
probability of a click; ``label`` where the set has labels.
"""

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from data.format.lists import SplitPart
from data.format.manifest import Manifest
from data.format.npy import open_array
from sbpflow.errors import ConfigError

SCORE, LABEL, ROW = "score", "label", "row"
_PARTIAL = ".partial"


class PredictionWriter:
    """Takes the scores of a split batch by batch, in order; ``close`` writes the file.

    Holds 8 bytes per row until then. The file appears under its name when it is complete. Raises
    ConfigError for a file that is there, or a folder that cannot be written to.
    """

    def __init__(self, path: Path, manifest: Manifest, split: str, *, overwrite: bool) -> None:
        if path.exists() and not overwrite:
            raise ConfigError(f"--output {path}: is there already; --overwrite replaces it")
        if not path.parent.is_dir():
            raise ConfigError(f"--output {path}: there is no folder {path.parent}; make it first")
        self._path, self._manifest, self._split = path, manifest, split
        self._partial = path.with_name(path.name + _PARTIAL)
        # Opened now: that nothing can be written here is to be known before rows are scored.
        self._partial.touch()
        self._scores: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.float32]] = []

    def __enter__(self) -> "PredictionWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        self._partial.unlink(missing_ok=True)

    def write(self, scores: NDArray[np.float32], labels: NDArray[np.float32]) -> None:
        """The next rows of the split."""
        self._scores.append(scores)
        self._labels.append(labels)

    def close(self) -> None:
        """Write the file."""
        num_rows = self._manifest.splits[self._split]
        scores = _joined(self._scores)
        if len(scores) != num_rows:
            raise RuntimeError(f"{len(scores)} scores for the {num_rows} rows of {self._split}")
        columns = row_keys(self._manifest, self._split)
        columns[SCORE] = pl.Series(scores)
        if self._manifest.labelled:
            columns[LABEL] = pl.Series(_joined(self._labels))
        pl.DataFrame(columns).write_parquet(self._partial)
        self._partial.replace(self._path)


def row_keys(manifest: Manifest, split: str) -> dict[str, pl.Series]:
    """{name of the key: keys} of the rows of ``split``; their numbers where the set has no key."""
    key = manifest.side_column("row_key")
    num_rows = manifest.splits[split]
    if key is None:
        return {ROW: pl.Series(np.arange(num_rows))}
    name = key.name if key.name not in (SCORE, LABEL) else "row_key"
    if key.type == "string":
        return {name: pl.Series(_texts(manifest, split), dtype=pl.String)}
    out = np.empty(num_rows, dtype=np.int64)
    part = SplitPart(manifest, split, "row_key")
    part.read(0, num_rows, out)
    part.close()
    return {name: pl.Series(out)}


def _texts(manifest: Manifest, split: str) -> list[str]:
    """Keys of text, which lie end to end in the files of each shard."""
    found: list[str] = []
    for shard in manifest.shards(split):
        ends, raw = (_part(manifest, shard.rows, shard.parts, part) for part in ("ends", "bytes"))
        text, start = raw.tobytes(), 0
        for end in ends.tolist():
            found.append(text[start:end].decode())
            start = end
    return found


def _part(manifest: Manifest, rows: int, parts: Any, part: str) -> NDArray[Any]:
    kind = manifest.part_types[f"row_key_{part}"]
    file = parts[f"row_key_{part}"]
    return open_array(manifest.path / file.file, kind.dtype, kind.shape(rows, file.count))


def _joined(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)

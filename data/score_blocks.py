"""Write scores to a folder, with one Parquet file per block of rows, so that a killed run can be
resumed. Each finished block has a record with the size and CRC32 of the block's file. The folder's
mark identifies the rows and weights, so that blocks from a different prediction are never reused.
At the end, the index is written, and then the records, the mark, and the encoded rows are removed.
"""

import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.npy import file_crc32
from sbpflow.data.predictions import Scoring, scored_rows
from sbpflow.data.prepare.workspace import read_record, require_record, write_record
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.runtime.files.own_files import other_file
from sbpflow.runtime.processes.launch import unwritable

INDEX = "scores.json"
_MARK, _ENCODED = "unfinished.json", "rows.json"
# The names in a folder of scores, with those of an unfinished prediction.
_OWN = re.compile(
    r"(scores|unfinished|rows)\.json|part-\d+\.(parquet|json)|rows(\.work(\.lock)?)?|.+\.partial"
)
_INDEX_KEYS = ("format", "version", "run", "step", "split", "rows", "files")
_KEYS = ("plan", "file", "start", "rows", "bytes", "crc32", "sum")
_LOG = logging.getLogger(__name__)


class Block(NamedTuple):
    """A block of rows [start, stop) of the split."""

    number: int
    start: int
    stop: int


class ScoreBlocks:
    """Writes the files of the folder ``scoring.output``, one for each block of ``block_rows`` rows.

    ``weights`` is a string that identifies the trained weights and the settings that affect scores.
    """

    def __init__(self, scoring: Scoring, block_rows: int, weights: str) -> None:
        self._scoring, self._folder = scoring, scoring.output
        self._block_rows, self._plan = block_rows, f"{weights} {block_rows} {scoring.split}"

    @property
    def mark(self) -> Path:
        """Return the path of the file that identifies the rows and weights of an unfinished
        prediction.
        """
        return self._folder / _MARK

    def open(self, rows: str) -> None:
        """Create the folder, or resume an unfinished prediction with the same ``rows`` and weights.
        Raises ConfigError if the folder contains other scores that must not be overwritten, or
        anything that is not scores.
        """
        folder, overwrite = self._folder, self._scoring.overwrite
        plan = {"plan": f"{rows} {self._plan}"}
        mark = read_record(self.mark, ("plan",))
        if read_record(folder / INDEX, _INDEX_KEYS) is not None:
            self._clean()  # an earlier launch may have been killed before it removed these files
            if not overwrite:
                raise ConfigError(
                    f"--output {folder} already exists; use --overwrite to replace it"
                )
            self._remove()
        elif mark is not None and mark != plan:
            if not overwrite:
                raise ConfigError(
                    f"--output {folder} contains unfinished scores for other rows, weights, or "
                    "options; use another folder, or --overwrite to replace them"
                )
            self._remove()
        elif mark is None and folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"--output {folder} is not empty, but does not contain scores; use a new folder"
            )
        folder.mkdir(exist_ok=True)
        write_record(self.mark, plan)

    def _remove(self) -> None:
        """Remove the files in the folder, which may be a link. Raises ConfigError for files that
        are not of a prediction.
        """
        if other := other_file((path.name for path in self._folder.iterdir()), _OWN):
            raise ConfigError(
                f"--output {self._folder}: --overwrite would delete {other}, which is not a "
                "file of a prediction; move it, or use a new folder"
            )
        shutil.rmtree(self._folder.resolve())
        self._folder.resolve().mkdir()

    def is_encoded(self) -> bool:
        """Return whether an earlier launch encoded all rows.

        If some rows are not encoded, the incomplete set of encoded rows is removed.
        """
        if self._scoring.is_set:
            return True
        rows = self._scoring.rows
        record = read_record(self._folder / _ENCODED, ("fingerprint",))
        if record is None:
            if rows.exists():
                shutil.rmtree(rows)
                shutil.rmtree(rows.with_name(rows.name + ".work"), ignore_errors=True)
            return False
        return self._scoring.manifest().fingerprint == record["fingerprint"]

    def encoded(self) -> None:
        """Record that all rows are encoded."""
        if not self._scoring.is_set:
            fingerprint = self._scoring.manifest().fingerprint
            write_record(self._folder / _ENCODED, {"fingerprint": fingerprint})

    def blocks(self, manifest: Manifest) -> list[Block]:
        """Return all blocks of the split."""
        num_rows = manifest.splits[self._scoring.split]
        starts = range(0, num_rows, self._block_rows)
        return [Block(k, a, min(a + self._block_rows, num_rows)) for k, a in enumerate(starts)]

    def is_finished(self, block: Block) -> bool:
        """Return whether the block's file is complete and undamaged."""
        record = read_record(self._record(block), _KEYS)
        path = self._file(block)
        return (
            record is not None
            and (record["plan"], record["rows"]) == (self._plan, block.stop - block.start)
            and path.is_file()
            and path.stat().st_size == record["bytes"]
            and file_crc32(path) == record["crc32"]
        )

    def write(
        self,
        manifest: Manifest,
        block: Block,
        scores: NDArray[np.float32],
        labels: NDArray[np.float32],
    ) -> None:
        """Write the file of a block, and then its record."""
        from polars.exceptions import ComputeError

        path = self._file(block)
        frame = scored_rows(manifest, self._scoring.split, block.start, block.stop, scores, labels)
        try:
            with replacing(path) as partial:
                frame.write_parquet(partial)
            record = {
                "plan": self._plan,
                "file": path.name,
                "start": block.start,
                "rows": len(frame),
                "bytes": path.stat().st_size,
                "crc32": file_crc32(path),
                "sum": float(scores.sum(dtype=np.float64)),
            }
            write_record(self._record(block), record)
        except (OSError, ComputeError) as error:  # Polars raises either for a full disk
            raise ConfigError(f"--output {path} {unwritable(error)}") from error

    def finish(self, manifest: Manifest, blocks: Sequence[Block], run: str, step: int) -> None:
        """Write the index, and remove everything except the index and the files of the blocks."""
        records = [require_record(self._record(block), _KEYS) for block in blocks]
        num_rows = sum(record["rows"] for record in records)
        files = [{key: record[key] for key in _KEYS[1:-1]} for record in records]
        content = {
            "format": "sbpflow-scores",
            "version": 1,
            "run": run,
            "step": step,
            "split": self._scoring.split,
            "rows": num_rows,
            "files": files,
        }
        write_record(self._folder / INDEX, content)
        self._scoring.report_bad(manifest)
        self._clean()
        mean = sum(record["sum"] for record in records) / num_rows
        _LOG.info("%s: %d scores in %d files, mean %.6f", self._folder, num_rows, len(files), mean)

    def _clean(self) -> None:
        """Remove everything except the index and the files of the blocks."""
        folder = self._folder
        unfinished = (*folder.glob("*.partial"), *folder.glob("part-*.json"))
        for path in (*unfinished, folder / _ENCODED, self.mark):
            path.unlink(missing_ok=True)
        if not self._scoring.is_set:
            shutil.rmtree(self._scoring.rows, ignore_errors=True)

    def _file(self, block: Block) -> Path:
        return self._folder / f"part-{block.number:06d}.parquet"

    def _record(self, block: Block) -> Path:
        return self._file(block).with_suffix(".json")

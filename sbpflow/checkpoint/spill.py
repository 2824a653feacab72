"""Defines a temporary file for rows of an undo log that do not fit in memory."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sbpflow.checkpoint.crc import crc32
from sbpflow.checkpoint.write import named, write_at
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in the spill file."""

    offset: int
    num_bytes: int
    crc32: int


class SpillFile:
    """An unnamed file in ``folder``, created by the first ``append`` and removed by ``close``.

    If the folder is in an object store, the file is in the folder for temporary files (TMPDIR).
    Space is not reused, because each row is spilled at most once. An OSError is raised as a
    CheckpointError.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.num_bytes = 0
        self._folder = Path(tempfile.gettempdir()) if isinstance(folder, RemotePath) else folder
        self._path = self._folder / "spilled rows"  # only for messages: the file has no name
        self._file = -1

    def append(self, parts: Sequence[memoryview]) -> Extent:
        """Append ``parts`` in order; return where they are in the file."""
        with named(self._path):
            if self._file < 0:
                # The file has no name, so it disappears however the process ends.
                with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                    self._file = os.dup(file.fileno())
            offset, crc = self.num_bytes, 0
            for part in parts:
                crc = crc32(part, crc)
                write_at(self._file, part, self.num_bytes)
                self.num_bytes += len(part)
        return Extent(offset, self.num_bytes - offset, crc)

    def read(self, extent: Extent) -> bytearray:
        """Return the bytes of an ``append``; raise CheckpointError if the file contains other
        bytes.
        """
        data = bytearray(extent.num_bytes)
        with named(self._path):
            count = os.preadv(self._file, [data], extent.offset)
        if count != extent.num_bytes or crc32(data) != extent.crc32:
            raise CheckpointError(
                f"{self._path}: the disk did not return the bytes that were written to it; "
                "earlier checkpoints are unchanged; check the disk, or use another checkpoint.dir"
            )
        return data

    def close(self) -> None:
        """Close the file, which also removes it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

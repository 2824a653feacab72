"""A file for what an undo log has no memory for; the system takes it away with its process."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sbpflow.checkpoint.crc import crc32
from sbpflow.checkpoint.write import named, write_at
from sbpflow.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes that were put into the file."""

    offset: int
    num_bytes: int
    crc32: int


class SpillFile:
    """A file without a name in ``folder``, from the first ``append`` to ``close``.

    Space is not used again: each row comes once. OSError becomes a CheckpointError.
    """

    def __init__(self, folder: Path) -> None:
        self.num_bytes = 0
        self._path = folder / "rows put aside"
        self._file = -1

    def append(self, parts: Sequence[memoryview]) -> Extent:
        """All of ``parts``, one behind the other."""
        with named(self._path):
            if self._file < 0:
                # Has no name, or none from here on: nothing is left of it when the process ends.
                with tempfile.TemporaryFile(dir=self._path.parent, buffering=0) as file:
                    self._file = os.dup(file.fileno())
            offset, crc = self.num_bytes, 0
            for part in parts:
                crc = crc32(part, crc)
                write_at(self._file, part, self.num_bytes)
                self.num_bytes += len(part)
        return Extent(offset, self.num_bytes - offset, crc)

    def read(self, extent: Extent) -> bytearray:
        """What was appended; CheckpointError if the file does not give it back."""
        found = bytearray(extent.num_bytes)
        with named(self._path):
            count = os.preadv(self._file, [found], extent.offset)
        if count != extent.num_bytes or crc32(found) != extent.crc32:
            raise CheckpointError(
                f"{self._path}: does not give back what was written to it; the checkpoints before "
                "it are as they were; check the disk, or give another checkpoint.dir"
            )
        return found

    def close(self) -> None:
        """The file is gone."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

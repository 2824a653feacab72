"""Writes one rank's pieces into a file, block by block, with a CRC32 of each block.

What a piece's bytes are is asked block by block, so a source may give them while rows go on
changing (``undo.py``). Nothing here talks to other ranks.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sbpflow.checkpoint.crc import crc32
from sbpflow.checkpoint.format import BLOCK_BYTES, Piece, Place
from sbpflow.embedding.state import Values, read_values
from sbpflow.errors import CheckpointError

_STILL_CACHED_BYTES = 4 * BLOCK_BYTES  # behind what was written last: by then the disk has it
_advise = getattr(os, "posix_fadvise", None)  # Linux and FreeBSD


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank writes of the logical tensor ``name``: ``values`` [rows, columns] or [rows]."""

    name: str
    place: Place
    values: Values

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.itemsize


def bytes_of(values: Tensor) -> memoryview:
    """The bytes of a tensor, row by row; of a contiguous one on the CPU without a copy."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast("bytearray", flat.view(torch.uint8).numpy()))


def write_at(file: int, data: memoryview, offset: int) -> None:
    """All of ``data`` into an open file, at ``offset``."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


class PieceFile:
    """A file of pieces under way. OSError becomes a CheckpointError that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        with named(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def reserve(self, num_bytes: int) -> int:
        """The offset of a piece that is still to be written."""
        offset, self.size = self.size, self.size + num_bytes
        return offset

    def write(self, data: memoryview, offset: int) -> None:
        """All of ``data``, at ``offset``; it is on its way to the disk when this returns."""
        with named(self.path):
            write_at(self._file, data, offset)
            # Linux starts to write these pages, and drops those before that are on disk. Without it
            # a save fills the page cache with fresh pages, which cost far more than used ones, and
            # meets the disk in one long fsync at the end (docs/decisions/state.md).
            if _advise is not None:
                start = max(0, offset - _STILL_CACHED_BYTES)
                _advise(self._file, start, offset + len(data) - start, os.POSIX_FADV_DONTNEED)

    def close(self, *, sync: bool = True) -> None:
        """On disk when this returns, if ``sync``."""
        file, self._file = self._file, -1
        if file < 0:
            return
        try:
            if sync:
                with named(self.path):
                    os.fsync(file)
        finally:
            os.close(file)


class PieceWriter:
    """One piece of a file: its bytes come in order, in any portions."""

    def __init__(self, file: PieceFile, place: Place, num_bytes: int) -> None:
        self._file = file
        self._place = place
        self._start = file.reserve(num_bytes)
        self._written, self._num_bytes = 0, num_bytes
        self._crcs: list[int] = []

    def write(self, data: memoryview) -> None:
        """The next bytes."""
        while data:
            room = BLOCK_BYTES - self._written % BLOCK_BYTES
            now, data = data[:room], data[room:]
            if room == BLOCK_BYTES:
                self._crcs.append(0)
            self._crcs[-1] = crc32(now, self._crcs[-1])
            self._file.write(now, self._start + self._written)
            self._written += len(now)

    def done(self) -> Piece:
        """What the index says of it."""
        if self._written != self._num_bytes:
            raise RuntimeError(f"{self._file.path}: {self._written} bytes of {self._num_bytes}")
        return Piece(
            file=self._file.path.name,
            offset=self._start,
            place=self._place,
            crc32=tuple(self._crcs),
        )


def write_parts(path: Path, parts: Sequence[Part]) -> list[tuple[str, Piece]]:
    """Write all parts into a new file, which is on disk when this returns."""
    file = PieceFile(path)
    try:
        found = [(part.name, _write_part(file, part)) for part in parts]
        file.close()
    finally:
        file.close(sync=False)
    return found


def _write_part(file: PieceFile, part: Part) -> Piece:
    writer = PieceWriter(file, part.place, part.num_bytes)
    for chunk in row_chunks(part.values):
        writer.write(bytes_of(chunk))
    return writer.done()


def row_chunks(values: Values) -> Iterator[Tensor]:
    """Rows of a block at a time: what a copy, where one is needed, may hold."""
    row_bytes = values[:1].numel() * values.itemsize if values.ndim else 0
    if not row_bytes:
        yield read_values(values)
        return
    for part in values.split(max(1, BLOCK_BYTES // row_bytes)):
        yield read_values(part)


class named:
    """Errors of the system become one message that says which file and what to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise failed(self._path, error) from error


def failed(path: Path, error: OSError) -> CheckpointError:
    """The message for a file that cannot be written."""
    why = (error.strerror or str(error)).lower()
    return CheckpointError(
        f"{path}: cannot be written ({why}); the checkpoints before it are as they were; make "
        "room, keep fewer (checkpoint.keep), or give another checkpoint.dir"
    )

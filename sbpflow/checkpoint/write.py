"""Writes one rank's pieces into a file, block by block, and computes a CRC32 of each block.

A piece is written in portions; its rows may keep changing meanwhile (``undo.py``). This module does
not communicate with other ranks.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor

from sbpflow.checkpoint.crc import crc32
from sbpflow.checkpoint.format import BLOCK_BYTES, Piece
from sbpflow.embedding.plan.tables import Place
from sbpflow.embedding.state import Values, read_values
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath

# Pages further back than this are on disk and can be dropped.
_STILL_CACHED_BYTES = 4 * BLOCK_BYTES
_advise = getattr(os, "posix_fadvise", None)  # Available on Linux and FreeBSD.


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the logical tensor ``name``, written by one rank; ``values`` is [rows, columns] or
    [rows].
    """

    name: str
    place: Place
    values: Values

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.itemsize


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row. A contiguous CPU tensor is not copied."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast("bytearray", flat.view(torch.uint8).numpy()))


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` into an open file at ``offset``."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


class PieceFile:
    """Creates a file of pieces. An OSError is raised as a CheckpointError that names the file.

    Pieces are not written in order, so a file for an object store is first written to an unnamed
    file in TMPDIR, and then uploaded. The end of a ``with`` block without an error syncs the file
    to disk or uploads it. ``wrote`` is called after each write and each uploaded part.
    """

    def __init__(self, path: AnyPath, wrote: Callable[[], None] = lambda: None) -> None:
        self.path, self.size = path, 0
        self._wrote = wrote
        with named(path):
            if isinstance(path, RemotePath):
                with tempfile.TemporaryFile(buffering=0) as file:
                    self._file = os.dup(file.fileno())
                return
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def reserve(self, num_bytes: int) -> int:
        """Reserve space for a piece; return its offset."""
        offset, self.size = self.size, self.size + num_bytes
        return offset

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset``, and start flushing it to disk."""
        with named(self.path):
            write_at(self._file, data, offset)
            # These calls make Linux start writing the new pages, and drop earlier pages that are
            # already on disk. Otherwise, a save would fill the page cache with new pages, which
            # cost far more than reused ones, and end with one long fsync (docs/decisions/state.md).
            if _advise is not None:
                start = max(0, offset - _STILL_CACHED_BYTES)
                _advise(self._file, start, offset + len(data) - start, os.POSIX_FADV_DONTNEED)
        self._wrote()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                with named(self.path):
                    if isinstance(self.path, RemotePath):
                        self.path.upload(self._file, self._wrote)
                    else:
                        os.fsync(self._file)
        finally:
            os.close(self._file)


class PieceWriter:
    """Writes one piece, in order, in portions of any size."""

    def __init__(self, file: PieceFile, place: Place, num_bytes: int) -> None:
        self._file = file
        self._place = place
        self._start = file.reserve(num_bytes)
        self._written, self._num_bytes = 0, num_bytes
        self._crcs: list[int] = []

    def write(self, data: memoryview) -> None:
        """Write the next bytes."""
        while data:
            room = BLOCK_BYTES - self._written % BLOCK_BYTES
            now, data = data[:room], data[room:]
            if room == BLOCK_BYTES:
                self._crcs.append(0)
            self._crcs[-1] = crc32(now, self._crcs[-1])
            self._file.write(now, self._start + self._written)
            self._written += len(now)

    def done(self) -> Piece:
        """Return the piece for the index; all of its bytes must have been written."""
        if self._written != self._num_bytes:
            raise RuntimeError(
                f"only {self._written} of {self._num_bytes} bytes of a piece were written to "
                f"{self._file.path}"
            )
        return Piece(
            file=self._file.path.name,
            offset=self._start,
            place=self._place,
            crc32=tuple(self._crcs),
        )


def write_parts(
    path: AnyPath, parts: Sequence[Part], wrote: Callable[[], None] = lambda: None
) -> list[tuple[str, Piece]]:
    """Write all parts into a new file, and sync it; call ``wrote`` after each write."""
    with PieceFile(path, wrote) as file:
        return [(part.name, write_part(file, part)) for part in parts]


def write_part(file: PieceFile, part: Part) -> Piece:
    """Write a part as one piece, in portions of about one block to limit the memory of copies."""
    writer, values = PieceWriter(file, part.place, part.num_bytes), part.values
    row_bytes = values[:1].numel() * values.itemsize if values.ndim else 0
    chunks = values.split(max(1, BLOCK_BYTES // row_bytes)) if row_bytes else [values]
    for chunk in chunks:
        writer.write(bytes_of(read_values(chunk)))
    return writer.done()


@contextmanager
def named(path: AnyPath) -> Generator[None]:
    """Raise any OSError as a CheckpointError that names the file and a remedy."""
    try:
        yield
    except OSError as error:
        raise failed(path, error) from error


def failed(path: AnyPath, error: OSError) -> CheckpointError:
    """Return the CheckpointError for a file that cannot be written."""
    reason = (error.strerror or str(error)).lower()
    remedy = (
        "free disk space, keep fewer checkpoints (checkpoint.keep), or use another checkpoint.dir"
    )
    if isinstance(path, RemotePath) and error.errno == errno.ENOSPC:
        remedy = (
            f"its temporary file in {tempfile.gettempdir()} needs more space, so free disk space, "
            "or set TMPDIR to another folder"
        )
    return CheckpointError(
        f"{path} cannot be written ({reason}); earlier checkpoints are unchanged; {remedy}"
    )

"""Reads a checkpoint: whole tensors or rectangles of them, every block checked before it is used.

What is asked for is read, converted to the dtype wanted, and needs one block of memory beside. JSON
and bytes only: nothing in a checkpoint is imported or executed.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbpflow.checkpoint.crc import crc32
from sbpflow.checkpoint.format import (
    BLOCK_BYTES,
    INDEX_FILE,
    Index,
    Piece,
    Place,
    SavedTensor,
    from_json,
)
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.json_file import JsonError, read_text


def open_checkpoint(path: str | Path) -> "Checkpoint":
    """The checkpoint in folder ``path``: its index checked, its files there and of the right size.

    Raises CheckpointError, which names the file, what is wrong with it and what to do.
    """
    folder = Path(path)
    file = folder / INDEX_FILE
    try:
        text = read_text(file)
    except FileNotFoundError as error:
        there = folder.is_dir()
        what = f"holds no {INDEX_FILE}" if there else "does not exist"
        example = folder / "step-1000" if there else "runs/train/checkpoints/step-1000"
        raise CheckpointError(
            f"{folder}: {what}; give the folder of one checkpoint, for example {example}"
        ) from error
    except JsonError as error:
        raise CheckpointError(f"{error}; use another checkpoint") from error
    found = Checkpoint(folder, from_json(text, file))
    found.check_files()
    return found


class Checkpoint:
    """An opened checkpoint; ``tensors`` are by logical name, as ``Job.state`` names them."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.index = index

    @property
    def step(self) -> int:
        """Steps trained when it was taken."""
        return self.index.step

    @property
    def run(self) -> str:
        """The run that wrote it."""
        return self.index.run

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """Shape, dtype and pieces of every logical tensor."""
        return self.index.tensors

    @property
    def documents(self) -> Mapping[str, Any]:
        """JSON values beside the tensors."""
        return self.index.documents

    @property
    def num_bytes(self) -> int:
        """Of its files, without the index."""
        return sum(self.index.files.values())

    def tensor(
        self,
        name: str,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The tensor ``name`` on the CPU, or some of its rows: [rows, ...].

        With ``columns`` [rows, columns], all dims behind the first being one. Slices have no step.
        """
        saved = self.saved(name)
        whole = saved.whole
        top, bottom, _ = (rows or slice(None)).indices(whole.row_stop)
        left, right, _ = (columns or slice(None)).indices(whole.col_stop)
        bottom, right = max(top, bottom), max(left, right)
        place = Place(row_start=top, row_stop=bottom, col_start=left, col_stop=right)
        out = torch.empty(place.num_rows, place.num_columns, dtype=dtype or saved.dtype)
        self.read_into(name, place, out)
        if columns is not None:
            return out
        return out.reshape((place.num_rows, *saved.shape[1:]) if saved.shape else ())

    def saved(self, name: str) -> SavedTensor:
        """What the index says of ``name``; CheckpointError if it has no such tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name}")
        return self.tensors[name]

    def read_into(self, name: str, place: Place, out: Tensor) -> None:
        """Fill ``out``, [rows, columns] or [rows] of any dtype and device, with ``place``."""
        saved = self.saved(name)
        if place.num_elements and place.common(saved.whole) != place:
            raise CheckpointError(f"{self.path}: {name} has {saved.shape}, {place} is beyond")
        target = out.view(place.num_rows, place.num_columns)
        for piece in saved.pieces:
            if common := piece.place.common(place):
                for first, values in self._values(name, piece, saved.dtype, common):
                    _put(target, place, piece.place, first, values)

    def verify(self) -> None:
        """Read every byte; CheckpointError at the first block that is not what was written."""
        for name, saved in self.tensors.items():
            for piece in saved.pieces:
                for _ in self._values(name, piece, saved.dtype, piece.place):
                    pass

    def check_files(self) -> None:
        """CheckpointError unless every file is there, and as long as it was."""
        for name, size in self.index.files.items():
            path = self.path / name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be read ({_why(error)}); use another checkpoint"
                ) from error
            if found != size:
                raise CheckpointError(
                    f"{path}: has {found:,} bytes of {size:,}; use another checkpoint"
                )

    def _values(
        self, name: str, piece: Piece, dtype: torch.dtype, wanted: Place
    ) -> Iterator[tuple[int, Tensor]]:
        """(number of the first element in the piece, elements) of the blocks that have ``wanted``
        rows, in order; each is good until the next is asked for.
        """
        width, at = piece.place.num_columns, piece.place
        size = at.num_elements * dtype.itemsize
        begin = (wanted.row_start - at.row_start) * width * dtype.itemsize
        end = (wanted.row_stop - at.row_start) * width * dtype.itemsize
        path = self.path / piece.file
        buffer = bytearray(min(BLOCK_BYTES, size))
        try:
            with path.open("rb", buffering=0) as file:
                for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                    start = block * BLOCK_BYTES
                    data = memoryview(buffer)[: min(BLOCK_BYTES, size - start)]
                    _read_ahead(file.fileno(), piece.offset + start + len(data))
                    whole = _read(file.fileno(), data, piece.offset + start)
                    if not whole or crc32(data) != piece.crc32[block]:
                        raise CheckpointError(
                            f"{path}: damaged at bytes {piece.offset + start:,} to "
                            f"{piece.offset + start + len(data):,}, which are of {name}: they are "
                            "not what was written; use another checkpoint"
                        )
                    yield start // dtype.itemsize, torch.frombuffer(data, dtype=dtype)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({_why(error)}); use another checkpoint"
            ) from error


def _read_ahead(file: int, offset: int) -> None:
    """Have the system fetch the block behind the one that is read, checked and copied."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(file, offset, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)


def _read(file: int, data: memoryview, offset: int) -> bool:
    """Whether all of ``data`` could be filled."""
    while data:
        count = os.preadv(file, [data], offset)
        if not count:
            return False
        data, offset = data[count:], offset + count
    return True


def _put(target: Tensor, place: Place, at: Place, first: int, values: Tensor) -> None:
    """Elements of the piece at ``at``, from number ``first`` on, into ``target``, which is
    ``place``. A block may begin and end within a row.
    """
    width = at.num_columns
    row, column = divmod(first, width)
    if column:
        head = min(width - column, values.numel())
        _put_rows(target, place, at, row, column, values[:head].unsqueeze(0))
        values, row = values[head:], row + 1
    num_rows = values.numel() // width
    _put_rows(target, place, at, row, 0, values[: num_rows * width].view(num_rows, width))
    if tail := values.numel() - num_rows * width:
        _put_rows(target, place, at, row + num_rows, 0, values[-tail:].unsqueeze(0))


def _put_rows(
    target: Tensor, place: Place, at: Place, row: int, column: int, values: Tensor
) -> None:
    """``values`` [rows, columns], which begin at (row, column) of the piece."""
    given = Place(
        row_start=at.row_start + row,
        row_stop=at.row_start + row + values.shape[0],
        col_start=at.col_start + column,
        col_stop=at.col_start + column + values.shape[1],
    )
    both = given.common(place)
    if both is None:
        return
    target[_within(both, place)].copy_(values[_within(both, given)])


def _within(part: Place, whole: Place) -> tuple[slice, slice]:
    return (
        slice(part.row_start - whole.row_start, part.row_stop - whole.row_start),
        slice(part.col_start - whole.col_start, part.col_stop - whole.col_start),
    )


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()

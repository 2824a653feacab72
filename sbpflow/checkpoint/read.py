"""Reads a checkpoint: whole tensors or rectangles of them. Every block is verified before use.

Reading converts to the requested dtype. A full checkpoint needs memory for one block in addition to
the result. A delta is read through its chain of predecessors: the values of the full checkpoint are
overwritten with the changed rows of each delta, in order. Keys identify the rows of growing tables.
A checkpoint contains only JSON and bytes; nothing in it is imported or executed.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from sbpflow.checkpoint.crc import crc32
from sbpflow.checkpoint.format import (
    BLOCK_BYTES,
    INDEX_FILE,
    Index,
    Patch,
    Piece,
    Previous,
    SavedTensor,
    digest_of,
    from_json,
)
from sbpflow.checkpoint.keys import Addresses, read_by_key
from sbpflow.embedding.plan.tables import Place
from sbpflow.errors import CheckpointError, StoreError
from sbpflow.runtime.files.json_file import JsonError, read_text
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath, any_path

# Maximum number of patches whose row numbers stay in memory; a table has a patch per rank.
_KEPT_ROWS = 64


def with_parent(folder: AnyPath) -> AnyPath:
    """Return ``folder``, resolved if it is ``.`` or ``..``, whose name and parent say nothing."""
    return folder.resolve() if folder.name in ("", "..") else folder


def open_checkpoint(path: str | AnyPath, known: dict[str, Index] | None = None) -> "Checkpoint":
    """Open the checkpoint in folder ``path``; check its index and the sizes of its files.

    ``known`` contains indexes by digest. If a delta continues one of these checkpoints, the index
    is not read again; indexes that are read are added. Raise CheckpointError with the file's name,
    its fault, and a remedy.
    """
    folder = with_parent(any_path(path))
    return _opened(folder, _read_index(folder), {} if known is None else known)


def _read_index(folder: AnyPath) -> Index:
    file = folder / INDEX_FILE
    try:
        text = read_text(file)
    except FileNotFoundError as error:
        fault = f"has no {INDEX_FILE}" if folder.is_dir() else "does not exist"
        raise CheckpointError(
            f"{folder}: {fault}; give the folder of a checkpoint, such as "
            "runs/train/checkpoints/step-1000"
        ) from error
    except JsonError as error:
        raise CheckpointError(f"{error}; use another checkpoint") from error
    return from_json(text, file)


def _opened(folder: AnyPath, index: Index, known: dict[str, Index]) -> "Checkpoint":
    before = None
    if index.previous is not None:
        before = _open_previous(folder, index, index.previous, known)
    checkpoint = Checkpoint(folder, index, before)
    checkpoint.check_files()
    return checkpoint


def _open_previous(
    folder: AnyPath, index: Index, previous: Previous, known: dict[str, Index]
) -> "Checkpoint":
    path = folder.parent / f"step-{previous.step}"
    if previous.step >= index.step:
        raise CheckpointError(
            f"{folder} is a delta that continues step {previous.step}, which is not before its "
            "own step; use another checkpoint"
        )
    earlier, digest = known.get(previous.sha256), previous.sha256
    try:
        if earlier is None:
            earlier = _read_index(path)
            digest = digest_of(earlier)
        before = _opened(path, earlier, known)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is a delta that needs {path}; {error}") from error
    if (digest, before.chain_length) != (previous.sha256, previous.number):
        raise CheckpointError(
            f"{folder} is a delta, but {path} is not the checkpoint that it continues; restore "
            "that checkpoint, or use another one"
        )
    known[digest] = earlier
    if _tables(before, index) != _tables(index, index):
        raise CheckpointError(
            f"{folder} does not have the same tables as {path}, which it "
            "continues; use another checkpoint"
        )
    return before


def _tables(source: "Index | Checkpoint", delta: Index) -> list[object]:
    """Return the shapes and dtypes in ``source`` of the tensors that have patches in ``delta``."""
    forms: list[object] = []
    for name, changed in delta.tensors.items():
        if changed.patches and name in source.tensors:
            saved, grows = source.tensors[name], changed.keys is not None
            forms.append((name, saved.shape[grows:], saved.dtype, saved.column_starts))
    return forms


class Checkpoint:
    """An open checkpoint: ``step``, ``run``, ``tensors``, ``documents``, and ``previous`` are those
    of its ``index``, and ``before`` is the predecessor of a delta.
    """

    def __init__(self, path: AnyPath, index: Index, before: "Checkpoint | None" = None) -> None:
        self.path, self.index, self.before = path, index, before
        self.step, self.run, self.tensors = index.step, index.run, index.tensors
        self.documents, self.previous = index.documents, index.previous
        self._rows: dict[Piece, Tensor] = {}  # Row numbers of the patches of the table read last.
        self._addresses: dict[str, Addresses] = {}

    @property
    def chain_length(self) -> int:
        """Return how many checkpoints must be read to read this one."""
        return 1 if self.before is None else 1 + self.before.chain_length

    @property
    def num_bytes(self) -> int:
        """Return the total size of the checkpoint's files, without the index, in bytes."""
        return sum(self.index.files.values())

    def tensor(
        self,
        name: str,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the tensor ``name`` on the CPU, or some of its rows: [rows, ...].

        If ``columns`` is given, all dims after the first are flattened, and the result is [rows,
        columns]. The step of a slice is ignored.
        """
        saved = self.saved(name)
        whole = saved.whole
        top, bottom, _ = (rows or slice(None)).indices(whole.row_stop)
        left, right, _ = (columns or slice(None)).indices(whole.col_stop)
        bottom, right = max(top, bottom), max(left, right)
        place = Place(top, bottom, left, right)
        out = torch.empty(place.num_rows, place.width, dtype=dtype or saved.dtype)
        self.read_into(name, place, out)
        if columns is not None:
            return out
        return out.reshape((place.num_rows, *saved.shape[1:]) if saved.shape else ())

    def saved(self, name: str) -> SavedTensor:
        """Return the entry of tensor ``name`` in the index; raise CheckpointError if there is
        none.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self.tensors[name]

    def read_into(self, name: str, place: Place, out: Tensor) -> None:
        """Read the rectangle ``place`` into ``out``: [rows, columns] or [rows], any dtype, any
        device.
        """
        saved = self.saved(name)
        if place.num_elements and place.common(saved.whole) != place:
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(saved.shape)}, which does not contain {place}"
            )
        target = out.view(place.num_rows, place.width)
        for piece in saved.pieces:
            if common := piece.place.common(place):
                for first, values in self._values(name, piece, saved.dtype, common):
                    _put(target, place, piece.place, first, values)
        if saved.keys is not None and self.before is not None:
            read_by_key(self, name, place, target)
            return
        if saved.patches and self.before is not None:
            self.before.read_into(name, place, out)
        for rows, columns, values in self.changes(name, place):
            left = place.col_start
            part = target[:, columns.start - left : columns.stop - left]
            numbers = (rows - place.row_start).to(target.device)
            part.index_copy_(0, numbers, values.to(target.device, target.dtype))

    def addresses(self, name: str) -> Addresses:
        """Return the addresses of the keys in tensor ``name``."""
        if name not in self._addresses:
            self._addresses[name] = Addresses(self, name)
        return self._addresses[name]

    def changed_rows(self, name: str) -> Tensor:
        """Return the numbers of the rows of a table's tensor that a delta contains (int64 [n],
        ascending).
        """
        rows = [self._rows_of(name, patch) for patch in self.saved(name).patches]
        return torch.cat(rows).unique() if rows else torch.empty(0, dtype=torch.int64)

    def changes(
        self, name: str, within: Place | None = None
    ) -> Iterator[tuple[Tensor, slice, Tensor]]:
        """Yield a delta's changes: row numbers (int64 [n]), columns, and values ([n, columns]).

        Blocks are yielded in the order of the patches; ``within`` restricts rows and columns.
        """
        saved = self.saved(name)
        for patch in saved.patches:
            common = patch.place.common(within or saved.whole)
            if common is None:
                continue
            rows, whole = self._rows_of(name, patch), patch.values.place
            bounds = torch.tensor([common.row_start, common.row_stop])
            first, end = torch.searchsorted(rows, bounds).tolist()
            left = patch.place.col_start
            own = slice(common.col_start - left, common.col_stop - left)
            step = max(1, BLOCK_BYTES // max(1, whole.width * saved.dtype.itemsize))
            for low in range(first, end, step):
                changed = replace(whole, row_start=low, row_stop=min(low + step, end))
                block = torch.empty(changed.num_rows, changed.width, dtype=saved.dtype)
                for start, part in self._values(name, patch.values, saved.dtype, changed):
                    _put(block, changed, whole, start, part)
                columns = slice(common.col_start, common.col_stop)
                yield rows[low : changed.row_stop], columns, block[:, own]

    def num_changed(self, name: str, within: Place, rows: Tensor) -> Tensor:
        """Return how many columns of ``within`` a delta contains of each of ``rows`` (int64 [n],
        ascending), which are rows of ``within``; n must not be 0.
        """
        counts = torch.zeros_like(rows)
        for patch in self.saved(name).patches:
            common = patch.place.common(within)
            if common is None:
                continue
            changed = self._rows_of(name, patch)
            bounds = torch.stack([rows[0], rows[-1] + 1])
            start, stop = torch.searchsorted(changed, bounds).tolist()
            changed = changed[start:stop]
            index = torch.searchsorted(rows, changed)
            counts[index[rows[index] == changed]] += common.width
        return counts

    def _rows_of(self, name: str, patch: Patch) -> Tensor:
        """Return the row numbers of a patch, which stay in memory while the same table is read."""
        piece = patch.rows
        if piece not in self._rows:
            if len(self._rows) >= _KEPT_ROWS:
                self._rows.clear()
            rows = torch.empty(piece.place.num_rows, dtype=torch.int64)
            for start, part in self._values(f"{name}, rows", piece, rows.dtype, piece.place):
                rows[start : start + part.numel()] = part
            if self.saved(name).keys is not None:
                rows += patch.place.row_start
            in_order = bool((rows[1:] > rows[:-1]).all())
            inside = (
                not len(rows)
                or (patch.place.row_start <= int(rows[0]) and int(rows[-1]) < patch.place.row_stop)
            )  # fmt: skip
            if not (in_order and inside):
                raise CheckpointError(
                    f"{self.path}: {name}: the changed rows are not ascending rows of "
                    f"{patch.place}; use another checkpoint"
                )
            self._rows[piece] = rows
        return self._rows[piece]

    def verify(self) -> None:
        """Read every byte of this folder; raise CheckpointError at the first damaged block."""
        for name, saved in self.tensors.items():
            for piece in (*saved.pieces, *(patch.values for patch in saved.patches)):
                for _ in self._values(name, piece, saved.dtype, piece.place):
                    pass
            for patch in saved.patches:
                self._rows_of(name, patch)

    def check_files(self) -> None:
        """Raise CheckpointError unless every file exists and has the right size."""
        try:
            listed = self.path.sizes() if isinstance(self.path, RemotePath) else None
        except StoreError:  # a failing store does not mean that the checkpoint is damaged
            raise
        except OSError as error:
            raise _unreadable(self.path, error) from error
        for name, size in self.index.files.items():
            path = self.path / name
            try:
                actual = path.stat().st_size if listed is None else listed.get(name, 0)
            except OSError as error:
                raise _unreadable(path, error) from error
            if actual != size:
                raise CheckpointError(
                    f"{path} has {actual:,} bytes instead of {size:,}; use another checkpoint"
                )

    def _values(
        self, name: str, piece: Piece, dtype: torch.dtype, wanted: Place
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the first element in the piece, elements) for each block with ``wanted``
        rows. Blocks are yielded in order; each is valid only until the next one is read.
        """
        width, at = piece.place.width, piece.place
        size = at.num_elements * dtype.itemsize
        begin = (wanted.row_start - at.row_start) * width * dtype.itemsize
        end = (wanted.row_stop - at.row_start) * width * dtype.itemsize
        path = self.path / piece.file
        buffer = bytearray(min(BLOCK_BYTES, size))
        try:
            with _Blocks(path) as file:
                for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                    start = block * BLOCK_BYTES
                    data = memoryview(buffer)[: min(BLOCK_BYTES, size - start)]
                    complete = file.read(data, piece.offset + start)
                    if not complete or crc32(data) != piece.crc32[block]:
                        raise CheckpointError(
                            f"{path}: damaged at bytes {piece.offset + start:,} to "
                            f"{piece.offset + start + len(data):,} of {name}: the checksum does "
                            "not match; use another checkpoint"
                        )
                    yield start // dtype.itemsize, torch.frombuffer(data, dtype=dtype)
        except StoreError:
            raise
        except OSError as error:
            raise _unreadable(path, error) from error


class _Blocks:
    """Reads blocks of a file, in order. In an object store, each block takes one request."""

    def __init__(self, path: AnyPath) -> None:
        self._path, self._file = path, -1

    def __enter__(self) -> Self:
        if not isinstance(self._path, RemotePath):
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def read(self, data: memoryview, offset: int) -> bool:
        """Fill ``data`` from ``offset`` on; return False if the file ends too early."""
        if isinstance(self._path, RemotePath):
            data[:] = self._path.read(offset, offset + len(data))
            return True
        if hasattr(os, "posix_fadvise"):  # Not on macOS.
            # Have the system fetch the next block while this one is checked and copied.
            after = offset + len(data)
            os.posix_fadvise(self._file, after, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        while data:
            count = os.preadv(self._file, [data], offset)
            if not count:
                return False
            data, offset = data[count:], offset + count
        return True


def _put(target: Tensor, place: Place, at: Place, first: int, values: Tensor) -> None:
    """Copy the elements of a block that belong to ``place`` into ``target``.

    ``at`` is the place of the piece, and ``values`` are its elements starting with number
    ``first``. A block may start and end within a row, so it consists of up to three rectangles: the
    end of a row, full rows, and the start of a row.
    """
    width = at.width
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
    """Copy ``values`` [rows, columns], which start at (row, column) of the piece."""
    top, left = at.row_start + row, at.col_start + column
    source = Place(top, top + values.shape[0], left, left + values.shape[1])
    if both := source.common(place):
        target[_within(both, place)].copy_(values[_within(both, source)])


def _within(part: Place, whole: Place) -> tuple[slice, slice]:
    return (
        slice(part.row_start - whole.row_start, part.row_stop - whole.row_start),
        slice(part.col_start - whole.col_start, part.col_stop - whole.col_start),
    )


def _unreadable(path: AnyPath, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        return CheckpointError(
            f"{path.parent} was removed while it was read, as a run does with all but its newest "
            "checkpoints; repeat the command, or give the run a larger checkpoint.keep"
        )
    reason = (error.strerror or str(error)).lower()
    return CheckpointError(f"{path} cannot be read ({reason}); use another checkpoint")

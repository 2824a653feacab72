"""Rewrites a checkpoint as a full checkpoint in which some rows or tensors are changed.

All tensors are written to one file, most of them in portions, to save memory.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from sbpflow.checkpoint.folder import drop_partial, partial_folder, piece_file, publish, tidy
from sbpflow.checkpoint.format import BLOCK_BYTES, Index, SavedTensor
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.checkpoint.write import PieceFile, PieceWriter, bytes_of, named
from sbpflow.runtime.files.remote_path import AnyPath


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write: its entry in the index, and a function that yields all rows in order."""

    saved: SavedTensor
    portions: Callable[[], Iterable[Tensor]]


def unchanged(checkpoint: Checkpoint, name: str) -> NewTensor:
    """Return a tensor of a checkpoint, unchanged."""
    saved = checkpoint.tensors[name]
    blocks = row_blocks(saved, checkpoint.chain_length)
    return NewTensor(saved, lambda: (checkpoint.tensor(name, rows) for rows in blocks))


def kept_rows(checkpoint: Checkpoint, name: str, keeps: Tensor) -> NewTensor:
    """Return a tensor with only those rows for which ``keeps`` [rows] is True."""
    saved = checkpoint.tensors[name]
    blocks = row_blocks(saved, checkpoint.chain_length)
    return NewTensor(
        replace(saved, shape=(int(keeps.sum()), *saved.shape[1:])),
        lambda: (checkpoint.tensor(name, rows)[keeps[rows]] for rows in blocks),
    )


def chosen_rows(checkpoint: Checkpoint, name: str, numbers: Tensor) -> NewTensor:
    """Return a tensor with only the rows ``numbers``. The whole tensor must fit in memory."""
    saved = checkpoint.tensors[name]
    return NewTensor(
        replace(saved, shape=(numbers.numel(), *saved.shape[1:])),
        lambda: [checkpoint.tensor(name)[numbers]],
    )


def given(values: Tensor) -> NewTensor:
    """Return a tensor with these values."""
    return NewTensor(
        SavedTensor(shape=tuple(values.shape), dtype=values.dtype, pieces=()), lambda: [values]
    )


def row_blocks(saved: SavedTensor, num_blocks: int) -> list[slice]:
    """Divide the rows of a tensor into portions of about ``num_blocks`` blocks."""
    whole = saved.whole
    row_bytes = max(1, whole.width * saved.dtype.itemsize)
    step = max(1, num_blocks * BLOCK_BYTES // row_bytes)
    starts = range(0, whole.row_stop, step)
    return [slice(start, min(start + step, whole.row_stop)) for start in starts]


def write_full(folder: AnyPath, index: Index, tensors: Mapping[str, NewTensor]) -> int:
    """Write a full checkpoint to ``folder``, replacing any existing one; return its size in bytes.

    The step, run, and documents are taken from ``index``. No files are left if the tensors cannot
    be written.
    """
    nonce = uuid.uuid4().hex[:8]
    partial = partial_folder(folder, index.step, nonce)
    tidy(folder)
    try:
        with named(partial):
            partial.mkdir(parents=True)
        file = piece_file(partial, 0, nonce)
        written, size = _write(file, tensors), int(file.stat().st_size)
    except BaseException:
        drop_partial(partial, nonce)
        raise
    new = replace(index, tensors=written, files={file.name: size}, previous=None)
    publish(folder, partial, new)  # after an error at a URL, the index may exist and need the file
    return size


def _write(path: AnyPath, tensors: Mapping[str, NewTensor]) -> dict[str, SavedTensor]:
    written: dict[str, SavedTensor] = {}
    with PieceFile(path) as file:
        for name, new in tensors.items():
            whole = new.saved.whole
            writer = PieceWriter(file, whole, whole.num_elements * new.saved.dtype.itemsize)
            for values in new.portions():
                writer.write(bytes_of(values))
            written[name] = replace(new.saved, pieces=(writer.done(),), patches=())
    return written

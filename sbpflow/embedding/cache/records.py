"""Stores records. A record is a row with its optimizer state, in one contiguous block.

Records consist of words. The word type is the largest integer type whose size divides the row size
of every tensor.
"""

import errno
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sbpflow.embedding.cache.remote_records import RemoteRecords, Servers
from sbpflow.embedding.cache.slot_layout import Array, find_loops, warm_up_copies
from sbpflow.embedding.plan.row_storage import Outside, StorageRule
from sbpflow.errors import ConfigError

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class RecordLayout:
    """Where each tensor of a row is stored in the row's record. Only the dtypes of ``tensors`` and
    the shapes of their rows matter, not their numbers of rows.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Sorting by decreasing item size aligns every tensor to its item size.
        self.like = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        sizes = {name: _row_bytes(tensor) for name, tensor in self.like.items()}
        word = math.gcd(8, *sizes.values())
        self.word = _WORDS[word]
        self.columns: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            self.columns[name] = slice(start, start + size // word)
            start += size // word
        self.num_words = start
        self.num_bytes = start * word

    def empty(self, num_rows: int) -> Array:
        """Allocate memory for records [num_rows, words]."""
        return torch.empty(num_rows, self.num_words, dtype=self.word).numpy()

    def words(self, tensor: Tensor) -> Tensor:
        """View a contiguous tensor of rows as words [rows, words per row]."""
        return tensor.view(tensor.shape[0], -1).view(self.word)

    def values(self, records: Array, name: str) -> Tensor:
        """Return the values [n, ..] of the tensor ``name`` from ``records`` [n, words]."""
        like = self.like[name]
        # ``contiguous()`` would keep the stride of a dim of length 1. If that stride is odd, the
        # tensor cannot be viewed as another dtype, so the words are copied instead.
        words = torch.from_numpy(records[:, self.columns[name]].copy())
        return words.view(like.dtype).view(len(records), *like.shape[1:])

    def pack(self, values: Mapping[str, Tensor], records: Array) -> None:
        """Write ``values`` (by tensor name) into ``records`` [n, words]."""
        target = torch.from_numpy(records)
        for name, value in values.items():
            target[:, self.columns[name]] = self.words(value.cpu().contiguous())


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.itemsize


class RecordStore(Protocol):
    """Keeps the records of all rows in slower memory. Several threads can call its methods at
    once.
    """

    @property
    def num_bytes(self) -> int:
        """Return the size of all records in bytes."""
        ...

    def read(self, rows: Array, out: Array) -> None:
        """Copy the records of ``rows`` [n] to ``out`` [n, words]; the contents of records that were
        never written are undefined.
        """

    def write(self, rows: Array, records: Array) -> None:
        """Set the records of ``rows``, which must be distinct."""


class MappedRecords:
    """Keeps records in memory, or in a file that is mapped into memory."""

    def __init__(self, records: Array) -> None:
        self._records = records
        self._loops = find_loops()
        warm_up_copies(records)

    @property
    def num_bytes(self) -> int:
        return self._records.nbytes

    def read(self, rows: Array, out: Array) -> None:
        self._loops.take(self._records, rows, out, 0)

    def write(self, rows: Array, records: Array) -> None:
        self._loops.put(self._records, rows, records, 0)


class PinnedRecords(MappedRecords):
    """Keeps records in pinned host memory, which a GPU also reads and writes, as ``on_device``
    [rows, words].
    """

    def __init__(self, num_rows: int, layout: RecordLayout, device: torch.device) -> None:
        shape = (num_rows, layout.num_words)
        memory = torch.empty(shape, dtype=layout.word, pin_memory=True)
        super().__init__(memory.numpy())
        self.on_device = as_device_memory(memory, device)


class _DeviceMemory:
    """Describes ``memory`` as memory of a GPU, and keeps it allocated."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": memory[:0].numpy().dtype.str,
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def as_device_memory(pinned: Tensor, device: torch.device) -> Tensor:
    """Return pinned host memory as a tensor on ``device``; its kernels access the memory over the
    bus.
    """
    if not pinned.numel():
        return torch.empty(pinned.shape, dtype=pinned.dtype, device=device)
    view = torch.as_tensor(_DeviceMemory(pinned), device=device)
    if view.data_ptr() != pinned.data_ptr():
        raise RuntimeError(f"torch copied pinned memory to {device}; it should view the memory")
    return view


def host_records(
    num_rows: int, layout: RecordLayout, device: torch.device | None = None
) -> MappedRecords:
    """Allocate records in host memory, for slots on ``device`` (by default, on CPU)."""
    if device is not None and device.type == "cuda":
        return PinnedRecords(num_rows, layout, device)
    shape = (num_rows, layout.num_words)
    return MappedRecords(torch.empty(shape, dtype=layout.word).numpy())


def file_records(num_rows: int, layout: RecordLayout, folder: Path, key: str) -> MappedRecords:
    """Create records in an unnamed file in ``folder``; the operating system deletes the file when
    the process ends.

    The whole file is allocated here, because writing to a mapped file on a full disk would kill the
    process. Raise ConfigError with ``key`` if the allocation fails.
    """
    size = max(num_rows * layout.num_bytes, 1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            mapped = mmap.mmap(file, size)
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(_file_message(folder, size, key, error)) from error
    mapped.madvise(mmap.MADV_RANDOM)
    words: Any = torch.empty(0, dtype=layout.word).numpy().dtype
    array = np.frombuffer(mapped, words, num_rows * layout.num_words)
    return MappedRecords(array.reshape(num_rows, layout.num_words))


class RecordRequest(NamedTuple):
    """The arguments for creating the records of a table on this rank.

    ``rule`` is the storage rule, and ``key`` its configuration key. Each request on a rank has a
    different ``number``. ``servers`` is None for a job that only predicts: such a job must not
    disturb a run that uses the servers, so its records go to a file.
    """

    num_rows: int
    layout: RecordLayout
    rule: StorageRule
    key: str
    device: torch.device
    number: int
    servers: Servers | None


def _in_file(new: RecordRequest) -> RecordStore:
    return file_records(new.num_rows, new.layout, new.rule.path or Path(), new.key)


def _on_servers(new: RecordRequest) -> RecordStore:
    if new.servers is None:
        return _in_file(new)
    return RemoteRecords(new.servers, new.number, new.num_rows, new.layout.empty(0))


RECORDS: dict[Outside, Callable[[RecordRequest], RecordStore]] = {
    "host": lambda new: host_records(new.num_rows, new.layout, new.device),
    "file": _in_file,
    "servers": _on_servers,
}


def _file_message(folder: Path, size: int, key: str, error: OSError) -> str:
    reason = (error.strerror or "cannot be used").lower()
    advice = "use a folder on a local disk that you can write to, such as /scratch"
    if folder.is_dir() and error.errno == errno.EFBIG:
        advice = "raise the limit on file sizes (`ulimit -f`), or use a file system without it"
    elif folder.is_dir() and error.errno in (errno.ENOSPC, errno.EDQUOT):
        usage = os.statvfs(folder)
        reason += f"; only {usage.f_bavail * usage.f_frsize / 1e9:.2f} GB is free"
        advice = "use a folder on a larger disk"
    return (
        f"{key}.path: {folder} cannot hold a file of {size / 1e9:.2f} GB for the rows of this "
        f"rank ({reason}); {advice}"
    )

"""Reuses the CPU buffers that conversions use for packing and receiving.

For a new buffer of several MiB, page faults cost about as much as copying data into the buffer. On
CUDA, buffers are not kept, because torch's allocator already caches memory.
"""

import math
from threading import Lock

import torch
from torch import Tensor

MAX_KEPT_BYTES = 256 * 1024 * 1024  # maximum total size of free buffers
# smaller buffers are not kept: allocating them is fast, because their memory stays mapped
MIN_BYTES = 1024 * 1024


class Staging:
    """Keeps an executor's free buffers, at most MAX_KEPT_BYTES in total; thread-safe."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = Lock()

    @property
    def kept_bytes(self) -> int:
        """Return the size of all free buffers."""
        return sum(buffer.numel() for buffer in self._free)

    def loan(self) -> "Loan":
        """Return a source of buffers for one step, which gives the buffers back at its end."""
        return Loan(self)

    def pop(self, num_bytes: int) -> Tensor:
        """Return the smallest free buffer of at least ``num_bytes``, or a new buffer."""
        with self._lock:
            fitting = [n for n, buffer in enumerate(self._free) if buffer.numel() >= num_bytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda n: self._free[n].numel()))
        return torch.empty(num_bytes, dtype=torch.uint8)

    def push(self, buffers: list[Tensor]) -> None:
        """Keep buffers for later use; beyond the size limit, drop the smallest buffers."""
        with self._lock:
            self._free += buffers
            while self.kept_bytes > MAX_KEPT_BYTES:
                smallest = min(range(len(self._free)), key=lambda n: self._free[n].numel())
                del self._free[smallest]


class Loan:
    """Lends buffers until ``give_back``; after that, views of the buffers must not be used."""

    __slots__ = ("_lent", "_staging")

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._lent: list[Tensor] = []

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a contiguous buffer of ``shape`` with the dtype and device of ``like``."""
        num_bytes = math.prod(shape) * like.itemsize
        if num_bytes < MIN_BYTES or like.device.type != "cpu":
            return like.new_empty(shape)
        buffer = self._staging.pop(num_bytes)
        self._lent.append(buffer)
        return buffer[:num_bytes].view(like.dtype).view(shape)

    def copy(self, view: Tensor) -> Tensor:
        """Return ``view`` itself if it is contiguous, else a contiguous copy in a lent buffer."""
        if view.numel() * view.itemsize < MIN_BYTES or view.is_contiguous():
            return view.contiguous()
        return self.take(view.shape, view).copy_(view)

    def give_back(self) -> None:
        """Give back all buffers that ``take`` returned."""
        if self._lent:
            self._staging.push(self._lent)
            self._lent = []

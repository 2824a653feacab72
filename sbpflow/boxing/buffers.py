"""Reuses the CPU buffers in which conversions pack and receive data.

In a new buffer of several MiB, page faults take about as long as a copy into the buffer. On CUDA,
buffers are not kept, because torch's allocator already caches memory.
"""

import math
from threading import Lock

import torch
from torch import Tensor

MAX_KEPT_BYTES = 256 * 1024 * 1024  # Maximum total size of free buffers.
# Smaller buffers are not kept, because malloc reuses their memory quickly without unmapping it.
MIN_BYTES = 1024 * 1024


class Staging:
    """Keeps an executor's free buffers, at most MAX_KEPT_BYTES in total; thread-safe."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = Lock()

    @property
    def kept_bytes(self) -> int:
        """Return the total size of the free buffers in bytes."""
        return sum(buffer.numel() for buffer in self._free)

    def pop(self, num_bytes: int) -> Tensor:
        """Return the smallest free buffer of at least ``num_bytes``, or a new buffer."""
        with self._lock:
            fitting = [n for n, buffer in enumerate(self._free) if buffer.numel() >= num_bytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda n: self._free[n].numel()))
        return torch.empty(num_bytes, dtype=torch.uint8)

    def push(self, buffers: list[Tensor]) -> None:
        """Keep buffers for later use; if the total size exceeds the limit, drop the smallest
        buffers.
        """
        with self._lock:
            self._free += buffers
            while self.kept_bytes > MAX_KEPT_BYTES:
                smallest = min(range(len(self._free)), key=lambda n: self._free[n].numel())
                del self._free[smallest]


class Loan:
    """Lends buffers to one step until ``give_back``; after that, their views must not be used."""

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
        """Return ``view`` itself if it is contiguous, else a contiguous copy of it, which is in a
        borrowed buffer if it is large and on CPU.
        """
        if view.numel() * view.itemsize < MIN_BYTES or view.is_contiguous():
            return view.contiguous()
        return self.take(view.shape, view).copy_(view)

    def give_back(self) -> None:
        """Give back all borrowed buffers."""
        if self._lent:
            self._staging.push(self._lent)
            self._lent = []

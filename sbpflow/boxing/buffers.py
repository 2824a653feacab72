"""Reuses the CPU buffers that conversions pack into and receive into.

A new buffer of some MiB causes page faults, which cost about as much as the copy into it. On CUDA
nothing is kept, since torch has a caching allocator there.
"""

import math
from threading import Lock

import torch
from torch import Tensor

MAX_KEPT_BYTES = 256 * 1024 * 1024  # of free buffers; more are freed
MIN_BYTES = 1024 * 1024  # smaller buffers are as fast to allocate, since their memory stays mapped


class Staging:
    """The free buffers of one executor, at most MAX_KEPT_BYTES; thread-safe."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = Lock()

    @property
    def kept_bytes(self) -> int:
        """The size of all free buffers."""
        return sum(buffer.numel() for buffer in self._free)

    def loan(self) -> "Loan":
        """A source of buffers for one step; return them after the step."""
        return Loan(self)

    def pop(self, num_bytes: int) -> Tensor:
        """The smallest free buffer of at least ``num_bytes``, or a new one."""
        with self._lock:
            fitting = [n for n, buffer in enumerate(self._free) if buffer.numel() >= num_bytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda n: self._free[n].numel()))
        return torch.empty(num_bytes, dtype=torch.uint8)

    def push(self, buffers: list[Tensor]) -> None:
        """Keep buffers for later; beyond the limit, drop the smallest ones."""
        with self._lock:
            self._free += buffers
            while self.kept_bytes > MAX_KEPT_BYTES:
                smallest = min(range(len(self._free)), key=lambda n: self._free[n].numel())
                del self._free[smallest]


class Loan:
    """Lends buffers until ``give_back``, after which no view of them may be used."""

    __slots__ = ("_lent", "_staging")

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._lent: list[Tensor] = []

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous buffer of ``shape``, of the dtype and device of ``like``."""
        num_bytes = math.prod(shape) * like.itemsize
        if num_bytes < MIN_BYTES or like.device.type != "cpu":
            return like.new_empty(shape)
        buffer = self._staging.pop(num_bytes)
        self._lent.append(buffer)
        return buffer[:num_bytes].view(like.dtype).view(shape)

    def copy(self, view: Tensor) -> Tensor:
        """A contiguous tensor equal to ``view``: a lent copy, or itself if it is contiguous."""
        if view.numel() * view.itemsize < MIN_BYTES or view.is_contiguous():
            return view.contiguous()
        return self.take(view.shape, view).copy_(view)

    def give_back(self) -> None:
        """Return all buffers taken."""
        if self._lent:
            self._staging.push(self._lent)
            self._lent = []

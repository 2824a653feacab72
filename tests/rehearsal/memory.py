"""Tracks memory that must not be accessed: both ends of transfers, and host copies in flight.

A real device would sometimes read garbage there. The rehearsal rejects ops that access such memory,
naming the line that started the transfer.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class RefusedError(RuntimeError):
    """Raised where CUDA or NCCL would raise an error, block, or compute garbage."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A transfer that was started but not yet waited for; ``tensors`` are host tensors."""

    what: str
    sent: tuple[Tensor, ...]
    received: tuple[Tensor, ...]
    kept: tuple[object, ...] = ()  # memory that must not be freed before the wait


IN_FLIGHT: list[InFlight] = []


def check_access(func: object, host: Tensor, *, writes: bool) -> None:
    """Raise RefusedError if access to ``host`` conflicts with a transfer that uses the same
    memory."""
    for transfer in IN_FLIGHT:
        if any(overlap(host, other) for other in transfer.received):
            verb = "changes" if writes else "reads"
            raise RefusedError(f"{func} {verb} memory that {transfer.what} writes, before its wait")
        if writes and any(overlap(host, other) for other in transfer.sent):
            raise RefusedError(f"{func} changes memory that {transfer.what} sends, before its wait")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors share an element."""
    if not a.numel() or not b.numel():
        return False
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    if a1 <= b0 or b1 <= a0:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    return bool(set(_bytes(a)) & set(_bytes(b)))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte past the end."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize


def _bytes(tensor: Tensor) -> Sequence[int]:
    """Return the addresses of all bytes in the elements."""
    offsets = torch.zeros((), dtype=torch.int64)
    for dim, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.ndim
        shape[dim] = length
        offsets = offsets + (torch.arange(length) * stride * tensor.itemsize).view(shape)
    starts = tensor.data_ptr() + offsets.reshape(-1, 1)
    return (starts + torch.arange(tensor.itemsize)).reshape(-1).tolist()


class Pinned:
    """Tracks pinned host memory, and the copies into it that have not arrived.

    The contents are undefined until an event recorded after the copy has been waited for. Threads
    can start copies and wait for them concurrently.
    """

    def __init__(self) -> None:
        # keeps the memory alive, so that its address is not reused
        self._blocks: dict[int, torch.UntypedStorage] = {}
        self._coming: list[tuple[int, int, Tensor, Tensor]] = []
        self._lock = threading.Lock()

    def add(self, host: Tensor) -> Tensor:
        storage = host.untyped_storage()
        self._blocks[storage.data_ptr()] = storage
        return host

    def has(self, host: Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._blocks

    def copy_later(self, target: Tensor, values: Tensor, stream: int, count: int) -> None:
        """Set ``target`` to ``values`` once the host has waited for op ``count`` of ``stream``."""
        values = values.clone()
        with self._lock:
            self._coming.append((stream, count, target, values))
            if target.dtype.is_floating_point:
                target.fill_(float("nan"))
            elif target.dtype != torch.bool:
                target.fill_(torch.iinfo(target.dtype).max - 1)

    def arrive(self, sees: Mapping[int, int] | None = None) -> None:
        """Finish all copies, or only the copies that a wait for ``sees`` covers."""
        with self._lock:
            left = []
            for stream, count, target, values in self._coming:
                if sees is None or count <= sees.get(stream, 0):
                    target.copy_(values)
                else:
                    left.append((stream, count, target, values))
            self._coming = left


PINNED = Pinned()

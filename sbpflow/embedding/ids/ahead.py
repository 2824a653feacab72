"""A CUDA stream for ids, so that they are checked, sent, and sorted during the dense part.

docs/decisions/gpu.md explains the synchronization and the lifetime of the memory. On CPU there is
no stream: everything runs at once, in program order.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import Tensor

from sbpflow.embedding.ids.batch_ids import Bags, BatchIds, Ids, Lists


class IdStream:
    """Runs sections of id work; the current stream can use their results after ``join``.

    A section starts after all work submitted to the current stream so far. Therefore memory that a
    section allocated and that was freed outside is safe to reuse in a later section.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def exists(self) -> bool:
        """True if sections run concurrently with the current stream."""
        return self._stream is not None

    @contextmanager
    def section(self, ids: Ids | None = None) -> Generator[None]:
        """A section that works on ``ids``, which were created outside."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in () if ids is None else _tensors(ids):
            if tensor.is_cuda:  # ids on another device are about to be rejected
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for all sections so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _tensors(ids: Ids) -> Iterator[Tensor]:
    """All tensors in a batch's ids."""
    parts = (ids.matrix, ids.lists) if isinstance(ids, BatchIds) else (ids,)
    for part in ids.values() if isinstance(ids, Mapping) else parts:
        is_nested = isinstance(part, Bags | Lists)
        for value in [getattr(part, f.name) for f in fields(part)] if is_nested else [part]:
            if isinstance(value, Tensor):  # a caller's mapping can hold anything until checked
                yield value

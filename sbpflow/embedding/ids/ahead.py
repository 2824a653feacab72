"""Runs id work in its own CUDA stream, so that ids are checked, sent, and sorted while the dense
part of the model runs.

docs/decisions/gpu.md explains the synchronization and the lifetime of memory. On CPU, there is no
stream: all work runs immediately, in program order.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields

import torch
from torch import Tensor

from sbpflow.embedding.ids.batch_ids import Bags, BatchIds, Ids, Lists


class IdStream:
    """Runs sections of id work; the current stream may use their results after ``join``.

    A section starts only after all work that was previously submitted to the current stream.
    Therefore, once memory that a section allocated has been used in the current stream and freed, a
    later section can safely reuse it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def exists(self) -> bool:
        """Return True if there is a stream, so that sections run concurrently with the current
        stream.
        """
        return self._stream is not None

    def section(self, ids: Ids | None = None) -> AbstractContextManager[None]:
        """Open a section that works on ``ids``, which were created outside the section."""
        return nullcontext() if self._stream is None else self._within(self._stream, ids)

    @contextmanager
    def _within(self, stream: torch.cuda.Stream, ids: Ids | None) -> Generator[None]:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in () if ids is None else _tensors(ids):
            if tensor.is_cuda:  # ids on another device are rejected later
                tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for all earlier sections."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _tensors(ids: Ids) -> Iterator[Tensor]:
    """Yield all tensors in a batch's ids."""
    parts = (ids.matrix, ids.lists) if isinstance(ids, BatchIds) else (ids,)
    for part in ids.values() if isinstance(ids, Mapping) else parts:
        is_nested = isinstance(part, Bags | Lists)
        for value in [getattr(part, f.name) for f in fields(part)] if is_nested else [part]:
            # The values of a mapping are not checked yet and may have any type.
            if isinstance(value, Tensor):
                yield value

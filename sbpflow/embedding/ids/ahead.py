"""A CUDA stream of its own for ids: checked, sent, received and sorted beside the dense part.

Who waits for what, and how long memory stays, is in docs/decisions/gpu.md. On a CPU there is none:
what is told is done at once, in the order in which it is told.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sbpflow.embedding.ids.batch_ids import Bags, BatchIds, Ids


class IdStream:
    """Sections of work on ids; what they make is used by the current stream after ``join``.

    Every section begins after all that the current stream was told before. So memory that a section
    made, and that was used and given back outside, is free when a later section takes it again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def exists(self) -> bool:
        """Whether sections run beside what is around them."""
        return self._stream is not None

    @contextmanager
    def section(self, ids: Ids | None = None) -> Generator[None]:
        """Work on ``ids``, which are made outside."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in () if ids is None else _tensors(ids):
            if tensor.is_cuda:  # others are about to be refused
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream waits for all sections so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _tensors(ids: Ids) -> Iterator[Tensor]:
    """All that a batch's ids consist of."""
    if isinstance(ids, Tensor):
        yield ids
        return
    if isinstance(ids, BatchIds):
        yield ids.matrix
        parts = (
            () if ids.lists is None else (ids.lists.lengths, ids.lists.values, ids.lists.weights)
        )
    else:
        parts = [
            part
            for value in ids.values()
            for part in (
                (value.values, value.offsets, value.weights)
                if isinstance(value, Bags)
                else (value,)
            )
        ]
    for part in parts:
        if isinstance(part, Tensor):  # a caller's mapping may hold anything, and is told what
            yield part

"""Reads all counts that the host needs before rows can be sent, in a single copy from the device.

The counts are the sizes of the id lists on each rank and, for each group, ``Group.counts``. On
CUDA, the id stream copies the counts as soon as they are available, so neither the host nor the
previous batch waits. On CPU, waiting for a transfer blocks the host, so the counts are read only
when they are needed.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead


class Counted(Protocol):
    """An object that receives its counts as Python integers."""

    counts: list[int]


class CountsUnderWay:
    """The counts of one batch. ``sources`` pairs each receiver with a function that returns its
    counts as a tensor.
    """

    def __init__(
        self, sources: Sequence[tuple[Counted, Callable[[], Tensor | None]]], *, at_once: bool
    ) -> None:
        self._sources = sources
        self._read: AsyncScalarRead | None = None
        self._counts: list[Tensor | None] | None = None
        if at_once:
            self.copy()

    @property
    def are_known(self) -> bool:
        """Return True if there is no count to wait for."""
        return self._counts is not None and self._read is None

    def copy(self) -> None:
        """Start copying the counts to the host."""
        self._counts = [take() for _, take in self._sources]
        tensors = [counts for counts in self._counts if counts is not None]
        self._read = AsyncScalarRead(torch.cat(tensors)) if tensors else None

    def finish(self) -> None:
        """Set ``counts`` of every receiver."""
        if self._counts is None:
            self.copy()
        numbers: list[int] = [] if self._read is None else self._read.wait().tolist()
        start = 0
        for (source, _), counts in zip(self._sources, self._counts or [], strict=True):
            size = 0 if counts is None else counts.numel()
            source.counts, start = numbers[start : start + size], start + size
        self._counts = self._read = None

"""What the host must know of a batch before its rows can travel: everything in one read.

That is how many ids the lists hold for each rank, and the counts of all groups.

On CUDA they are copied as soon as they are there, on the stream of the ids, so that neither the
host nor the batch before waits; on CPU they are read where they are needed, for a transfer's wait
there is the host's.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead


class Counted(Protocol):
    """What is given its numbers as the host has read them."""

    counts: list[int]


class CountsUnderWay:
    """One batch's counts: of each of ``sources`` as its ranks told them, taken by a call of what
    stands beside it.
    """

    def __init__(
        self, sources: Sequence[tuple[Counted, Callable[[], Tensor | None]]], *, at_once: bool
    ) -> None:
        self._sources = sources
        self._late: AsyncScalarRead | None = None
        self._found: list[Tensor | None] | None = None
        if at_once:
            self.copy()

    @property
    def are_known(self) -> bool:
        """Whether there is nothing that the host would wait for."""
        return self._found is not None and self._late is None

    def copy(self) -> None:
        """Send them to the host."""
        self._found = [take() for _, take in self._sources]
        told = [counts for counts in self._found if counts is not None]
        self._late = AsyncScalarRead(torch.cat(told)) if told else None

    def finish(self) -> None:
        """Give every source its ``counts``."""
        if self._found is None:
            self.copy()
        numbers: list[int] = [] if self._late is None else self._late.wait().tolist()
        at = 0
        for (source, _), counts in zip(self._sources, self._found or [], strict=True):
            size = 0 if counts is None else counts.numel()
            source.counts, at = numbers[at : at + size], at + size
        self._found = self._late = None

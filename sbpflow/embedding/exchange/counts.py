"""What the host must know of a batch before its rows can travel: everything in one read.

That is how many ids the lists hold for each rank, and the counts of all groups.

On CUDA they are copied as soon as they are there, on the stream of the ids, so that neither the
host nor the batch before waits; on CPU they are read where they are needed, for a transfer's wait
there is the host's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sbpflow.embedding.exchange.base import AnyGroup, GroupInFlight
from sbpflow.embedding.exchange.id_transfer import IdsUnderWay
from sbpflow.runtime.late_read import LateRead


class CountReader:
    """Reads the counts of batch after batch, for the groups of a collection."""

    def __init__(self, groups: Sequence[AnyGroup], device: torch.device) -> None:
        self._groups = groups
        self._at_once = device.type == "cuda"

    def start(self, ids: IdsUnderWay, parts: Sequence[GroupInFlight]) -> "CountsUnderWay":
        """After the ids' and the groups' ``begin``."""
        under_way = CountsUnderWay(self, ids, parts)
        if self._at_once:
            under_way.copy()
        return under_way

    def counts_of(self, ids: IdsUnderWay, parts: Sequence[GroupInFlight]) -> list[Tensor | None]:
        """Of the lists of ids, then of each group, as its ranks told them."""
        groups = zip(self._groups, parts, strict=True)
        return [ids.sizes(), *(group.counts(part) for group, part in groups)]


class CountsUnderWay:
    """One batch's counts."""

    def __init__(
        self, reader: CountReader, ids: IdsUnderWay, parts: Sequence[GroupInFlight]
    ) -> None:
        self._reader, self._ids, self._parts = reader, ids, parts
        self._late: LateRead | None = None
        self._found: list[Tensor | None] | None = None

    @property
    def are_known(self) -> bool:
        """Whether there is nothing that the host would wait for."""
        return self._found is not None and self._late is None

    def copy(self) -> None:
        """Send them to the host."""
        self._found = self._reader.counts_of(self._ids, self._parts)
        told = [counts for counts in self._found if counts is not None]
        self._late = LateRead(torch.cat(told)) if told else None

    def finish(self) -> None:
        """Give the ids and every group's part their ``counts``."""
        if self._found is None:
            self.copy()
        numbers: list[int] = [] if self._late is None else self._late.wait().tolist()
        at = 0
        for part, counts in zip((self._ids, *self._parts), self._found or [], strict=True):
            size = 0 if counts is None else counts.numel()
            part.counts, at = numbers[at : at + size], at + size
        self._found = self._late = None

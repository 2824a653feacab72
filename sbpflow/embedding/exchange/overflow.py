"""Batches whose rows do not fit in the buffers of ``padded``: found late, and sent again.

What the ranks learn of a batch is equal on all of them, so they all send it again or none does:
before any of its rows is read, with transfers of the sizes that it needs, for which the host waits.
"""

import logging
from collections.abc import Sequence

import torch

from sbpflow.embedding.exchange.base import AnyGroup, GroupInFlight
from sbpflow.embedding.exchange.rows import RowGroup, RowsInFlight
from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead

logger = logging.getLogger(__name__)


class PaddedGroups:
    """Those of a collection's groups that use buffers."""

    def __init__(self, groups: Sequence[AnyGroup]) -> None:
        self._groups = {
            index: group
            for index, group in enumerate(groups)
            if isinstance(group, RowGroup) and group.capacity is not None
        }
        self._told: dict[int, int] = {}  # the most rows that was said to be too many

    def ask(self, parts: Sequence[GroupInFlight]) -> AsyncScalarRead | None:
        """After ``receive_ids``: how many rows some rank names to another in each group, on its way
        to the host; ``None`` where there is room for all that may be.
        """
        found = [part.most for part in self._asked(parts).values() if part.most is not None]
        return AsyncScalarRead(torch.cat(found)) if found else None

    def overflowing(self, parts: Sequence[GroupInFlight], late: AsyncScalarRead) -> list[int]:
        """Before ``lookup``: the groups that have left rows of their parts out."""
        asked, found = self._asked(parts), list[int]()
        for (index, part), most in zip(asked.items(), late.wait().tolist(), strict=True):
            room = part.asked[0]
            if most > room:
                self._warn(index, part, most, room)
                found.append(index)
        return found

    def send_again(self, parts: list[GroupInFlight], groups: Sequence[int]) -> None:
        """Put others in the place of the parts of these groups, with all their rows."""
        asked = self._asked(parts)
        for index in groups:
            parts[index] = self._again(self._groups[index], asked[index])

    def describe(self) -> list[str]:
        """A line for each group: its tables and its share."""
        return [
            f"rows of {', '.join(table.name for table in group.plan.stacks[0].tables)} travel in "
            f"buffers of {group.capacity.share:g} of the most that they can be"
            for group in self._groups.values()
            if group.capacity is not None
        ]

    def _asked(self, parts: Sequence[GroupInFlight]) -> dict[int, RowsInFlight]:
        """Parts whose rows may have been too many."""
        mine = {index: parts[index] for index in self._groups}
        return {
            index: part
            for index, part in mine.items()
            if isinstance(part, RowsInFlight) and part.most is not None
        }

    def _again(self, group: RowGroup, part: RowsInFlight) -> RowsInFlight:
        again = group.begin_again(part)
        counts = group.counts(again)
        if counts is None:
            raise RuntimeError(f"{group.plan.name}: no counts of a batch that does not fit")
        again.counts = AsyncScalarRead(counts).wait().tolist()
        group.exchange_ids(again)
        group.receive_ids(again)
        group.sort_ahead(again)
        return again

    def _warn(self, index: int, part: RowsInFlight, most: int, room: int) -> None:
        """Once, and again where twice as much is needed."""
        group = self._groups[index]
        if group.capacity is None or group.world.rank != 0 or most < 2 * self._told.get(index, 0):
            return
        self._told[index] = most
        logger.warning(
            "parallel.row_buffer_fraction: %g has room for %d rows of %s between two ranks, a "
            "batch of %d names %d: it was sent again with transfers of that size, for which the "
            "host waits; %g has room for it",
            group.capacity.share,
            room,
            group.plan.name,
            part.batch_size,
            most,
            group.capacity.share_of(most, part.batch_size),
        )

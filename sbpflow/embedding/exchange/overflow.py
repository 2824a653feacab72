"""Repeats the id exchange of batches whose rows do not fit in the fixed-size buffers of ``padded``.

All ranks get the same counts, so either all ranks repeat the exchange or none does. The exchange is
repeated before any row is read. The repeated exchange uses exact sizes, for which the host must
wait.
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch

from sbpflow.embedding.exchange.base import AnyGroup, GroupInFlight
from sbpflow.embedding.exchange.counts import CountsUnderWay
from sbpflow.embedding.exchange.rows import RowGroup, RowsInFlight
from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead

logger = logging.getLogger(__name__)


class PaddedGroups:
    """The groups of a collection that use fixed-size buffers."""

    def __init__(self, groups: Sequence[AnyGroup]) -> None:
        self._groups = {
            index: (group, group.capacity)
            for index, group in enumerate(groups)
            if isinstance(group, RowGroup) and group.capacity is not None
        }
        # For each group, the largest number of rows that a warning has reported so far.
        self._warned: dict[int, int] = {}

    def ask(self, parts: Sequence[GroupInFlight]) -> AsyncScalarRead | None:
        """Start reading the largest number of rows that one rank requests from another, for each
        group.

        Call this method after ``receive_ids``. Return ``None`` if the buffers are large enough for
        any batch.
        """
        limited = self._limited(parts).values()
        most = [part.most_requested for part in limited if part.most_requested is not None]
        return AsyncScalarRead(torch.cat(most)) if most else None

    def overflowing(self, parts: Sequence[GroupInFlight], read: AsyncScalarRead) -> list[int]:
        """Return the groups whose buffers were too small; ``read`` is the result of ``ask``."""
        groups = list[int]()
        limited = self._limited(parts).items()
        for (index, part), most in zip(limited, read.wait().tolist(), strict=True):
            room = part.requested[0]
            if most > room:
                self._warn(index, part, most, room)
                groups.append(index)
        return groups

    def send_again(self, parts: list[GroupInFlight], groups: Sequence[int]) -> None:
        """Repeat the id exchange of ``groups`` without fixed-size buffers, and replace the entries
        of these groups in ``parts``.
        """
        limited = self._limited(parts)
        for index in groups:
            group, _ = self._groups[index]
            parts[index] = again = group.begin_again(limited[index])
            CountsUnderWay([(again, partial(group.counts, again))], at_once=False).finish()
            group.exchange_ids(again)
            group.receive_ids(again)
            group.sort_ahead(again)

    def describe(self) -> list[str]:
        """Return a line for each group, with its tables and its buffer size."""
        return [
            f"rows of {', '.join(table.name for table in group.plan.stacks[0].tables)} are sent "
            f"in buffers of {capacity.share:g} times the maximum size"
            for group, capacity in self._groups.values()
        ]

    def _limited(self, parts: Sequence[GroupInFlight]) -> dict[int, RowsInFlight]:
        """Return the parts whose buffers may have been too small."""
        return {
            index: part
            for index in self._groups
            if isinstance(part := parts[index], RowsInFlight) and part.most_requested is not None
        }

    def _warn(self, index: int, part: RowsInFlight, most: int, room: int) -> None:
        """On rank 0, log a warning if at least twice as many rows are needed as in the last one."""
        group, capacity = self._groups[index]
        if group.world.rank != 0 or most < 2 * self._warned.get(index, 0):
            return
        self._warned[index] = most
        logger.warning(
            "parallel.row_buffer_fraction: %g leaves room for %d rows of %s between two ranks, "
            "but a batch of %d samples requests %d; the exchange was repeated with that size, "
            "which made the host wait; use %g",
            capacity.share,
            room,
            group.plan.name,
            part.batch_size,
            most,
            capacity.share_of(most, part.batch_size),
        )

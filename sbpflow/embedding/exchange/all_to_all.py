"""Runs the transfers whose sizes depend on the batch: individual rows, and ids in lists.

No other module of ``sbpflow.embedding`` calls c10d collectives. OneFlow's distributed gather (its
scheme 3) and EMBark's unique-based groups exchange rows in this way.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sbpflow.boxing import pairs
from sbpflow.boxing.collectives import Work
from sbpflow.boxing.executor import Pending, wait_for
from sbpflow.embedding.plan.group_plan import ExchangeStep
from sbpflow.errors import SbpError
from sbpflow.runtime.ranks.comm_log import CommRecord, WaitTime
from sbpflow.runtime.ranks.world import Link, World, refused


class RowTransfer:
    """Transfers rows on one channel. All lists of counts have one element per rank of the group."""

    def __init__(self, world: World, channel: str) -> None:
        self._world = world
        self._channel = channel
        self._links: dict[tuple[tuple[int, ...], ...], Link] = {}

    def start_counts(self, step: ExchangeStep, counts: Tensor) -> Pending:
        """Start sending ``counts[r]`` to each rank r of the group; ``counts`` is int64 [ranks].

        ``wait()`` returns the received counts in the same order.
        """
        ones = [1] * counts.numel()
        return self.start(step, counts, ones, ones)

    def start(
        self, step: ExchangeStep, send: Tensor, out: Sequence[int], into: Sequence[int]
    ) -> Pending:
        """Start sending ``out[r]`` rows to rank r and receiving ``into[r]`` rows from rank r.

        ``send`` contains the blocks of rows for ranks 0, 1, ..., and must not change before
        ``wait()`` returns the received rows. Raise SbpError if the dtype of ``send`` differs from
        the planned dtype of the step.
        """
        world = self._world
        if send.dtype != step.dtype and send.dtype != torch.int64:
            raise SbpError(f"{step.id}: the plan expects {step.dtype}, got {send.dtype}")
        world.check(step.id, step.collective)
        received = send.new_empty(sum(into), *send.shape[1:])
        link, send = self._link(step), send.contiguous()
        try:
            if world.passes_messages(send.device.type):
                work = pairs.all_to_all(received, send, (into, out), link)
            else:
                work = dist.all_to_all_single(
                    received, send, list(into), list(out), group=link.group, async_op=True
                )
        except RuntimeError as error:
            raise refused(error, step.id, step.collective) from error
        self._log(step, link, send, sum(out) - out[link.ranks.index(world.rank)])
        return Pending(partial(_arrived, step, work, received, send, world.waits), world)

    def start_for_all(self, step: ExchangeStep, send: Tensor, into: Sequence[int]) -> Pending:
        """Start sending all of ``send`` to every other rank, and receiving ``into[r]`` rows from
        rank r.

        The transfer is an all-gather of parts with unequal lengths. The all-gather of c10d would
        need padding, and an all-to-all would need a copy of ``send`` for every rank, so each pair
        of ranks exchanges rows directly.
        """
        world = self._world
        if send.dtype != step.dtype:
            raise SbpError(f"{step.id}: the plan expects {step.dtype}, got {send.dtype}")
        world.check(step.id, step.collective)
        link, send = self._link(step), send.contiguous()
        received = send.new_empty(sum(into), *send.shape[1:])
        parts = dict(zip(link.ranks, received.split(list(into)), strict=True))
        parts.pop(world.rank).copy_(send)
        try:
            messages = pairs.pass_messages(dict.fromkeys(parts, send), parts, link)
        except RuntimeError as error:
            raise refused(error, step.id, step.collective) from error
        self._log(step, link, send, len(parts) * send.shape[0])
        return Pending(partial(_arrived, step, messages, received, send, world.waits), world)

    def _link(self, step: ExchangeStep) -> Link:
        """Return the link of the group of ``step`` that contains this rank.

        Creating a process group is collective, so every rank creates all groups of the step in the
        same order.
        """
        link = self._links.get(step.groups)
        if link is None:
            links = {r: self._world.link(r, self._channel, step.id) for r in step.groups}
            link = self._links[step.groups] = links[step.group_of(self._world.rank)]
        return link

    def _log(self, step: ExchangeStep, link: Link, send: Tensor, rows: int) -> None:
        """Record in the trace that ``rows`` rows of ``send`` go to other ranks."""
        log, ranks = self._world.log, link.ranks
        if log.enabled:
            sent = rows * send.shape[1:].numel() * send.itemsize
            log.records.append(CommRecord(step.id, step.collective, self._channel, ranks, sent))


def _arrived(
    step: ExchangeStep,
    work: Work,
    received: Tensor,
    sent: Tensor,
    waits: WaitTime,
) -> Tensor:
    del sent  # an argument only to keep the buffer alive during the transfer
    wait_for(work, step.id, step.collective, waits)
    return received


def received(step: ExchangeStep, pending: Pending, count: int) -> Tensor:
    """Wait for ``count`` rows; raise SbpError if a different number of rows arrives."""
    out = pending.wait()
    if out is None or out.shape[0] != count:
        actual = "nothing" if out is None else f"{out.shape[0]} rows"
        raise SbpError(f"{step.id}: received {actual}, expected {count} rows")
    return out

"""Transfers whose sizes depend on the batch: single rows, and ids in lists.

The one place beside ``boxing`` that calls a collective. OneFlow's distributed gather (its scheme 3)
and EMBark's unique-based groups move rows this way.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sbpflow.boxing.executor import Pending
from sbpflow.embedding.plan.group_plan import ExchangeStep
from sbpflow.errors import SbpError
from sbpflow.runtime.comm_log import CommRecord
from sbpflow.runtime.world import World, broken, refused


class Exchange:
    """All-to-alls of rows, counted by rank, on one channel."""

    def __init__(self, world: World, channel: str) -> None:
        self._world = world
        self._channel = channel

    def start_counts(self, step: ExchangeStep, counts: Tensor) -> Pending:
        """Tell every rank a number, of [ranks] int64: ``wait()`` gives what each told this one."""
        ones = [1] * counts.numel()
        return self.start(step, counts, ones, ones)

    def start(
        self, step: ExchangeStep, send: Tensor, out: Sequence[int], into: Sequence[int]
    ) -> Pending:
        """Send ``out[r]`` leading rows in turn to rank r; ``wait()`` gives ``into[r]`` of each.

        ``send`` must not change until then. Raises SbpError if the dtype is not the step's.
        """
        world, row = self._world, send.shape[1:]
        if send.dtype != step.dtype and send.dtype != torch.int64:
            raise SbpError(f"{step.id}: {send.dtype} was given, {step.dtype} is planned")
        world.check(step.id, step.collective)
        received = send.new_empty(sum(into), *row)
        group = world.group(step.group, self._channel, step.id)
        try:
            work = dist.all_to_all_single(
                received, send.contiguous(), list(into), list(out), group=group, async_op=True
            )
        except RuntimeError as error:
            raise refused(error, step.id, step.collective) from error
        if world.log.enabled:
            sent = (sum(out) - out[world.rank]) * row.numel() * send.itemsize
            world.log.add(CommRecord(step.id, step.collective, self._channel, step.group, sent))
        return Pending(partial(_arrived, step, work, received, send), world)


def _arrived(step: ExchangeStep, work: dist.Work | None, received: Tensor, sent: Tensor) -> Tensor:
    del sent  # kept alive until here
    if work is not None:
        try:
            work.wait()
        except RuntimeError as error:
            raise broken(error, step.id, step.collective) from error
    return received


def received(step: ExchangeStep, pending: Pending, count: int) -> Tensor:
    """The ``count`` rows that a transfer brings; SbpError if they are not that many."""
    out = pending.wait()
    if out is None or out.shape[0] != count:
        given = "nothing" if out is None else f"{out.shape[0]} rows"
        raise SbpError(f"{step.id}: {given} came, {count} rows were announced")
    return out

"""The unique exchange: unique rows asked of their owners, answered, and their gradients pushed.

The one place beside ``boxing`` that calls a collective, because the sizes depend on the batch.
OneFlow's distributed gather (its scheme 3) and EMBark's unique-based groups work this way.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from sbpflow.comm_log import CommRecord
from sbpflow.dist import World
from sbpflow.embedding.group_plan import ExchangeStep
from sbpflow.errors import SbpError

CHANNEL = "unique"


class Request:
    """Who was asked for how many rows, both ways; made by ``UniqueExchange.ask``."""

    def __init__(self, asked: list[int], received: list[int], rows: Tensor) -> None:
        self.asked = asked  # rows this rank asked of each rank
        self.received = received  # rows each rank asked of this one
        self.rows = rows  # [sum(received)] int64 local rows, rank by rank


class UniqueExchange:
    """Moves addresses, rows and row gradients between the ranks of a world.

    ``steps`` are the group's (counts, ids, vectors, gradients) steps, whose ids label the log;
    empty in a world of one rank, where nothing moves.
    """

    def __init__(self, world: World, bases: list[int], steps: tuple[ExchangeStep, ...]) -> None:
        self._world = world
        self._bases = torch.tensor(bases[1:-1], dtype=torch.int64)
        self._steps = steps

    def ask(self, unique: Tensor) -> Request:
        """Send this rank's sorted unique addresses [n] int64 to their owners."""
        counts_step, ids_step, _, _ = self._steps
        cuts = torch.searchsorted(unique, self._bases.to(unique.device)).tolist()
        edges = [0, *cuts, unique.numel()]
        asked = [stop - start for start, stop in pairwise(edges)]
        received = self._swap_counts(counts_step, asked)
        local = self._local_rows(unique, edges, ids_step.dtype)
        rows = self._swap(ids_step, local, asked, received)
        return Request(asked, received, _counted(ids_step, rows, sum(received)).to(torch.int64))

    def answer(self, request: Request, vectors: Tensor) -> Tensor:
        """[sum(received), dim] rows looked up here back to whoever asked: [n, dim] as asked."""
        rows = self._swap(self._steps[2], vectors, request.received, request.asked)
        return _counted(self._steps[2], rows, sum(request.asked))

    def push(self, request: Request, grads: Tensor) -> Tensor:
        """[n, dim] gradients of the rows asked for to their owners: [sum(received), dim]."""
        rows = self._swap(self._steps[3], grads, request.asked, request.received)
        return _counted(self._steps[3], rows, sum(request.received))

    def _local_rows(self, unique: Tensor, edges: list[int], dtype: torch.dtype) -> Tensor:
        bases = [0, *self._bases.tolist()]
        rows = unique.clone()
        for base, (start, stop) in zip(bases, pairwise(edges), strict=True):
            rows[start:stop] -= base
        return rows.to(dtype)

    def _swap_counts(self, step: ExchangeStep, asked: list[int]) -> list[int]:
        device = self._world.device
        send = torch.tensor(asked, dtype=torch.int64, device=device)
        ones = [1] * len(asked)
        return self._swap(step, send, ones, ones).tolist()

    def _swap(self, step: ExchangeStep, send: Tensor, out: list[int], into: list[int]) -> Tensor:
        world = self._world
        row = send.shape[1:]
        received = send.new_empty(sum(into), *row)
        world.check(step.id, step.collective)
        dist.all_to_all_single(
            received, send.contiguous(), into, out, group=world.group(step.group, CHANNEL)
        )
        sent = (sum(out) - out[world.rank]) * row.numel() * send.itemsize
        world.log.add(CommRecord(step.id, step.collective, CHANNEL, step.group, sent))
        return received


def _counted(step: ExchangeStep, rows: Tensor, expected: int) -> Tensor:
    if rows.shape[0] != expected:
        raise SbpError(f"{step.id}: {rows.shape[0]} rows came, {expected} were announced")
    return rows

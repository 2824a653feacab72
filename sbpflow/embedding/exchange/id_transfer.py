"""Sends ids to the ranks that look them up for the global batch.

A new ``IdsUnderWay`` sends the id matrix and the lengths of the id lists. ``exchange_ids`` sends
the contents of the lists, whose total sizes follow from the lengths. ``finish`` waits for the
transfers. The host reads the sizes together with the other counts of the batch (see ``counts``).
"""

from functools import lru_cache

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.embedding.exchange.all_to_all import RowTransfer, received
from sbpflow.embedding.ids.batch_ids import BatchIds, Lists
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import MAX_BATCH_SIZES, ExchangeStep
from sbpflow.errors import SbpError

IDS = "ids"


class IdTransfer:
    """The steps and indices of a plan's id transfers, which all batches share."""

    def __init__(self, plan: EmbeddingPlan, boxing: Boxing) -> None:
        self.plan, self.world, self.boxing = plan, boxing.world, boxing
        self.id_steps = lru_cache(MAX_BATCH_SIZES)(plan.id_steps)
        self.length_steps = lru_cache(MAX_BATCH_SIZES)(plan.length_steps)
        self.list_steps = lru_cache(MAX_BATCH_SIZES)(plan.list_steps)
        self.sent_columns = self._index(plan.sent_columns)
        self.sent_lists = self._index(plan.sent_lists)
        self.whole = plan.sent_columns == tuple(range(plan.ids.num_columns))
        self.places = [self._index(places) for places in plan.needed_lists]
        needs = torch.zeros(len(plan.ids.lists), self.world.size, dtype=torch.int64)
        for rank, places in enumerate(plan.needed_lists):
            needs[list(places), rank] = 1
        self.needs = needs.to(self.world.device)  # [lists, ranks]: 1 if the rank needs the list
        self.exchange = RowTransfer(self.world, IDS)

    def _index(self, places: tuple[int, ...]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.world.device)


class IdsUnderWay:
    """The id transfers of one batch. All ranks must start the transfers in the same order."""

    def __init__(self, transfer: IdTransfer, ids: BatchIds, batch_size: int) -> None:
        self._transfer, self._ids, self._batch_size = transfer, ids, batch_size
        self._matrix = self._lengths = None
        self._values: list[tuple[ExchangeStep, Pending, int]] = []
        self._received: Tensor | None = None
        self.counts: list[int] = []  # result of ``sizes``, as host integers
        boxing = transfer.boxing
        if transfer.sent_columns.numel():
            send = ids.matrix
            if not transfer.whole:
                send = send.index_select(1, transfer.sent_columns)
            self._matrix = boxing.start(transfer.id_steps(batch_size), send, IDS)
        if transfer.sent_lists.numel() and ids.lists is not None:
            lengths = ids.lists.lengths.index_select(1, transfer.sent_lists)
            self._lengths = boxing.start(transfer.length_steps(batch_size), lengths, IDS)

    def sizes(self) -> Tensor | None:
        """Return how many list ids are sent to, and received from, each rank (int64 [2 x ranks]).

        Return ``None`` if no lists are sent. Call this method only once, because it receives the
        lengths that ``__init__`` started to send.
        """
        transfer, lists = self._transfer, self._ids.lists
        if self._lengths is None:
            return None
        self._received = self._lengths.wait()
        if lists is None or not transfer.list_steps(self._batch_size):
            return None
        lengths = lists.lengths.sum(0, dtype=torch.int64)
        return torch.cat([(lengths.unsqueeze(1) * transfer.needs).sum(0), self._incoming()])

    def exchange_ids(self) -> None:
        """Start sending the contents of the lists. ``counts`` must be set to the result of
        ``sizes``.
        """
        transfer, lists = self._transfer, self._ids.lists
        if not self.counts or lists is None:
            return
        size = transfer.world.size
        out, into = self.counts[:size], self.counts[size:]
        parts = [lists.take(places, n) for places, n in zip(transfer.places, out, strict=True)]
        payloads = [torch.cat([part.values for part in parts])]
        if transfer.plan.weighted:
            payloads.append(torch.cat([_weights(part) for part in parts]))
        steps = transfer.list_steps(self._batch_size)
        self._values = [
            (step, transfer.exchange.start(step, payload, out, into), sum(into))
            for step, payload in zip(steps, payloads, strict=True)
        ]

    def finish(self) -> BatchIds | None:
        """Return the ids of the global batch that this rank looks up, or ``None`` if it looks up
        none.
        """
        transfer, rank = self._transfer, self._transfer.world.rank
        matrix = None if self._matrix is None else self._matrix.wait()
        columns, lists = transfer.plan.needed[rank], transfer.plan.needed_lists[rank]
        values = [received(step, pending, count) for step, pending, count in self._values]
        if not columns and not lists:
            return None
        if columns and (matrix is None or matrix.shape != (self._batch_size, len(columns))):
            raise SbpError(f"ids/fwd: rank {rank} did not receive the batch's ids")
        if matrix is None or not columns:
            device = transfer.world.device
            matrix = torch.empty(self._batch_size, 0, dtype=transfer.plan.ids_dtype, device=device)
        if not lists:
            return BatchIds(matrix, None)
        if self._received is None:
            raise SbpError(f"ids/fwd/lengths: rank {rank} did not receive the lengths of the lists")
        if not values and self._ids.lists is not None:  # a world of one rank
            return BatchIds(matrix, self._ids.lists.take(transfer.places[rank]))
        weights = values[1] if len(values) > 1 else None
        return BatchIds(matrix, Lists(self._received, values[0], weights))

    def _incoming(self) -> Tensor:
        """Return how many list ids each rank sends to this rank (int64 [ranks])."""
        world = self._transfer.world
        if not self._transfer.plan.needed_lists[world.rank] or self._received is None:
            return torch.zeros(world.size, dtype=torch.int64, device=world.device)
        samples = self._received.sum(1, dtype=torch.int64)
        # Sum over the samples of each rank. Samples are split as in ``balanced_sizes``: the first
        # ``longer`` ranks have one more sample than the others.
        each, longer = divmod(self._batch_size, world.size)
        first, rest = samples.split([longer * (each + 1), samples.shape[0] - longer * (each + 1)])
        return torch.cat(
            [first.view(longer, each + 1).sum(1), rest.view(world.size - longer, each).sum(1)]
        )


def _weights(lists: Lists) -> Tensor:
    if lists.weights is None:
        raise SbpError("the lists of weighted features have no weights; pass Bags with weights")
    return lists.weights

"""Defines the groups that exchange rows in two hops, as planned by ``plan/two_level.py``.

A rank sends its unique ids to the ranks of its own host. Each rank merges the ids that it receives
from these ranks, and sends the merged ids to the owners on all hosts. Rows and gradients take the
same two hops. ``lookup`` and ``send_grads`` start the hop between hosts, so it overlaps with the
following moves. The hop within the host is short, so ranks simply wait until it ends.
"""

from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.exchange.all_to_all import received
from sbpflow.embedding.exchange.base import GroupContext
from sbpflow.embedding.exchange.rows import Merged, RowGroup, RowsInFlight
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.two_level import HOST, groups_of
from sbpflow.embedding.storage.lookup import Lookup


class TwoLevelGroup(RowGroup):
    """Exchanges rows of ``(S(0), S(0))`` tables with skewed ids on several hosts."""

    def __init__(self, plan: GroupPlan, boxing: Boxing, context: GroupContext) -> None:
        _, self._positions = groups_of(plan.stacks[0].layouts[0].placement)
        super().__init__(plan, boxing, context)
        self.capacity = None  # ``config.checks`` rejects fixed-size buffers for this exchange.
        # Order the parts of the address space by position within the host, then by host. The sorted
        # ids of a rank are then grouped by destination in both hops.
        own = next(n for n, ranks in enumerate(self._positions) if self.world.rank in ranks)
        by_position = self._lasts.view(len(self._positions), -1)
        self._last_of_positions = by_position[:, -1].contiguous()
        self._last_of_hosts = by_position[own]

    @property
    def part_ranks(self) -> tuple[int, ...]:
        return tuple(rank for ranks in self._positions for rank in ranks)

    def begin_counted(self, batch: RowsInFlight) -> None:
        self.send_counts(batch, batch.wanted, self._last_of_positions)

    def next_round(self, batch: RowsInFlight) -> None:
        step = self.step(batch, "ids", HOST)
        ids = received(step, batch.take_pending(), sum(batch.incoming))
        lookup = self._deduplicated(Lookup(ids))
        batch.merged = Merged(lookup)
        self.send_counts(batch, lookup, self._last_of_hosts)

    def exchange_ids(self, batch: RowsInFlight) -> None:
        size = len(batch.counts) // 2
        requested, incoming = batch.counts[:size], batch.counts[size:]
        if batch.round == HOST:
            batch.requested, batch.incoming = requested, incoming
            self.send_ids(batch)
            return
        merged = _merged(batch)
        merged.requested, merged.incoming = requested, incoming
        merged.lookup.num_unique = sum(requested)
        step, ids = self.step(batch, "ids"), merged.lookup.rows()
        batch.pending = self._ids.start(step, ids, requested, incoming)

    def receive_ids(self, batch: RowsInFlight) -> None:
        self.receive_addresses(batch, sum(_merged(batch).incoming))

    def lookup(self, batch: RowsInFlight) -> None:
        merged = _merged(batch)
        rows = batch.lookup(self._store, batch.lookups[0], self._stack.optimizer.lr)
        rows, step = rows.to(self.plan.comm_dtype), self.step(batch, "vectors")
        batch.pending = self._vectors.start(step, rows, merged.incoming, merged.requested)

    def gather_outputs(self, batch: RowsInFlight) -> Tensor:
        merged, step = _merged(batch), self.step(batch, "vectors", HOST)
        rows = self.take(batch, "vectors", sum(merged.requested))
        rows = merged.lookup.take(rows, merged.lookup.inverse())
        pending = self._vectors.start(step, rows, batch.incoming, batch.requested)
        batch.rows = received(step, pending, sum(batch.requested)).to(self.plan.dtype)
        return super().gather_outputs(batch)

    def send_grads(self, batch: RowsInFlight, grad: Tensor) -> None:
        merged, step = _merged(batch), self.step(batch, "gradients", HOST)
        sums = self.row_sums(batch, grad)
        pending = self._gradients.start(step, sums, batch.requested, batch.incoming)
        _, sums = merged.lookup.row_gradients(received(step, pending, sum(batch.incoming)))
        # Round only once, after the gradients of all ranks on the host have been summed.
        sums, step = sums.to(self.plan.grad_comm_dtype), self.step(batch, "gradients")
        batch.pending = self._gradients.start(step, sums, merged.requested, merged.incoming)


def _merged(batch: RowsInFlight) -> Merged:
    if batch.merged is None:
        raise RuntimeError("the ids of the host have not been merged; call next_round first")
    return batch.merged

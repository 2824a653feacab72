"""Defines the groups that exchange rows in two hops, as planned by ``plan/two_level.py``.

A rank sends its unique ids to the ranks of its own host. A rank merges the ids that it receives
from its host, and sends the merged ids to the owners on all hosts. Rows and gradients take the same
two hops. ``lookup`` and ``send_grads`` start the hop between hosts, so it overlaps with the
following moves. The hop within the host is short, so ranks simply wait until it ends.
"""

from dataclasses import dataclass, field

from torch import Tensor

from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.embedding.exchange.all_to_all import received
from sbpflow.embedding.exchange.base import GroupContext
from sbpflow.embedding.exchange.rows import RowGroup, RowsInFlight
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.group_plan import ExchangeStep, GroupPlan, Purpose
from sbpflow.embedding.plan.two_level import HOST, NETWORK, Level, groups_of
from sbpflow.embedding.storage.lookup import Lookup


@dataclass(slots=True)
class Merged:
    """The merged ids that the ranks of the host sent to this rank.

    ``requested`` is the number of distinct ids that this rank forwards to each host, and
    ``incoming`` the number that it receives from each host.
    """

    lookup: Lookup
    requested: list[int] = field(default_factory=list[int])
    incoming: list[int] = field(default_factory=list[int])


@dataclass(slots=True, kw_only=True)
class TwoLevelInFlight(RowsInFlight):
    """The state of a batch in a group with two hops.

    ``requested`` and ``incoming`` are for the hop within the host; ``next_round`` sets ``merged``.
    """

    merged: Merged | None = None


class TwoLevelGroup(RowGroup):
    """Exchanges rows of ``(S(0), S(0))`` tables with skewed ids on several hosts."""

    def __init__(self, plan: GroupPlan, boxing: Boxing, context: GroupContext) -> None:
        _, self._positions = groups_of(plan.stacks[0].layouts[0].placement)
        super().__init__(plan, boxing, context)
        self.capacity = None  # ``config.checks`` rejects fixed-size buffers here.
        # Order the parts of the address space by position within the host, then by host. The sorted
        # ids of a rank are then grouped by destination in both hops.
        own = next(n for n, ranks in enumerate(self._positions) if self.world.rank in ranks)
        by_position = self._lasts.view(len(self._positions), -1)
        self._last_of_positions = by_position[:, -1].contiguous()
        self._last_of_hosts = by_position[own]

    @property
    def part_ranks(self) -> tuple[int, ...]:
        return tuple(rank for ranks in self._positions for rank in ranks)

    def start_id_exchange(
        self, local: BatchIds, batch_size: int, *, number: int | None
    ) -> TwoLevelInFlight:
        wanted = self._deduplicated(self._addresses.make_lookup(local))
        batch = TwoLevelInFlight(local=local, batch_size=batch_size, number=number, wanted=wanted)
        self.begin_counted(batch)
        return batch

    def begin_counted(self, batch: RowsInFlight) -> None:
        self._send_counts(batch, batch.wanted, self._last_of_positions)

    def next_round(self, batch: RowsInFlight) -> None:
        step = self._step(batch, "ids", HOST)
        ids = received(step, batch.take_pending(), sum(batch.incoming))
        lookup = self._deduplicated(Lookup(ids))
        _in_flight(batch).merged = Merged(lookup)
        self._send_counts(batch, lookup, self._last_of_hosts)

    def _send_counts(self, batch: RowsInFlight, lookup: Lookup, lasts: Tensor) -> None:
        ends = lookup.unique_up_to(lasts)
        batch.request_counts = ends.diff(prepend=ends.new_zeros(1))
        step = self.step(batch, "counts")
        batch.pending = self._ids.start_counts(step, batch.request_counts)

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
        ids = self.relative(merged.lookup.rows())
        batch.pending = self._ids.start(self.step(batch, "ids"), ids, requested, incoming)

    def send_ids(self, batch: RowsInFlight) -> None:
        batch.wanted.num_unique = sum(batch.requested)
        step, ids = self.step(batch, "ids"), batch.wanted.rows()
        batch.pending = self._ids.start(step, ids, batch.requested, batch.incoming)

    def send_padded(self, batch: RowsInFlight, buffers: Tensor) -> Pending:
        raise NotImplementedError(
            f"{self.plan.name}: this exchange does not use buffers of fixed size"
        )

    def receive_ids(self, batch: RowsInFlight) -> None:
        step, count = self._step(batch, "ids", NETWORK), sum(_merged(batch).incoming)
        batch.lookups = [Lookup(received(step, batch.take_pending(), count))]

    def lookup(self, batch: RowsInFlight) -> None:
        merged = _merged(batch)
        rows = batch.lookup(self._store, batch.lookups[0], self._stack.optimizer.lr)
        rows, step = rows.to(self.plan.comm_dtype), self._step(batch, "vectors", NETWORK)
        batch.pending = self._vectors.start(step, rows, merged.incoming, merged.requested)

    def gather_outputs(self, batch: RowsInFlight) -> Tensor:
        merged, step = _merged(batch), self._step(batch, "vectors", NETWORK)
        rows = received(step, batch.take_pending(), sum(merged.requested))
        rows, step = (
            rows.index_select(0, merged.lookup.inverse()),
            self._step(batch, "vectors", HOST),
        )
        pending = self._vectors.start(step, rows, batch.incoming, batch.requested)
        batch.rows = received(step, pending, sum(batch.requested)).to(self.plan.dtype)
        return super().gather_outputs(batch)

    def send_grads(self, batch: RowsInFlight, grad: Tensor) -> None:
        merged, step = _merged(batch), self._step(batch, "gradients", HOST)
        sums = self.row_sums(batch, grad)
        pending = self._gradients.start(step, sums, batch.requested, batch.incoming)
        _, sums = merged.lookup.row_gradients(received(step, pending, sum(batch.incoming)))
        # Round only once, after the gradients of all ranks on the host have been summed.
        sums, step = sums.to(self.plan.grad_comm_dtype), self._step(batch, "gradients", NETWORK)
        batch.pending = self._gradients.start(step, sums, merged.requested, merged.incoming)

    def receive_grads(self, batch: RowsInFlight) -> None:
        step = self._step(batch, "gradients", NETWORK)
        sums = received(step, batch.take_pending(), batch.lookups[0].num_bags)
        self.keep(batch, batch.lookups, [sums.to(self.plan.dtype)])

    def _step(self, batch: RowsInFlight, purpose: Purpose, level: Level) -> ExchangeStep:
        stages = self.plan.stages(batch.batch_size)
        return next(s.rows for s in stages if (s.purpose, s.round) == (purpose, level))


def _in_flight(batch: RowsInFlight) -> TwoLevelInFlight:
    if not isinstance(batch, TwoLevelInFlight):
        raise TypeError(f"the batch must come from start_id_exchange, got {type(batch).__name__}")
    return batch


def _merged(batch: RowsInFlight) -> Merged:
    merged = _in_flight(batch).merged
    if merged is None:
        raise RuntimeError("the ids of the host are not merged yet; call next_round first")
    return merged

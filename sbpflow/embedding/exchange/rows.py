"""Defines the groups that exchange deduplicated rows, as planned by ``plan/row_exchanges.py``."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.embedding.exchange.all_to_all import RowTransfer, received
from sbpflow.embedding.exchange.base import GRADIENTS, VECTORS, Group, GroupContext, GroupInFlight
from sbpflow.embedding.exchange.early_rows import EarlyInFlight, LateInFlight
from sbpflow.embedding.exchange.id_transfer import IDS
from sbpflow.embedding.exchange.padded import BufferLayout, Capacity, Slots
from sbpflow.embedding.exchange.shared_state import SharedState
from sbpflow.embedding.ids.addresses import OwnerAddresses
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.group_plan import ExchangeStep, GroupPlan, Purpose
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.storage.choose import deduplicator
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import RowStore


@dataclass(slots=True)
class Merged:
    """The merged ids that the ranks of this host sent to this rank, in an exchange with two hops.

    ``requested`` is the number of distinct ids that this rank forwards to each host, and
    ``incoming`` the number that it receives from each host.
    """

    lookup: Lookup
    requested: list[int] = field(default_factory=list[int])
    incoming: list[int] = field(default_factory=list[int])


@dataclass(slots=True, kw_only=True)
class RowsInFlight(GroupInFlight):
    """The state of a batch in a group that exchanges rows.

    ``requested`` is the number of rows that this rank requests from each rank; ``incoming`` is the
    number of rows that each rank requests from this rank. With fixed-size buffers, both numbers
    equal the buffer size; otherwise, they are set from ``counts``. ``sent_addresses`` (the
    addresses in the buffers) and ``most_requested`` (int64 [1], the largest number of rows that one
    rank requests from another) are set only with fixed-size buffers.
    """

    wanted: Lookup  # The lookup of the local samples.
    request_counts: Tensor | None = None  # Number of rows requested from each rank, int64 [ranks].
    slots: Slots | None = None  # Set only with fixed-size buffers.
    sent_addresses: Tensor | None = None
    most_requested: Tensor | None = None
    requested: list[int] = field(default_factory=list[int])
    incoming: list[int] = field(default_factory=list[int])
    early: EarlyInFlight | None = None  # Set by ``mark_early``.
    late: LateInFlight | None = None  # Set by ``mark_early`` of the next batch.
    merged: Merged | None = None  # Set by ``next_round``.


class RowGroup(Group[RowsInFlight]):
    """Base class of groups that exchange rows. A group is a single stack whose row addresses are
    unique over all ranks.

    In each batch, a rank requests each row that it needs only once. Training batches use fixed-size
    buffers if ``ExchangeOptions.row_buffer_fraction`` is set.
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing, context: GroupContext) -> None:
        super().__init__(plan, boxing, context)
        (self._stack,) = plan.stacks
        self._state = SharedState(plan, boxing)
        self._store = context.make_store(plan, 0, self._state.sum_of(0))
        self._addresses = OwnerAddresses(
            self._stack,
            self.part_ranks,
            self.world.device,
            dtype=plan.dtype,
            address_dtype=plan.address_dtype(),
            compiled=context.compiled,
        )
        bases, self._lasts = torch.tensor(
            [self._addresses.bases, self._addresses.lasts],
            dtype=plan.address_dtype(),
            device=self.world.device,
        ).unbind()
        self._own_base = dict(zip(self.part_ranks, self._addresses.bases, strict=True)).get(
            self.world.rank, 0
        )
        self._layout = BufferLayout(bases, self._lasts)
        self._deduplicated = deduplicator(self._store.kernel.name, self._addresses.num_addresses)
        self._ids = RowTransfer(self.world, IDS)
        self._vectors = RowTransfer(self.world, VECTORS)
        self._gradients = RowTransfer(self.world, GRADIENTS)
        self.capacity: Capacity | None = None
        # Overflowing buffers are detected in the id stream, which exists only on CUDA.
        on_cuda = self.world.device.type == "cuda"
        share = context.options.row_buffer_fraction
        if share is not None and on_cuda and self._store.kernel.absent is not None:
            self.capacity = Capacity(share, plan)

    @property
    def part_ranks(self) -> Sequence[int]:
        """Return the owner of each part of the address space, in the order of the parts."""
        return range(self.world.size)

    def begin_counted(self, batch: RowsInFlight) -> None:
        """Start sending each rank the number of rows that this rank requests from it."""
        self.send_counts(batch, batch.wanted, self._lasts)

    def send_counts(self, batch: RowsInFlight, lookup: Lookup, lasts: Tensor) -> None:
        """Start sending each rank the number of unique rows in its part of the address space; the
        parts end with the addresses ``lasts``.
        """
        ends = lookup.unique_up_to(lasts)
        batch.request_counts = ends.diff(prepend=ends.new_zeros(1))
        step = self.step(batch, "counts")
        batch.pending = self._ids.start_counts(step, batch.request_counts)

    def send_padded(self, batch: RowsInFlight, buffers: Tensor) -> Pending:
        """Start sending the buffers that ``BufferLayout.lay_out`` returned."""
        sizes = [buffers.shape[1]] * self.world.size
        return self._ids.start(self.step(batch, "ids"), buffers.view(-1), sizes, sizes)

    def send_ids(self, batch: RowsInFlight) -> None:
        """Start sending the addresses of the requested rows; the counts must be known."""
        batch.wanted.num_unique = sum(batch.requested)
        step, rows = self.step(batch, "ids"), batch.wanted.rows()
        batch.pending = self._ids.start(step, rows, batch.requested, batch.incoming)

    def start_id_exchange(
        self, local: BatchIds, batch_size: int, *, number: int | None
    ) -> RowsInFlight:
        wanted = self._deduplicated(self._addresses.make_lookup(local))
        batch = RowsInFlight(local=local, batch_size=batch_size, number=number, wanted=wanted)
        if number is not None and self.capacity is not None:
            room, size = self.capacity.rows(batch_size), self.world.size
            batch.slots, buffers = self._layout.lay_out(batch.wanted, room)
            batch.sent_addresses = buffers[:, 1:].reshape(-1)
            batch.requested, batch.incoming = [room] * size, [room] * size
            batch.pending = self.send_padded(batch, buffers)
        else:
            self.begin_counted(batch)
        return batch

    def begin_again(self, batch: RowsInFlight) -> RowsInFlight:
        """Return the same batch without fixed-size buffers, because the buffers were too small."""
        again = RowsInFlight(
            local=batch.local, batch_size=batch.batch_size, number=batch.number, wanted=batch.wanted
        )
        self.begin_counted(again)
        return again

    def step(self, batch: RowsInFlight, purpose: Purpose, round: int | None = None) -> ExchangeStep:
        """Return the transfer for ``purpose`` in a round, by default the current round."""
        place = purpose, batch.round if round is None else round
        for stage in self.plan.stages(batch.batch_size):
            if (stage.purpose, stage.round) == place:
                return stage.rows
        raise RuntimeError(f"{self.plan.name}: the plan has no transfer for {purpose}")

    def take(self, batch: RowsInFlight, purpose: Purpose, count: int) -> Tensor:
        """Return the ``count`` rows of the pending transfer for ``purpose``."""
        return received(self.step(batch, purpose), batch.take_pending(), count)

    def stores(self) -> list[tuple[TableBatch, RowStore]]:
        return [(self._stack, self._store)]

    def counts(self, batch: RowsInFlight) -> Tensor | None:
        """Return the number of rows requested from each rank, then the number requested by each
        rank.

        The second part is missing unless the ranks sent their counts. Return ``None`` with
        fixed-size buffers.
        """
        if batch.pending is None or batch.request_counts is None:
            return batch.request_counts
        size = batch.request_counts.numel()
        return torch.cat([batch.request_counts, self.take(batch, "counts", size)])

    def exchange_ids(self, batch: RowsInFlight) -> None:
        if batch.slots is None:
            batch.requested = batch.counts[: self.world.size]
            batch.incoming = batch.counts[self.world.size :]
            self.send_ids(batch)

    def gather_outputs(self, batch: RowsInFlight) -> Tensor:
        """Expand the received unique rows to the vectors of the samples."""
        samples = batch.local.num_samples
        positions = batch.wanted.inverse() if batch.slots is None else batch.slots.of_ids
        vectors = batch.wanted.pool(batch.take_rows(), positions)
        if self.plan.pooled:
            return vectors.view(samples, len(self._stack.uses), self._stack.dim).sum(1)
        return vectors.view(samples, self.plan.width)

    def row_gradients(self, batch: RowsInFlight, grad: Tensor) -> Tensor:
        """Return the result of ``row_sums``, cast to the comm dtype."""
        return self.row_sums(batch, grad).to(self.plan.grad_comm_dtype)

    def row_sums(self, batch: RowsInFlight, grad: Tensor) -> Tensor:
        """Return the gradient of each unique row, summed over this rank's samples: [unique rows,
        dim].

        With fixed-size buffers, the result is [positions, dim].
        """
        if self.plan.pooled:
            grad = grad.repeat(1, len(self._stack.uses))
        grad = grad.reshape(-1, self._stack.dim)
        if batch.slots is None:
            _, sums = batch.wanted.row_gradients(grad)
            return sums
        return batch.slots.spread(batch.wanted, grad)

    def receive_addresses(self, batch: RowsInFlight, count: int) -> None:
        """Receive the addresses of ``count`` requested rows of this rank, and look up these rows by
        their numbers in its store.
        """
        addresses = self.take(batch, "ids", count)
        if self._own_base:
            addresses -= self._own_base
        batch.lookups = [Lookup(addresses)]

    def receive_ids(self, batch: RowsInFlight) -> None:
        count, ranks = sum(batch.incoming), len(batch.incoming)
        if batch.slots is None:
            self.receive_addresses(batch, count)
            return
        buffers = self.take(batch, "ids", ranks + count).view(ranks, -1)
        batch.lookups = [Lookup(buffers[:, 1:].reshape(-1))]
        if self.capacity is not None and not self.capacity.is_enough(batch.batch_size):
            batch.most_requested = buffers[:, 0].max().to(torch.int64).unsqueeze(0)

    def receive_grads(self, batch: RowsInFlight) -> None:
        sums = self.take(batch, "gradients", batch.lookups[0].num_bags)
        self.keep(batch, batch.lookups, [sums.to(self.plan.dtype)])

    def update(self, step: int) -> None:
        self._release(self.apply(step))

    def apply(self, step: int) -> list[GroupInFlight]:
        """Take an optimizer step with the collected gradients; return the batches that they belong
        to.
        """
        batches, self._state.batch_size, ((lookup, grad),) = self.take_collected()
        batches[-1].update(self._store, lookup, grad, self._stack.optimizer.lr, step)
        return batches


class AllGatherRowsGroup(RowGroup):
    """Base class of groups in which every rank stores all rows, or some columns of all rows.

    Every rank receives the requests of all ranks. Addresses are local row numbers.
    """

    @property
    def part_ranks(self) -> Sequence[int]:
        return range(1)

    def sends_ids(self, batch: RowsInFlight) -> bool:
        """Return True if other ranks need the addresses of the rows that this rank requests."""
        return True

    def begin_counted(self, batch: RowsInFlight) -> None:
        # This rank requests the same rows from every rank.
        batch.request_counts = batch.wanted.unique_up_to(self._lasts).repeat(self.world.size)
        if self.sends_ids(batch):
            step = self.step(batch, "counts")
            batch.pending = self._ids.start_counts(step, batch.request_counts)

    def send_padded(self, batch: RowsInFlight, buffers: Tensor) -> Pending:
        sizes = [buffers.shape[1]] * self.world.size
        return self._ids.start_for_all(self.step(batch, "ids"), buffers.view(-1), sizes)

    def send_ids(self, batch: RowsInFlight) -> None:
        batch.wanted.num_unique = batch.requested[0]
        if self.sends_ids(batch):
            step, rows = self.step(batch, "ids"), batch.wanted.rows()
            batch.pending = self._ids.start_for_all(step, rows, batch.incoming)

    def receive_ids(self, batch: RowsInFlight) -> None:
        if self.sends_ids(batch):
            super().receive_ids(batch)


class UniqueColumnsGroup(AllGatherRowsGroup):
    """Exchanges rows of S(1) tables with skewed ids: each rank sends its columns of the requested
    rows.

    A block [rows, columns of the sender] is sent as a flat tensor, because ranks may store
    different numbers of columns.
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing, context: GroupContext) -> None:
        super().__init__(plan, boxing, context)
        # The range of columns that each rank stores; ranges need not be in rank order.
        shards = [self._stack.shards(rank)[0] for rank in plan.world.ranks]
        self._columns = [slice(shard.col_start, shard.col_stop) for shard in shards]
        self._widths = [columns.stop - columns.start for columns in self._columns]

    def lookup(self, batch: RowsInFlight) -> None:
        rows = batch.lookup(self._store, batch.lookups[0], self._stack.optimizer.lr)
        wanted, held = self._sizes(batch)
        step = self.step(batch, "vectors")
        flat = rows.to(self.plan.comm_dtype).reshape(-1)
        batch.pending = self._vectors.start(step, flat, held, wanted)

    def gather_outputs(self, batch: RowsInFlight) -> Tensor:
        wanted, _ = self._sizes(batch)
        flat = self.take(batch, "vectors", sum(wanted))
        rows = flat.new_empty(batch.requested[0], self._stack.dim, dtype=self.plan.dtype)
        for columns, part in zip(self._columns, flat.split(wanted), strict=True):
            block = rows[:, columns]
            block.copy_(part.view(block.shape))
        batch.rows = rows
        return super().gather_outputs(batch)

    def send_grads(self, batch: RowsInFlight, grad: Tensor) -> None:
        wanted, held = self._sizes(batch)
        sums = self.row_gradients(batch, grad)
        flat = sums.new_empty(sums.numel())
        for columns, part in zip(self._columns, flat.split(wanted), strict=True):
            block = sums[:, columns]
            part.view(block.shape).copy_(block)
        step = self.step(batch, "gradients")
        batch.pending = self._gradients.start(step, flat, wanted, held)

    def receive_grads(self, batch: RowsInFlight) -> None:
        _, held = self._sizes(batch)
        flat = self.take(batch, "gradients", sum(held))
        sums = flat.view(sum(batch.incoming), self._widths[self.world.rank])
        self.keep(batch, batch.lookups, [sums.to(self.plan.dtype)])

    def _sizes(self, batch: RowsInFlight) -> tuple[list[int], list[int]]:
        """Return how many elements to receive from each rank, and how many to send to each rank."""
        requested, own_width = batch.requested[0], self._widths[self.world.rank]
        wanted = [requested * width for width in self._widths]
        return wanted, [count * own_width for count in batch.incoming]


class LocalRowsGroup(AllGatherRowsGroup):
    """Exchanges rows of B tables: each rank looks up its own samples, and all ranks gather the
    touched rows.
    """

    def sends_ids(self, batch: RowsInFlight) -> bool:
        return batch.training

    def lookup(self, batch: RowsInFlight) -> None:
        rows = batch.wanted.rows() if batch.sent_addresses is None else batch.sent_addresses
        batch.rows = self._store.peek(Lookup(rows))

    def send_grads(self, batch: RowsInFlight, grad: Tensor) -> None:
        step = self.step(batch, "gradients")
        sums = self.row_gradients(batch, grad)
        batch.pending = self._gradients.start_for_all(step, sums, batch.incoming)

"""Groups whose single rows travel, deduplicated: those of ``plan/row_exchanges.py``."""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.embedding.exchange.all_to_all import RowTransfer, received
from sbpflow.embedding.exchange.base import GRADIENTS, VECTORS, Given, Group, GroupInFlight
from sbpflow.embedding.exchange.id_transfer import IDS
from sbpflow.embedding.exchange.padded import Capacity, Layout, Slots
from sbpflow.embedding.exchange.shared_state import SharedState
from sbpflow.embedding.ids.addresses import OwnerAddresses
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.group_plan import (
    ExchangeStep,
    GroupPlan,
    Purpose,
)
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.storage.choose import deduplicator
from sbpflow.embedding.storage.lookup import Lookup, sum_bags
from sbpflow.embedding.storage.store import RowStore


@dataclass(slots=True, kw_only=True)
class RowsInFlight(GroupInFlight):
    """``asked`` counts the rows this rank names to each rank, ``into`` those they name to it; both
    are in ``named`` and ``counts`` first, or in buffers of a fixed size the room for them.
    """

    wanted: Lookup  # of the local samples
    named: Tensor | None = None  # [ranks] int64
    slots: Slots | None = None  # in buffers of a fixed size
    own: Tensor | None = None  # what was sent in one
    most: Tensor | None = None  # [1] int64, the rows that some rank names to another, at most
    asked: list[int] = field(default_factory=list[int])
    into: list[int] = field(default_factory=list[int])
    rows: Tensor | None = None  # [unique rows wanted here, dim], after they came

    def take_rows(self) -> Tensor:
        rows, self.rows = self.rows, None
        if rows is None:
            raise RuntimeError("no rows are there: a move was left out, or made twice")
        return rows


class RowGroup(Group[RowsInFlight]):
    """One stack, whose rows have job-wide addresses; who wants which is told once per batch.

    ``Given.row_buffer_fraction`` is for the buffers of training batches.
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing, given: Given) -> None:
        super().__init__(plan, boxing, given)
        (self._stack,) = plan.stacks
        self._state = SharedState(plan, boxing)
        self._store = given.make_store(plan, 0, self._state.sum_of(0))
        self._addresses = OwnerAddresses(
            self._stack,
            self.num_parts,
            self.world.device,
            dtype=plan.dtype,
            address_dtype=plan.address_dtype(),
        )
        self._bases, self._lasts = torch.tensor(
            [self._addresses.bases, self._addresses.lasts],
            dtype=plan.address_dtype(),
            device=self.world.device,
        ).unbind()
        self._layout = Layout(self._bases, self._lasts)
        self._deduplicated = deduplicator(self._store.kernel.name, self._addresses.num_addresses)
        self._ids = RowTransfer(self.world, IDS)
        self._vectors = RowTransfer(self.world, VECTORS)
        self._gradients = RowTransfer(self.world, GRADIENTS)
        self.capacity: Capacity | None = None
        on_cuda = self.world.device.type == "cuda"  # where what did not fit is asked for
        share = given.row_buffer_fraction
        if share is not None and on_cuda and self._store.kernel.absent is not None:
            self.capacity = Capacity(share, plan)

    @property
    @abstractmethod
    def num_parts(self) -> int:
        """Into how many parts, each of a rank of its own, the addresses fall."""

    @abstractmethod
    def begin_counted(self, batch: RowsInFlight) -> None:
        """Send how many rows are named to each."""

    @abstractmethod
    def send_padded(self, batch: RowsInFlight, buffers: Tensor) -> Pending:
        """Start the ids of ``Layout.lay_out``."""

    def start_id_exchange(
        self, local: BatchIds, batch_size: int, *, number: int | None
    ) -> RowsInFlight:
        wanted = self._deduplicated(self._addresses.make_lookup(local))
        batch = RowsInFlight(local=local, batch_size=batch_size, number=number, wanted=wanted)
        if number is not None and self.capacity is not None:
            room, size = self.capacity.rows(batch_size), self.world.size
            batch.slots, buffers = self._layout.lay_out(batch.wanted, room)
            batch.own = buffers[:, 1:].reshape(-1)
            batch.asked, batch.into = [room] * size, [room] * size
            batch.pending = self.send_padded(batch, buffers)
        else:
            self.begin_counted(batch)
        return batch

    def begin_again(self, batch: RowsInFlight) -> RowsInFlight:
        """After ``receive_ids``, of a batch that does not fit: with transfers that do."""
        again = RowsInFlight(
            local=batch.local,
            batch_size=batch.batch_size,
            number=batch.number,
            wanted=batch.wanted,
        )
        self.begin_counted(again)
        return again

    def step(self, batch: RowsInFlight, purpose: Purpose) -> ExchangeStep:
        """The transfer for a purpose, of the batch's round."""
        for stage in self.plan.stages(batch.batch_size):
            if (stage.purpose, stage.round) == (purpose, batch.round):
                return stage.rows
        raise RuntimeError(f"{self.plan.name}: no {purpose} travel, by its plan")

    def stores(self) -> list[tuple[TableBatch, RowStore]]:
        return [(self._stack, self._store)]

    def counts(self, batch: RowsInFlight) -> Tensor | None:
        """[ranks] named to each, then [ranks] named by each if that is told; ``None`` where there
        is room for all that may be.
        """
        if batch.pending is None or batch.named is None:
            return batch.named
        step = self.step(batch, "counts")
        return torch.cat([batch.named, received(step, batch.take_pending(), self.world.size)])

    def gather_outputs(self, batch: RowsInFlight) -> Tensor:
        """Expand ``batch.rows`` to the samples' vectors."""
        samples = batch.local.num_samples
        at = batch.wanted.inverse() if batch.slots is None else batch.slots.of_ids
        vectors = sum_bags(batch.take_rows(), batch.wanted, at)
        if self.plan.pooled:
            return vectors.view(samples, len(self._stack.uses), self._stack.dim).sum(1)
        return vectors.view(samples, self.plan.width)

    def row_gradients(self, batch: RowsInFlight, grad: Tensor) -> Tensor:
        """[unique rows wanted here, dim], summed over this rank's samples, as they travel; in
        buffers each in its slot.
        """
        if self.plan.pooled:
            grad = grad.repeat(1, len(self._stack.uses))
        grad = grad.reshape(-1, self._stack.dim)
        if batch.slots is None:
            _, sums = batch.wanted.row_gradients(grad)
        else:
            sums = batch.slots.spread(batch.wanted, grad)
        return sums.to(self.plan.grad_comm_dtype)

    def receive_ids(self, batch: RowsInFlight) -> None:
        step, count = self.step(batch, "ids"), sum(batch.into)
        if batch.slots is None:
            batch.lookups = [Lookup(received(step, batch.take_pending(), count))]
            return
        ranks = len(batch.into)
        buffers = received(step, batch.take_pending(), ranks + count).view(ranks, -1)
        batch.lookups = [Lookup(buffers[:, 1:].reshape(-1))]
        if self.capacity is not None and not self.capacity.is_enough(batch.batch_size):
            batch.most = buffers[:, 0].max().to(torch.int64).unsqueeze(0)

    def receive_grads(self, batch: RowsInFlight) -> None:
        step, count = self.step(batch, "gradients"), batch.lookups[0].num_bags
        sums = received(step, batch.take_pending(), count).to(self.plan.dtype)
        self.keep(batch, batch.lookups, [sums])

    def update(self, step: int) -> None:
        batches, self._state.batch_size, ((lookup, grad),) = self.take_collected()
        batches[-1].update(self._store, lookup, grad, self._stack.optimizer.lr, step)
        self._release(batches)


class UniqueGroup(RowGroup):
    """S(0), skewed: unique rows are asked of their owners, expanded at home, gradients pushed."""

    @property
    def num_parts(self) -> int:
        return self.world.size

    def begin_counted(self, batch: RowsInFlight) -> None:
        batch.named = batch.wanted.unique_up_to(self._lasts).diff(
            prepend=self._lasts.new_zeros(1, dtype=torch.int64)
        )
        step = self.step(batch, "counts")
        batch.pending = self._ids.start_counts(step, batch.named)

    def send_padded(self, batch: RowsInFlight, buffers: Tensor) -> Pending:
        sizes = [buffers.shape[1]] * self.world.size
        return self._ids.start(self.step(batch, "ids"), buffers.view(-1), sizes, sizes)

    def exchange_ids(self, batch: RowsInFlight) -> None:
        if batch.slots is not None:
            return
        size = self.world.size
        batch.asked, batch.into = batch.counts[:size], batch.counts[size:]
        batch.wanted.num_unique = sum(batch.asked)
        unique = batch.wanted.rows()
        owner = torch.searchsorted(self._lasts, unique)
        rows = unique - self._bases.index_select(0, owner)
        batch.pending = self._ids.start(self.step(batch, "ids"), rows, batch.asked, batch.into)

    def lookup(self, batch: RowsInFlight) -> None:
        asked, into = batch.asked, batch.into
        lr = self._stack.optimizer.lr
        rows = batch.lookup(self._store, batch.lookups[0], lr)
        step = self.step(batch, "vectors")
        batch.pending = self._vectors.start(step, rows.to(self.plan.comm_dtype), into, asked)

    def gather_outputs(self, batch: RowsInFlight) -> Tensor:
        rows = received(self.step(batch, "vectors"), batch.take_pending(), sum(batch.asked))
        batch.rows = rows.to(self.plan.dtype)
        return super().gather_outputs(batch)

    def send_grads(self, batch: RowsInFlight, grad: Tensor) -> None:
        step = self.step(batch, "gradients")
        sums = self.row_gradients(batch, grad)
        batch.pending = self._gradients.start(step, sums, batch.asked, batch.into)


class AllGatherRowsGroup(RowGroup):
    """Every rank stores the same rows, or some columns of each, and is told which ones all ranks
    want: addresses are local ones everywhere.
    """

    @property
    def num_parts(self) -> int:
        return 1

    def is_told(self, batch: RowsInFlight) -> bool:
        """Whether others need to know which rows this rank wants."""
        del batch
        return True

    def begin_counted(self, batch: RowsInFlight) -> None:
        # Each rank is told all of them.
        batch.named = batch.wanted.unique_up_to(self._lasts).repeat(self.world.size)
        if self.is_told(batch):
            step = self.step(batch, "counts")
            batch.pending = self._ids.start_counts(step, batch.named)

    def send_padded(self, batch: RowsInFlight, buffers: Tensor) -> Pending:
        sizes = [buffers.shape[1]] * self.world.size
        return self._ids.start_for_all(self.step(batch, "ids"), buffers.view(-1), sizes)

    def exchange_ids(self, batch: RowsInFlight) -> None:
        if batch.slots is not None:
            return
        size = self.world.size
        batch.asked, batch.into = batch.counts[:size], batch.counts[size:]
        batch.wanted.num_unique = batch.asked[0]
        if self.is_told(batch):
            step, rows = self.step(batch, "ids"), batch.wanted.rows()
            batch.pending = self._ids.start_for_all(step, rows, batch.into)

    def receive_ids(self, batch: RowsInFlight) -> None:
        if self.is_told(batch):
            super().receive_ids(batch)


class UniqueColumnsGroup(AllGatherRowsGroup):
    """S(1), skewed: unique rows are asked of all ranks, each of which has columns of every row.

    What a rank sends to another is a block [rows, columns of the one that stores them], in one
    dimension, since ranks may hold unequal widths.
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing, given: Given) -> None:
        super().__init__(plan, boxing, given)
        self._columns = self._stack.columns_by_rank()  # ascending from rank to rank or not
        self._widths = [columns.stop - columns.start for columns in self._columns]

    def lookup(self, batch: RowsInFlight) -> None:
        lr = self._stack.optimizer.lr
        rows = batch.lookup(self._store, batch.lookups[0], lr).to(self.plan.comm_dtype)
        wanted, held = self._sizes(batch)
        step = self.step(batch, "vectors")
        batch.pending = self._vectors.start(step, rows.reshape(-1), held, wanted)

    def gather_outputs(self, batch: RowsInFlight) -> Tensor:
        wanted, _ = self._sizes(batch)
        flat = received(self.step(batch, "vectors"), batch.take_pending(), sum(wanted))
        rows = flat.new_empty(batch.asked[0], self._stack.dim, dtype=self.plan.dtype)
        for columns, part in zip(self._columns, flat.split(wanted), strict=True):
            here = rows[:, columns]
            here.copy_(part.view(here.shape))
        batch.rows = rows
        return super().gather_outputs(batch)

    def send_grads(self, batch: RowsInFlight, grad: Tensor) -> None:
        wanted, held = self._sizes(batch)
        sums = self.row_gradients(batch, grad)
        flat = sums.new_empty(sums.numel())
        for columns, part in zip(self._columns, flat.split(wanted), strict=True):
            here = sums[:, columns]
            part.view(here.shape).copy_(here)
        step = self.step(batch, "gradients")
        batch.pending = self._gradients.start(step, flat, wanted, held)

    def receive_grads(self, batch: RowsInFlight) -> None:
        _, held = self._sizes(batch)
        flat = received(self.step(batch, "gradients"), batch.take_pending(), sum(held))
        sums = flat.view(sum(batch.into), self._widths[self.world.rank])
        self.keep(batch, batch.lookups, [sums.to(self.plan.dtype)])

    def _sizes(self, batch: RowsInFlight) -> tuple[list[int], list[int]]:
        """Elements of the rows wanted here, by the rank that stores them, and of those stored here,
        by the rank that wants them.
        """
        mine = self._widths[self.world.rank]
        return [batch.asked[0] * w for w in self._widths], [count * mine for count in batch.into]


class LocalRowsGroup(AllGatherRowsGroup):
    """B tables: each rank looks up its samples; all learn which rows were touched, and how."""

    def is_told(self, batch: RowsInFlight) -> bool:
        return batch.training

    def lookup(self, batch: RowsInFlight) -> None:
        rows = batch.wanted.rows() if batch.own is None else batch.own
        batch.rows = self._store.peek(Lookup(rows))

    def send_grads(self, batch: RowsInFlight, grad: Tensor) -> None:
        step = self.step(batch, "gradients")
        sums = self.row_gradients(batch, grad)
        batch.pending = self._gradients.start_for_all(step, sums, batch.into)

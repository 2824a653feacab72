"""Groups whose transfers are conversions: those of ``plan/boxed_exchanges.py``."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.embedding.exchange.base import (
    GRADIENTS,
    VECTORS,
    BatchT,
    Given,
    Group,
    GroupInFlight,
)
from sbpflow.embedding.exchange.shared_state import SharedState
from sbpflow.embedding.ids.addresses import LocalAddresses
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import RowStore


@dataclass(frozen=True, slots=True)
class Member:
    """A stack that this rank takes part in, its store and the map from ids to rows of it."""

    index: int
    stack: TableBatch
    store: RowStore
    addresses: LocalAddresses


class AddressedGroup(Group[BatchT]):
    """A group whose ranks look ids up in their own stores, member by member: those of the whole
    batch, or of the local samples.
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing, given: Given) -> None:
        super().__init__(plan, boxing, given)
        self._state = SharedState(plan, boxing)
        self._everywhere = plan.kind.looks_up_all
        received = given.received if self._everywhere else None
        self.members = [
            Member(
                index,
                stack,
                given.make_store(plan, index, self._state.sum_of(index)),
                LocalAddresses(
                    stack,
                    self.world.rank,
                    self.world.device,
                    dtype=plan.dtype,
                    columns=received.columns if received else None,
                    places=received.places if received else None,
                ),
            )
            for index, stack in enumerate(plan.stacks)
            if plan.takes_part(index, self.world.rank)
        ]

    def exchange_ids(self, batch: BatchT) -> None:
        """Nothing to do: the ids are all there is to know."""

    def receive_ids(self, batch: BatchT) -> None:
        if not self.members:
            return
        ids, pooled = self._ids_of(batch), self.plan.pooled
        batch.lookups = [
            m.addresses.make_lookup(ids, pooled=pooled, absent=m.store.kernel.absent)
            for m in self.members
        ]

    def stores(self) -> list[tuple[TableBatch, RowStore]]:
        return [(member.stack, member.store) for member in self.members]

    def _ids_of(self, batch: BatchT) -> BatchIds:
        ids = batch.everywhere if self._everywhere else batch.local
        if ids is None:
            raise RuntimeError(f"{self.plan.name}: this rank did not receive the batch's ids")
        return ids

    def rows_of(self, batch: BatchT) -> Tensor:
        """[samples, sum of widths] of the samples looked up here; pooled groups [samples, dim]."""
        samples, pooled = self._ids_of(batch).num_samples, self.plan.pooled
        parts = [
            batch.lookup(member.store, lookup, member.stack.optimizer.lr).view(
                samples, self._width(member)
            )
            for member, lookup in zip(self.members, batch.lookups, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.stack(parts).sum(0) if pooled else torch.cat(parts, 1)

    def split(self, grad: Tensor) -> list[Tensor]:
        """The gradient of ``rows_of``, [bags, width] per member; pooled, all of it to each."""
        if self.plan.pooled:
            return [grad] * len(self.members)
        widths = [self._width(member) for member in self.members]
        return [
            part.reshape(grad.shape[0] * member.addresses.num_uses, member.store.width)
            for part, member in zip(grad.split(widths, 1), self.members, strict=True)
        ]

    def update(self, step: int) -> None:
        batches, self._state.batch_size, merged = self.take_collected()
        # Stack by stack in the plan's order, so that all ranks walk the same steps.
        mine = {member.index: n for n, member in enumerate(self.members)}
        for index in range(len(self.plan.stacks)):
            if index in mine:
                lookup, grad = merged[mine[index]]
                member = self.members[mine[index]]
                lr = member.stack.optimizer.lr
                batches[-1].update(member.store, lookup, grad, lr, step)
            else:
                self._state.stand_by(index)
        self._release(batches)

    def _width(self, member: Member) -> int:
        """Columns of a member in a part; spelled out because a batch may have no rows."""
        width = member.store.width
        return width if self.plan.pooled else width * member.addresses.num_uses


@dataclass(slots=True, kw_only=True)
class LocalInFlight(GroupInFlight):
    """``vectors`` after the lookup, ``grads`` of each member after the push in a world of one."""

    vectors: Tensor | None = None
    grads: list[Tensor] = field(default_factory=list[Tensor])


class LocalGroup(AddressedGroup[LocalInFlight]):
    """B tables whose gradients are all-reduced whole, and all tables in a world of one rank.

    A row's count of uses travels beside its gradient, so that only touched rows take a step.
    """

    @cached_property
    def _steps(self) -> tuple[BoxingStep, ...]:
        return self.plan.conversion(0, "gradients")  # of a size that no batch changes

    def start_id_exchange(
        self, local: BatchIds, batch_size: int, *, number: int | None
    ) -> LocalInFlight:
        return LocalInFlight(local=local, batch_size=batch_size, number=number)

    def lookup(self, batch: LocalInFlight) -> None:
        batch.vectors = self.rows_of(batch)

    def gather_outputs(self, batch: LocalInFlight) -> Tensor:
        vectors, batch.vectors = batch.vectors, None
        if vectors is None:
            raise RuntimeError(f"{self.plan.name}: vectors before the lookup, or twice")
        return vectors

    def send_grads(self, batch: LocalInFlight, grad: Tensor) -> None:
        parts = self.split(grad)
        if self.world.size == 1:
            batch.grads = parts
            return
        whole: list[Tensor] = []
        for lookup, member, part in zip(batch.lookups, self.members, parts, strict=True):
            rows, sums = member.store.kernel.row_gradients(lookup, part)
            table = part.new_zeros(member.store.num_rows, member.store.width + 1)
            counted = torch.cat([sums, sums.new_ones(sums.shape[0], 1)], 1)
            whole.append(table.index_copy_(0, rows.to(torch.int64), counted).view(-1))
        batch.pending = self.start(self._steps, torch.cat(whole), GRADIENTS)

    def receive_grads(self, batch: LocalInFlight) -> None:
        if self.world.size == 1:
            self.keep(batch, batch.lookups, batch.grads)
            return
        flat = self.arrived(self._steps, batch.take_pending())
        lookups: list[Lookup] = []
        grads: list[Tensor] = []
        sizes = [m.store.num_rows * (m.stack.dim + 1) for m in self.members]
        for member, part in zip(self.members, flat.split(sizes), strict=True):
            table = part.view(-1, member.stack.dim + 1)
            rows, sums = _touched(table, member.store.kernel.absent)
            lookups.append(Lookup(rows))
            grads.append(sums)
        self.keep(batch, lookups, grads)


def _touched(table: Tensor, absent: int | None) -> tuple[Tensor, Tensor]:
    """(addresses, gradients) of the rows of ``table`` [rows, width + 1] that some rank counted in
    the last column, the looked up ones among them; of all rows, if others may be ``absent``.
    """
    counts, sums = table[:, -1], table[:, :-1]
    if absent is not None:
        rows = torch.arange(table.shape[0], device=table.device)
        return torch.where(counts > 0, rows, absent), sums
    rows = counts.nonzero().squeeze(1)
    return rows, sums.index_select(0, rows)


class ColumnOrder:
    """The columns of vectors as the ranks hold them, and in the order of the group's uses."""

    def __init__(self, plan: GroupPlan, device: torch.device) -> None:
        order = plan.column_order()
        self._in_order = order == tuple(range(len(order)))
        self._order = torch.tensor(order, dtype=torch.int64, device=device)
        self._places = torch.argsort(self._order)

    def to_uses(self, vectors: Tensor) -> Tensor:
        """From rank order."""
        return vectors if self._in_order else vectors.index_select(1, self._places)

    def to_ranks(self, grad: Tensor) -> Tensor:
        """From the uses' order."""
        return grad if self._in_order else grad.index_select(1, self._order)


class BoxedGroup(AddressedGroup[GroupInFlight]):
    """Owners look up the whole batch; boxing brings the vectors home and the gradients back.

    ``columns``: whole tables and S(1), the vectors are one uneven S(1) in rank order. ``reduce``:
    S(0) gives terms that sum at home, P; a grid gives (P, S(1)).
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing, given: Given) -> None:
        super().__init__(plan, boxing, given)
        self._order = ColumnOrder(plan, self.world.device)

    def start_id_exchange(
        self, local: BatchIds, batch_size: int, *, number: int | None
    ) -> GroupInFlight:
        return GroupInFlight(local=local, batch_size=batch_size, number=number)

    def lookup(self, batch: GroupInFlight) -> None:
        steps, part = self.plan.conversion(batch.batch_size, "vectors"), None
        if self.members:
            part = self.rows_of(batch)
        elif self.world.rank in steps[0].src.placement:  # which has no columns here
            part = torch.empty(
                batch.batch_size, 0, dtype=self.plan.comm_dtype, device=self.world.device
            )
        batch.pending = self.start(steps, part, VECTORS)

    def gather_outputs(self, batch: GroupInFlight) -> Tensor:
        out = self.arrived(self.plan.conversion(batch.batch_size, "vectors"), batch.take_pending())
        return self._order.to_uses(out)

    def send_grads(self, batch: GroupInFlight, grad: Tensor) -> None:
        steps = self.plan.conversion(batch.batch_size, "gradients")
        batch.pending = self.start(steps, self._order.to_ranks(grad), GRADIENTS)

    def receive_grads(self, batch: GroupInFlight) -> None:
        pending = batch.take_pending()
        if not self.members:  # no rows here, but the same steps on all ranks
            pending.wait()
            self.keep(batch, [], [])
            return
        grad = self.arrived(self.plan.conversion(batch.batch_size, "gradients"), pending)
        self.keep(batch, batch.lookups, self.split(grad))

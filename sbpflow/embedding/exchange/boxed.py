"""Defines the groups that run the exchanges of ``plan/boxed_exchanges.py``, whose transfer sizes
are known in advance.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.embedding.exchange.base import GRADIENTS, VECTORS, Group, GroupContext, GroupInFlight
from sbpflow.embedding.exchange.shared_state import SharedState
from sbpflow.embedding.ids.addresses import LocalAddresses
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import RowStore


@dataclass(frozen=True, slots=True)
class Member:
    """A stack of the group on this rank, with its store and its map from ids to rows."""

    index: int
    stack: TableBatch
    store: RowStore
    addresses: LocalAddresses


class AddressedGroup(Group[GroupInFlight]):
    """Base class of groups in which each rank looks up ids in its own stores, either for the global
    batch or for its own samples.
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing, context: GroupContext) -> None:
        super().__init__(plan, boxing, context)
        self._state = SharedState(plan, boxing)
        self._everywhere = everywhere = plan.kind.looks_up_all
        self.members = [
            Member(
                index,
                stack,
                context.make_store(plan, index, self._state.sum_of(index)),
                LocalAddresses(
                    stack,
                    self.world.rank,
                    self.world.device,
                    dtype=plan.dtype,
                    columns=context.columns if everywhere else None,
                    places=context.places if everywhere else None,
                    compiled=context.compiled,
                ),
            )
            for index, stack in enumerate(plan.stacks)
            if plan.takes_part(index, self.world.rank)
        ]

    def start_id_exchange(
        self, local: BatchIds, batch_size: int, *, number: int | None
    ) -> GroupInFlight:
        return GroupInFlight(local=local, batch_size=batch_size, number=number)

    def exchange_ids(self, batch: GroupInFlight) -> None:
        """Do nothing: the collection itself sends the ids of these groups."""

    def receive_ids(self, batch: GroupInFlight) -> None:
        if not self.members:
            return
        ids, pooled = self._ids_of(batch), self.plan.pooled
        batch.lookups = [
            m.addresses.make_lookup(ids, pooled=pooled, absent=m.store.kernel.absent)
            for m in self.members
        ]

    def stores(self) -> list[tuple[TableBatch, RowStore]]:
        return [(member.stack, member.store) for member in self.members]

    def _ids_of(self, batch: GroupInFlight) -> BatchIds:
        ids = batch.everywhere if self._everywhere else batch.local
        if ids is None:
            raise RuntimeError(f"{self.plan.name}: this rank did not receive the batch's ids")
        return ids

    def rows_of(self, batch: GroupInFlight) -> Tensor:
        """Return the looked-up rows ([samples, sum of widths]) or, in pooled groups, their sums
        ([samples, dim]).
        """
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
        """Split the gradient of ``rows_of`` into one gradient [bags, width] per member."""
        if self.plan.pooled:
            return [grad] * len(self.members)
        widths = [self._width(member) for member in self.members]
        return [
            part.reshape(grad.shape[0] * member.addresses.num_uses, member.store.width)
            for part, member in zip(grad.split(widths, 1), self.members, strict=True)
        ]

    def update(self, step: int) -> None:
        batches, self._state.batch_size, merged = self.take_collected()
        # Follow the plan's order: all ranks must run the same collectives in the same order.
        own = {m.index: (m.store, *pair) for m, pair in zip(self.members, merged, strict=True)}
        for index, stack in enumerate(self.plan.stacks):
            if index in own:
                store, lookup, grads = own[index]
                batches[-1].update(store, lookup, grads, stack.optimizer.lr, step)
            else:
                self._state.stand_by(index)
        self._release(batches)

    def _width(self, member: Member) -> int:
        """Return the number of columns of a member in ``rows_of``.

        ``view`` could not infer this number for a batch without samples.
        """
        width = member.store.width
        return width if self.plan.pooled else width * member.addresses.num_uses


class LocalGroup(AddressedGroup):
    """Runs the exchange of B tables whose dense gradients are all-reduced, and the exchange of a
    single rank, which sends nothing.

    The all-reduce also counts the ranks that touched each row, because the optimizer must update
    only touched rows. For example, weight decay must not shrink an untouched row.
    """

    @cached_property
    def _steps(self) -> tuple[BoxingStep, ...]:
        # The size of the transfer does not depend on the batch.
        return self.plan.conversion(0, "gradients")

    @cached_property
    def _sizes(self) -> list[int]:
        """Return the number of elements that each member contributes to the all-reduce."""
        return [m.store.num_rows * (m.stack.dim + 1) for m in self.members]

    def lookup(self, batch: GroupInFlight) -> None:
        batch.rows = self.rows_of(batch)

    def gather_outputs(self, batch: GroupInFlight) -> Tensor:
        return batch.take_rows()

    def send_grads(self, batch: GroupInFlight, grad: Tensor) -> None:
        parts = self.split(grad)
        if self.world.size == 1:
            self.keep(batch, batch.lookups, parts)
            return
        flat = self._dense_gradients(batch.lookups, parts)
        batch.pending = self.start(self._steps, flat, GRADIENTS, donate=True)

    def _dense_gradients(self, lookups: list[Lookup], parts: list[Tensor]) -> Tensor:
        """Return the gradients of all rows, with a last column that is 1 in touched rows, for every
        member in turn.
        """
        flat = parts[0].new_zeros(sum(self._sizes), dtype=self._steps[0].dtype)
        tables = flat.split(self._sizes)
        for lookup, member, part, own in zip(lookups, self.members, parts, tables, strict=True):
            rows, sums = member.store.kernel.row_gradients(lookup, part)
            rows, table = rows.to(torch.int64), own.view(-1, member.stack.dim + 1)
            table[:, :-1].index_copy_(0, rows, sums.to(table.dtype))
            table[:, -1].index_fill_(0, rows, 1)
        return flat

    def receive_grads(self, batch: GroupInFlight) -> None:
        if self.world.size == 1:  # ``send_grads`` has already collected the gradients
            return
        flat = self.arrived(self._steps, batch.take_pending())
        lookups: list[Lookup] = []
        grads: list[Tensor] = []
        for member, part in zip(self.members, flat.split(self._sizes), strict=True):
            table = part.view(-1, member.stack.dim + 1)
            rows, sums = _touched(table, member.store.kernel.absent)
            lookups.append(Lookup(rows))
            grads.append(sums)
        self.keep(batch, lookups, grads)


def _touched(table: Tensor, absent: int | None) -> tuple[Tensor, Tensor]:
    """Return the addresses and the gradients of the rows that any rank touched.

    ``table`` is [rows, width + 1]; its last column is the number of ranks that touched a row. If
    the kernel has an ``absent`` address, return all rows, with this address in place of untouched
    rows.
    """
    counts, sums = table[:, -1], table[:, :-1]
    if absent is not None:
        rows = torch.arange(table.shape[0], device=table.device)
        return torch.where(counts > 0, rows, absent), sums
    rows = counts.nonzero().squeeze(1)
    return rows, sums.index_select(0, rows)


class BoxedGroup(AddressedGroup):
    """Runs exchanges in which owners look up the ids of the global batch.

    Boxing sends the vectors and returns the gradients. With the exchange ``columns`` (S(1) tables,
    and tables on one rank), the vectors have an uneven layout S(1), with columns in rank order.
    With the exchange ``reduce`` (S(0) tables), the vectors are partial sums, with layout P or, on a
    grid of ranks, (P, S(1)).
    """

    def lookup(self, batch: GroupInFlight) -> None:
        steps, part = self.plan.conversion(batch.batch_size, "vectors"), None
        if self.members:
            part = self.rows_of(batch)
        elif self.world.rank in steps[0].src.placement:
            # This rank is in the placement, but stores no columns.
            part = torch.empty(
                batch.batch_size, 0, dtype=self.plan.comm_dtype, device=self.world.device
            )
        batch.pending = self.start(steps, part, VECTORS)

    def gather_outputs(self, batch: GroupInFlight) -> Tensor:
        steps = self.plan.conversion(batch.batch_size, "vectors")
        return self.arrived(steps, batch.take_pending())

    def send_grads(self, batch: GroupInFlight, grad: Tensor) -> None:
        steps = self.plan.conversion(batch.batch_size, "gradients")
        batch.pending = self.start(steps, grad, GRADIENTS)

    def receive_grads(self, batch: GroupInFlight) -> None:
        pending = batch.take_pending()
        if not self.members:  # a rank without rows still joins the collective
            pending.wait()
            self.keep(batch, [], [])
            return
        grad = self.arrived(self.plan.conversion(batch.batch_size, "gradients"), pending)
        self.keep(batch, batch.lookups, self.split(grad))

"""Defines the group that exchanges unique rows of S(0) tables, and can send some rows early and
some gradients late.
"""

from collections.abc import Sequence

from torch import Tensor

from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.embedding.exchange.all_to_all import received
from sbpflow.embedding.exchange.base import GroupContext, GroupInFlight
from sbpflow.embedding.exchange.early_rows import (
    EarlyInFlight,
    LateInFlight,
    RowSplit,
    UsedRows,
    flag_bytes,
    pack,
    part_of,
    unpack,
)
from sbpflow.embedding.exchange.rows import RowGroup, RowsInFlight
from sbpflow.embedding.plan.group_plan import GroupPlan, Purpose


class UniqueGroup(RowGroup):
    """Exchanges rows of S(0) tables with skewed ids: ranks request unique rows from their owners
    and expand them.
    """

    def __init__(self, plan: GroupPlan, boxing: Boxing, context: GroupContext) -> None:
        super().__init__(plan, boxing, context)
        self._used = UsedRows(self._store.num_rows if plan.early_rows else 0)
        # Training batches with pending updates, by batch number.
        self._to_update: dict[int, RowsInFlight] = {}
        self._late: RowsInFlight | None = None  # batch whose late gradients are not yet applied

    def receive_ids(self, batch: RowsInFlight) -> None:
        super().receive_ids(batch)
        if self.plan.early_rows and batch.number is not None:
            self._to_update[batch.number] = batch

    def mark_early(self, batch: RowsInFlight) -> None:
        if not self.plan.early_rows or batch.number is None:
            return
        earlier = [other for number, other in self._to_update.items() if number < batch.number]
        flags = self._used.unused(batch.lookups[0].addresses, map(_pending_rows, earlier))
        batch.early = EarlyInFlight(*self._send_flags(batch, "flags", flags))
        if self.plan.late_gradients and earlier and earlier[-1].late is None:
            last = earlier[-1]
            flags = self._used.unused(last.lookups[0].addresses, [batch.lookups[0].addresses])
            last.late = LateInFlight(*self._send_flags(last, "late flags", flags))

    def _send_flags(
        self, batch: RowsInFlight, purpose: Purpose, flags: Tensor
    ) -> tuple[RowSplit, Pending]:
        """Send each rank the ``flags`` of the rows that it requested; return the split by flags,
        and the transfer.
        """
        pending = self._ids.start(
            self.step(batch, purpose),
            pack(flags, batch.incoming),
            flag_bytes(batch.incoming),
            flag_bytes(batch.requested),
        )
        return RowSplit.of(flags, batch.incoming), pending

    def _receive_flags(self, batch: RowsInFlight, purpose: Purpose, pending: Pending) -> RowSplit:
        """Receive the flags of the rows that this rank requested; return the split by flags."""
        count = sum(flag_bytes(batch.requested))
        flags = received(self.step(batch, purpose), pending, count)
        return RowSplit.of(unpack(flags, batch.requested), batch.requested)

    def send_early(self, batch: RowsInFlight) -> None:
        early = batch.early
        if early is None or early.flags is None or batch.number is None:
            return
        early.wanted = wanted = self._receive_flags(batch, "flags", early.flags)
        early.flags, owned = None, early.owned
        batch.lookups[0].place(self._store.admit(batch.number))
        step, rows = self.step(batch, "early vectors"), self._read(batch, owned.chosen)
        early.vectors = self._vectors.start(step, rows, owned.num_chosen, wanted.num_chosen)

    def _read(self, batch: RowsInFlight, positions: Tensor) -> Tensor:
        """Read some rows of an admitted batch, in the comm dtype.

        No learning rate is passed, because the update uses the lookup of the whole batch.
        """
        rows = self._store.kernel.lookup(part_of(batch.lookups[0], positions))
        return rows.to(self.plan.comm_dtype)

    def lookup(self, batch: RowsInFlight) -> None:
        step, early = self.step(batch, "vectors"), batch.early
        late = None if self._late is None else self._late.number
        if batch.number is not None and late is not None and batch.number != late + 1:
            raise RuntimeError(
                f"{step.id}: the late gradients of the previous batch have not been applied; call "
                "settle first"
            )
        if early is None:
            rows = batch.lookup(self._store, batch.lookups[0], self._stack.optimizer.lr)
            rows = rows.to(self.plan.comm_dtype)
            batch.pending = self._vectors.start(step, rows, batch.incoming, batch.requested)
            return
        owned, wanted = early.owned, early.wanted
        if wanted is None:
            raise RuntimeError(f"{step.id}: send_early must be called after mark_early")
        rows = self._read(batch, owned.others)
        batch.pending = self._vectors.start(step, rows, owned.num_others, wanted.num_others)

    def gather_outputs(self, batch: RowsInFlight) -> Tensor:
        early, batch.early = batch.early, None
        if early is None or early.wanted is None or early.vectors is None:
            batch.rows = self.take(batch, "vectors", sum(batch.requested)).to(self.plan.dtype)
            return super().gather_outputs(batch)
        split, step = early.wanted, self.step(batch, "early vectors")
        sent_early = received(step, early.vectors, split.chosen.numel())
        others = self.take(batch, "vectors", split.others.numel())
        batch.rows = split.join(sent_early, others, self.plan.dtype)
        return super().gather_outputs(batch)

    def cancel(self, batch: RowsInFlight) -> None:
        if batch.early is not None:
            batch.early.wait()
        super().cancel(batch)

    def _release(self, batches: Sequence[GroupInFlight]) -> None:
        super()._release(batches)
        for batch in batches:
            if batch.number is not None:
                self._to_update.pop(batch.number, None)

    def send_grads(self, batch: RowsInFlight, grad: Tensor) -> None:
        step, late = self.step(batch, "gradients"), batch.late
        sums = self.row_gradients(batch, grad)
        if late is None or late.flags is None:
            batch.pending = self._gradients.start(step, sums, batch.requested, batch.incoming)
            return
        late.wanted = wanted = self._receive_flags(batch, "late flags", late.flags)
        late.flags, late.sums = None, sums.index_select(0, wanted.chosen)
        others = sums.index_select(0, wanted.others)
        batch.pending = self._gradients.start(
            step, others, wanted.num_others, late.owned.num_others
        )

    def receive_grads(self, batch: RowsInFlight) -> None:
        if (late := batch.late) is None:
            super().receive_grads(batch)
            return
        owned = late.owned
        sums = self.take(batch, "gradients", owned.others.numel())
        lookup = part_of(batch.lookups[0], owned.others)
        self.keep(batch, [lookup], [sums.to(self.plan.dtype)])

    def send_late(self) -> None:
        batch = self._late
        if batch is None or (late := batch.late) is None or late.sums is None:
            return
        if late.wanted is None:
            raise RuntimeError("send_late was called before send_grads")
        step, sums, late.sums = self.step(batch, "late gradients"), late.sums, None
        sizes = late.wanted.num_chosen, late.owned.num_chosen
        late.gradients = self._gradients.start(step, sums, *sizes)

    def settle(self) -> None:
        self.send_late()
        batch, self._late = self._late, None
        if batch is None or (late := batch.late) is None:
            return
        if late.gradients is None or late.lookup is None:
            raise RuntimeError("settle was called before update")
        step = self.step(batch, "late gradients")
        sums = received(step, late.gradients, late.lookup.num_bags).to(self.plan.dtype)
        batch.update(self._store, late.lookup, sums, self._stack.optimizer.lr, late.step)
        self._release([batch])

    @property
    def is_settled(self) -> bool:
        return self._late is None

    def update(self, step: int) -> None:
        self.settle()
        self.plan.check_step(len(self._collected))
        batches = self.apply(step)
        batch = self._to_update.get(batches[-1].number or 0)
        if batch is None or (late := batch.late) is None:
            self._release(batches)
            return
        late.step, self._late = step, batch
        late.lookup = part_of(batch.lookups[0], late.owned.chosen)


def _pending_rows(batch: RowsInFlight) -> Tensor:
    """Return the addresses of the rows that the batch has yet to update."""
    late = None if batch.late is None else batch.late.lookup
    return (late or batch.lookups[0]).addresses

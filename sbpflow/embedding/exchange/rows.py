"""Groups whose single rows travel, deduplicated: unique (S(0)) and local (B, touched rows)."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.exchange.all_to_all import Exchange, received
from sbpflow.embedding.exchange.base import GRADIENTS, VECTORS, Group, StorageFactory, Visit
from sbpflow.embedding.exchange.id_transfer import IDS
from sbpflow.embedding.ids.addresses import OwnerAddresses
from sbpflow.embedding.ids.reader import BatchIds
from sbpflow.embedding.plan.group_plan import MAX_BATCH_SIZES, GroupPlan
from sbpflow.embedding.plan.stack import Stack
from sbpflow.embedding.storage.access import Access, sum_bags
from sbpflow.embedding.storage.base import Storage
from sbpflow.runtime.world import World


@dataclass(slots=True, kw_only=True)
class RowVisit(Visit):
    """``asked`` counts the rows this rank names to each rank, ``into`` those they name to it."""

    wanted: Access  # of the local samples
    asked: list[int]
    into: list[int] = field(default_factory=list[int])
    rows: Tensor | None = None  # [unique rows wanted here, dim], after they came

    def take_rows(self) -> Tensor:
        rows, self.rows = self.rows, None
        if rows is None:
            raise RuntimeError("no rows are there: a move was left out, or made twice")
        return rows


class RowGroup(Group[RowVisit]):
    """One stack, whose rows have job-wide addresses; who wants which is told once per batch."""

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing, make: StorageFactory) -> None:
        super().__init__(plan, world, boxing)
        (self._stack,) = plan.stacks
        self._storage = make(plan, 0, None)
        self._steps = lru_cache(MAX_BATCH_SIZES)(plan.row_steps)
        self._ids = Exchange(world, IDS)
        self._vectors = Exchange(world, VECTORS)
        self._gradients = Exchange(world, GRADIENTS)

    def storages(self) -> list[tuple[Stack, Storage]]:
        return [(self._stack, self._storage)]

    def vectors(self, visit: RowVisit) -> Tensor:
        """Expand ``visit.rows`` to the samples' vectors."""
        samples = visit.local.num_samples
        vectors = sum_bags(visit.take_rows(), visit.wanted, visit.wanted.inverse())
        if self.plan.pooled:
            return vectors.view(samples, len(self._stack.uses), self._stack.dim).sum(1)
        return vectors.view(samples, self.plan.width)

    def row_gradients(self, visit: RowVisit, grad: Tensor) -> Tensor:
        """[unique rows wanted here, dim], summed over this rank's samples, as they travel."""
        if self.plan.pooled:
            grad = grad.repeat(1, len(self._stack.uses))
        _, sums = visit.wanted.row_gradients(grad.reshape(-1, self._stack.dim))
        return sums.to(self.plan.gradient_wire)

    def collect(self, visit: RowVisit) -> None:
        step, count = self._steps(visit.num_rows)[-1], visit.accesses[0].num_bags
        sums = received(step, visit.take_pending(), count).to(self.plan.dtype)
        self.keep(visit, visit.accesses, [sums])

    def update(self) -> None:
        last, _, ((access, grad),) = self.take_collected()
        last.update(self._storage, access, grad)


class UniqueGroup(RowGroup):
    """S(0), skewed: unique rows are asked of their owners, expanded at home, gradients pushed."""

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing, make: StorageFactory) -> None:
        super().__init__(plan, world, boxing, make)
        self._addresses = OwnerAddresses(
            self._stack,
            world.size,
            world.device,
            dtype=plan.dtype,
            address_dtype=plan.address_dtype(),
        )
        inner = self._addresses.bases[1:-1]
        self._cuts = torch.tensor(inner, dtype=plan.address_dtype(), device=world.device)
        self._bases = torch.tensor(
            self._addresses.bases[:-1], dtype=plan.address_dtype(), device=world.device
        )

    def begin(self, local: BatchIds, num_rows: int, *, training: bool) -> RowVisit:
        wanted = self._addresses.access(local)
        unique = wanted.unique()[0]
        cuts = torch.searchsorted(unique, self._cuts).tolist()
        asked = [stop - start for start, stop in pairwise([0, *cuts, unique.numel()])]
        visit = RowVisit(
            local=local, num_rows=num_rows, training=training, wanted=wanted, asked=asked
        )
        visit.pending = self._ids.start_counts(self._steps(num_rows)[0], asked)
        return visit

    def advance(self, visit: RowVisit) -> None:
        counts, step = self._steps(visit.num_rows)[:2]
        visit.into = received(counts, visit.take_pending(), self.world.size).tolist()
        unique = visit.wanted.unique()[0]
        per_owner = torch.tensor(visit.asked, device=unique.device)
        shift = torch.repeat_interleave(self._bases, per_owner, output_size=unique.numel())
        visit.pending = self._ids.start(step, unique - shift, visit.asked, visit.into)

    def look_up(self, visit: RowVisit) -> None:
        asked, into = visit.asked, visit.into
        _, ids, step, _ = self._steps(visit.num_rows)
        visit.accesses = [Access(received(ids, visit.take_pending(), sum(into)))]
        rows = visit.look_up(self._storage, visit.accesses[0])
        visit.pending = self._vectors.start(step, rows.to(self.plan.wire), into, asked)

    def vectors(self, visit: RowVisit) -> Tensor:
        step = self._steps(visit.num_rows)[2]
        rows = received(step, visit.take_pending(), sum(visit.asked))
        visit.rows = rows.to(self.plan.dtype)
        return super().vectors(visit)

    def push(self, visit: RowVisit, grad: Tensor) -> None:
        step = self._steps(visit.num_rows)[3]
        sums = self.row_gradients(visit, grad)
        visit.pending = self._gradients.start(step, sums, visit.asked, visit.into)


class LocalRowsGroup(RowGroup):
    """B tables: each rank looks up its samples; all learn which rows were touched, and how."""

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing, make: StorageFactory) -> None:
        super().__init__(plan, world, boxing, make)
        # Every rank stores the same rows, so addresses are local ones everywhere.
        self._addresses = OwnerAddresses(
            self._stack, 1, world.device, dtype=plan.dtype, address_dtype=plan.address_dtype()
        )

    def begin(self, local: BatchIds, num_rows: int, *, training: bool) -> RowVisit:
        wanted = self._addresses.access(local)
        asked = [wanted.unique()[0].numel()] * self.world.size  # each rank is told all of them
        visit = RowVisit(
            local=local, num_rows=num_rows, training=training, wanted=wanted, asked=asked
        )
        if training:
            visit.pending = self._ids.start_counts(self._steps(num_rows)[0], asked)
        return visit

    def advance(self, visit: RowVisit) -> None:
        if visit.pending is None:
            return
        counts, step = self._steps(visit.num_rows)[:2]
        visit.into = received(counts, visit.take_pending(), self.world.size).tolist()
        rows = self._for_all(visit.wanted.unique()[0])
        visit.pending = self._ids.start(step, rows, visit.asked, visit.into)

    def look_up(self, visit: RowVisit) -> None:
        if visit.pending is not None:
            step = self._steps(visit.num_rows)[1]
            visit.accesses = [Access(received(step, visit.take_pending(), sum(visit.into)))]
            self._storage.prefetch(visit.accesses[0].addresses)
        # Its own rows now; those of all ranks, which contain them, stay until the update.
        rows = visit.wanted.unique()[0]
        self._storage.prefetch(rows)
        visit.rows = self._storage.lookup(Access(rows))
        self._storage.release(rows)

    def push(self, visit: RowVisit, grad: Tensor) -> None:
        step = self._steps(visit.num_rows)[2]
        sums = self._for_all(self.row_gradients(visit, grad))
        visit.pending = self._gradients.start(step, sums, visit.asked, visit.into)

    def _for_all(self, rows: Tensor) -> Tensor:
        """The same rows, once for every rank."""
        return rows.repeat(self.world.size, *[1] * (rows.ndim - 1))

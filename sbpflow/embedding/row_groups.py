"""Groups whose single rows travel, deduplicated: unique (S(0)) and local (B, touched rows)."""

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from sbpflow.boxing import Boxing
from sbpflow.dist import World
from sbpflow.embedding.access import Access, sum_bags
from sbpflow.embedding.addresses import OwnerAddresses
from sbpflow.embedding.exchange import Exchange, received
from sbpflow.embedding.group import GRADIENTS, VECTORS, Group, StorageFactory, Visit
from sbpflow.embedding.group_plan import MAX_BATCH_SIZES, GroupPlan
from sbpflow.embedding.id_transfer import IDS
from sbpflow.embedding.stack import Stack
from sbpflow.embedding.storage import Storage


class RowGroup(Group):
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

    def vectors(self, visit: Visit) -> Tensor:
        """Expand the rows in ``more["rows"]`` to the samples' vectors."""
        wanted: Access = visit.more["wanted"]
        rows: Tensor = visit.more.pop("rows")
        samples = visit.local.num_samples
        vectors = sum_bags(rows, wanted, wanted.inverse())
        if self.plan.pooled:
            return vectors.view(samples, len(self._stack.uses), self._stack.dim).sum(1)
        return vectors.view(samples, self.plan.width)

    def row_gradients(self, visit: Visit, grad: Tensor) -> Tensor:
        """[unique rows wanted here, dim], summed over this rank's samples, as they travel."""
        wanted: Access = visit.more["wanted"]
        if self.plan.pooled:
            grad = grad.repeat(1, len(self._stack.uses))
        _, sums = wanted.row_gradients(grad.reshape(-1, self._stack.dim))
        return sums.to(self.plan.gradient_wire)

    def collect(self, visit: Visit) -> None:
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

    def begin(self, visit: Visit) -> None:
        wanted = self._addresses.access(visit.local)
        unique = wanted.unique()[0]
        cuts = torch.searchsorted(unique, self._cuts).tolist()
        asked = [stop - start for start, stop in pairwise([0, *cuts, unique.numel()])]
        step = self._steps(visit.num_rows)[0]
        visit.more |= {"wanted": wanted, "asked": asked}
        visit.pending = self._ids.start_counts(step, asked)

    def advance(self, visit: Visit) -> None:
        asked: list[int] = visit.more["asked"]
        counts, step = self._steps(visit.num_rows)[:2]
        into = received(counts, visit.take_pending(), self.world.size).tolist()
        unique = visit.more["wanted"].unique()[0]
        per_owner = torch.tensor(asked, device=unique.device)
        shift = torch.repeat_interleave(self._bases, per_owner, output_size=unique.numel())
        visit.more["into"] = into
        visit.pending = self._ids.start(step, unique - shift, asked, into)

    def look_up(self, visit: Visit) -> None:
        asked, into = visit.more["asked"], visit.more["into"]
        _, ids, step, _ = self._steps(visit.num_rows)
        visit.accesses = [Access(received(ids, visit.take_pending(), sum(into)))]
        rows = visit.look_up(self._storage, visit.accesses[0])
        visit.pending = self._vectors.start(step, rows.to(self.plan.wire), into, asked)

    def vectors(self, visit: Visit) -> Tensor:
        step = self._steps(visit.num_rows)[2]
        rows = received(step, visit.take_pending(), sum(visit.more["asked"]))
        visit.more["rows"] = rows.to(self.plan.dtype)
        return super().vectors(visit)

    def push(self, visit: Visit, grad: Tensor) -> None:
        step = self._steps(visit.num_rows)[3]
        sums = self.row_gradients(visit, grad)
        asked, into = visit.more["asked"], visit.more["into"]
        visit.pending = self._gradients.start(step, sums, asked, into)


class LocalRowsGroup(RowGroup):
    """B tables: each rank looks up its samples; all learn which rows were touched, and how."""

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing, make: StorageFactory) -> None:
        super().__init__(plan, world, boxing, make)
        # Every rank stores the same rows, so addresses are local ones everywhere.
        self._addresses = OwnerAddresses(
            self._stack, 1, world.device, dtype=plan.dtype, address_dtype=plan.address_dtype()
        )

    def begin(self, visit: Visit) -> None:
        wanted = self._addresses.access(visit.local)
        visit.more["wanted"] = wanted
        if visit.training:
            count = wanted.unique()[0].numel()
            step = self._steps(visit.num_rows)[0]
            visit.pending = self._ids.start_counts(step, [count] * self.world.size)

    def advance(self, visit: Visit) -> None:
        if visit.pending is None:
            return
        counts, step = self._steps(visit.num_rows)[:2]
        into = received(counts, visit.take_pending(), self.world.size).tolist()
        rows = visit.more["wanted"].unique()[0]
        visit.more["into"] = into
        visit.pending = self._ids.start(step, *self._to_all(rows), into)

    def look_up(self, visit: Visit) -> None:
        if visit.pending is not None:
            step = self._steps(visit.num_rows)[1]
            visit.accesses = [Access(received(step, visit.take_pending(), sum(visit.more["into"])))]
            self._storage.prefetch(visit.accesses[0].addresses)
        # Its own rows now; those of all ranks, which contain them, stay until the update.
        rows = visit.more["wanted"].unique()[0]
        self._storage.prefetch(rows)
        visit.more["rows"] = self._storage.lookup(Access(rows))
        self._storage.release(rows)

    def push(self, visit: Visit, grad: Tensor) -> None:
        step = self._steps(visit.num_rows)[2]
        sums = self.row_gradients(visit, grad)
        into = visit.more["into"]
        visit.pending = self._gradients.start(step, *self._to_all(sums), into)

    def _to_all(self, rows: Tensor) -> tuple[Tensor, list[int]]:
        """The same rows for every rank, and how many for each."""
        size = self.world.size
        return rows.repeat(size, *[1] * (rows.ndim - 1)), [rows.shape[0]] * size

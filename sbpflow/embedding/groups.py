"""What each exchange does with a batch, forward and backward; one class per exchange.

A group turns ids into its part of an output, laid out S(0) ([local batch, width]), and later the
gradient of that part into updates of the rows. Everything static comes from the GroupPlan.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sbpflow.boxing import Boxing
from sbpflow.boxing_plan import BoxingStep
from sbpflow.dist import World
from sbpflow.embedding.addresses import LocalAddresses, OwnerAddresses
from sbpflow.embedding.exchange import Request, UniqueExchange
from sbpflow.embedding.group_plan import GroupPlan, Stack
from sbpflow.embedding.optimizers import SumOverColumns
from sbpflow.embedding.storage import Access, Storage
from sbpflow.errors import SbpError

VECTORS = "vectors"
# (group, stack index, how squares are added up over the ranks of a row) -> this rank's rows
StorageFactory = Callable[[GroupPlan, int, SumOverColumns | None], Storage]


@dataclass(frozen=True, slots=True)
class BatchIds:
    """The ids of one batch: this rank's samples, and where needed those of the whole batch.

    ``local`` [local batch, features] int32; ``everywhere`` [batch, features this rank looks
    up] int32, ``None`` where it looks nothing up; ``columns`` maps a feature to its column there.
    """

    num_rows: int
    local: Tensor
    everywhere: Tensor | None
    columns: dict[int, int]

    def of_local(self, stack: Stack) -> Tensor:
        """[local batch, tables of the stack]."""
        return _take_columns(self.local, list(stack.features))

    def of_everywhere(self, stack: Stack) -> Tensor:
        """[batch, tables of the stack]; only on ranks that hold some of it."""
        if self.everywhere is None:
            raise RuntimeError("this rank did not receive the batch's ids, yet looks some up")
        return _take_columns(self.everywhere, [self.columns[f] for f in stack.features])


def _take_columns(ids: Tensor, columns: list[int]) -> Tensor:
    first, count = columns[0], len(columns)
    if columns == list(range(first, first + count)):
        return ids[:, first : first + count]
    return ids[:, columns]


@dataclass(frozen=True, slots=True)
class Member:
    """A stack that this rank takes part in, its storage and the map from ids to rows of it."""

    index: int
    stack: Stack
    storage: Storage
    addresses: LocalAddresses


class Group(ABC):
    """One group on one rank."""

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing) -> None:
        self.plan = plan
        self.world = world
        self.boxing = boxing
        self.forward_steps = cache(plan.forward_steps)
        self.backward_steps = cache(plan.backward_steps)

    def box(self, steps: tuple[BoxingStep, ...], part: Tensor | None) -> Tensor:
        """Run steps whose result this rank holds a part of; SbpError if it is not that part."""
        out = self.boxing.run(steps, part, VECTORS)
        expected = steps[-1].dst.part_shape(steps[-1].shape, self.world.rank) if steps else None
        if out is None or (expected is not None and out.shape != expected):
            given = "no part" if out is None else f"a part of shape {list(out.shape)}"
            raise SbpError(
                f"{self.plan.name}: rank {self.world.rank} received {given}, not {expected}"
            )
        return out

    @abstractmethod
    def storages(self) -> list[tuple[Stack, Storage]]:
        """What this rank stores."""

    @abstractmethod
    def forward(self, ids: BatchIds, *, training: bool) -> Tensor:
        """[local batch, plan.width]; with ``training`` what ``backward`` needs is kept."""

    @abstractmethod
    def backward(self, grad: Tensor) -> None:
        """Update the rows of the last training forward from [local batch, plan.width]."""


class AddressedGroup(Group):
    """A group whose ranks look ids up in their own storages, member by member.

    ``takes_part`` says for which stacks: in a row split an owner without rows still adds zeros.
    """

    def __init__(
        self,
        plan: GroupPlan,
        world: World,
        boxing: Boxing,
        make: StorageFactory,
        takes_part: Callable[[Stack], bool],
    ) -> None:
        super().__init__(plan, world, boxing)
        self._row_state_steps = cache(plan.row_state_steps)
        self.members = [
            Member(
                index,
                stack,
                make(plan, index, self._sum_of(index)),
                LocalAddresses(stack, world.rank, world.device),
            )
            for index, stack in enumerate(plan.stacks)
            if takes_part(stack)
        ]
        self.num_rows = 0
        self.accesses: list[Access] = []

    def storages(self) -> list[tuple[Stack, Storage]]:
        return [(member.stack, member.storage) for member in self.members]

    def look_up(self, ids: list[Tensor], batch: int) -> tuple[list[Access], Tensor]:
        """Accesses per member and [batch, sum of widths]; pooled groups give [batch, dim]."""
        accesses = self.access(ids)
        parts = [
            member.storage.lookup(access).view(batch, self._width(member))
            for member, access in zip(self.members, accesses, strict=True)
        ]
        if len(parts) == 1:
            return accesses, parts[0]
        return accesses, torch.stack(parts).sum(0) if self.plan.pooled else torch.cat(parts, 1)

    def _width(self, member: Member) -> int:
        """Columns of a member in a part; spelled out because a batch may have no rows."""
        width = member.storage.weights.shape[1]
        return width if self.plan.pooled else width * len(member.stack.tables)

    def access(self, ids: list[Tensor]) -> list[Access]:
        pooled = self.plan.pooled
        return [
            member.addresses.access(member_ids, pooled=pooled)
            for member, member_ids in zip(self.members, ids, strict=True)
        ]

    def update(self, accesses: list[Access], grad: Tensor) -> None:
        """Each member takes its columns of [batch, sum of widths]; pooled, all of them.

        Stack by stack in the plan's order, so that all ranks walk the same steps.
        """
        start = 0
        touched = {m.index: (m, a) for m, a in zip(self.members, accesses, strict=True)}
        for index in range(len(self.plan.stacks)):
            if index in touched:
                member, access = touched[index]
                width, stop = member.storage.weights.shape[1], start + self._width(member)
                part = grad
                if not self.plan.pooled:
                    rows = grad.shape[0] * len(member.stack.tables)
                    part = grad[:, start:stop].reshape(rows, width)
                start = stop
                member.storage.update(access, part)
            elif index in self.plan.shared_state:
                self.boxing.run(self._row_state_steps(index, self.num_rows), None, VECTORS)

    def _sum_of(self, index: int) -> SumOverColumns | None:
        if index not in self.plan.shared_state:
            return None

        def add_up(squares: Tensor) -> Tensor:
            num_rows = self.num_rows * len(self.plan.stacks[index].tables)
            padded = F.pad(squares, (0, num_rows - squares.shape[0]))
            total = self.box(self._row_state_steps(index, self.num_rows), padded)
            return total[: squares.shape[0]]

        return add_up


class LocalGroup(AddressedGroup):
    """B tables: each rank looks up its samples; every rank applies all touched rows' gradients."""

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing, make: StorageFactory) -> None:
        super().__init__(plan, world, boxing, make, takes_part=lambda stack: True)
        self._touched_id_steps = cache(plan.touched_id_steps)
        self._ids = torch.empty(0)

    def forward(self, ids: BatchIds, *, training: bool) -> Tensor:
        of_members = [ids.of_local(member.stack) for member in self.members]
        accesses, vectors = self.look_up(of_members, ids.local.shape[0])
        if training:
            self.num_rows, self.accesses = ids.num_rows, accesses
            if self.world.size > 1:
                self._ids = torch.cat(of_members, 1)
        return vectors

    def backward(self, grad: Tensor) -> None:
        accesses, self.accesses = self.accesses, []
        if self.world.size > 1:
            accesses, grad = self._gather_touched(grad)
        self.update(accesses, grad)

    def _gather_touched(self, grad: Tensor) -> tuple[list[Access], Tensor]:
        ids = self.box(self._touched_id_steps(self.num_rows), self._ids)
        grads = self.box(self.backward_steps(self.num_rows), grad)
        counts = [len(member.stack.tables) for member in self.members]
        return self.access(list(ids.split(counts, 1))), grads


class ColumnOrder:
    """The columns of vectors as the ranks hold them, and in the order of the group's tables."""

    def __init__(self, plan: GroupPlan, device: torch.device) -> None:
        order = plan.column_order()
        self._in_order = order == tuple(range(len(order)))
        self._order = torch.tensor(order, dtype=torch.int64, device=device)
        self._places = torch.argsort(self._order)

    def to_tables(self, vectors: Tensor) -> Tensor:
        """From rank order."""
        return vectors if self._in_order else vectors.index_select(1, self._places)

    def to_ranks(self, grad: Tensor) -> Tensor:
        """From table order."""
        return grad if self._in_order else grad.index_select(1, self._order)


class ColumnsGroup(AddressedGroup):
    """Whole tables and S(1): owners look up the whole batch, columns travel home all-to-all.

    The vectors are one uneven S(1) of [batch, width] in rank order; at home the columns are put
    into table order.
    """

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing, make: StorageFactory) -> None:
        rank = world.rank
        super().__init__(plan, world, boxing, make, takes_part=lambda s: bool(s.pieces(rank)))
        self._order = ColumnOrder(plan, world.device)

    def forward(self, ids: BatchIds, *, training: bool) -> Tensor:
        accesses: list[Access] = []
        vectors = self._nothing(ids.num_rows)
        if self.members:
            of_members = [ids.of_everywhere(member.stack) for member in self.members]
            accesses, vectors = self.look_up(of_members, ids.num_rows)
        if training:
            self.num_rows, self.accesses = ids.num_rows, accesses
        return self._order.to_tables(self.box(self.forward_steps(ids.num_rows), vectors))

    def backward(self, grad: Tensor) -> None:
        accesses, self.accesses = self.accesses, []
        part = self.box(self.backward_steps(self.num_rows), self._order.to_ranks(grad))
        self.update(accesses, part)

    def _nothing(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, 0, dtype=self.plan.dtype, device=self.world.device)


class ReduceGroup(AddressedGroup):
    """S(0) and grids: owners look up the whole batch in their rows, giving terms that sum at home.

    The vectors are P, on a grid (P, S(1)).
    """

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing, make: StorageFactory) -> None:
        owns = world.rank in plan.owners
        super().__init__(plan, world, boxing, make, takes_part=lambda stack: owns)
        self._order = ColumnOrder(plan, world.device)

    def forward(self, ids: BatchIds, *, training: bool) -> Tensor:
        accesses: list[Access] = []
        vectors = None
        if self.members:
            of_members = [ids.of_everywhere(member.stack) for member in self.members]
            accesses, vectors = self.look_up(of_members, ids.num_rows)
        if training:
            self.num_rows, self.accesses = ids.num_rows, accesses
        return self._order.to_tables(self.box(self.forward_steps(ids.num_rows), vectors))

    def backward(self, grad: Tensor) -> None:
        accesses, self.accesses = self.accesses, []
        steps, ordered = self.backward_steps(self.num_rows), self._order.to_ranks(grad)
        if self.members:
            self.update(accesses, self.box(steps, ordered))
        else:
            self.boxing.run(steps, ordered, VECTORS)
            self.update(accesses, grad)  # no rows here, but the same steps on all ranks


class UniqueGroup(Group):
    """S(0), skewed: unique rows are asked of their owners, expanded at home, gradients pushed."""

    def __init__(self, plan: GroupPlan, world: World, boxing: Boxing, make: StorageFactory) -> None:
        super().__init__(plan, world, boxing)
        (self._stack,) = plan.stacks
        self._storage = make(plan, 0, None)
        self._addresses = OwnerAddresses(self._stack, world.size, world.device)
        self._exchange = UniqueExchange(world, self._addresses.bases, plan.unique_steps(world.size))
        self._saved: tuple[Access, Request, Access] | None = None

    def storages(self) -> list[tuple[Stack, Storage]]:
        return [(self._stack, self._storage)]

    def forward(self, ids: BatchIds, *, training: bool) -> Tensor:
        wanted = Access(self._addresses.of(ids.of_local(self._stack)))
        request = self._exchange.ask(wanted.unique()[0])
        asked_here = Access(request.rows)
        rows = self._exchange.answer(request, self._storage.lookup(asked_here))
        if training:
            self._saved = (wanted, request, asked_here)
        expanded = rows.index_select(0, wanted.inverse())
        return expanded.view(ids.local.shape[0], self.plan.width)

    def backward(self, grad: Tensor) -> None:
        if self._saved is None:
            raise RuntimeError(f"{self.plan.name}: backward without a training forward")
        (wanted, request, asked_here), self._saved = self._saved, None
        _, row_grads = wanted.row_gradients(grad.reshape(-1, self._stack.dim))
        self._storage.update(asked_here, self._exchange.push(request, row_grads))


GROUPS = {
    "local": LocalGroup,
    "columns": ColumnsGroup,
    "reduce": ReduceGroup,
    "unique": UniqueGroup,
}

"""What a group of tables is, what an exchange says of one, and which transfers follow from that.

A group is the tables of one output that share an exchange, one each way per batch. Pure data and
pure functions: an ``Exchange`` describes (``boxed_exchanges``, ``row_exchanges``), and the class
that its ``runs`` names executes.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch

from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.costs.counts import Counts, Cut, Facts
from sbpflow.embedding.plan.table_batch import FeatureLookup, TableBatch
from sbpflow.embedding.plan.tables import OutputConfig, TableConfig
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split

Cuts = Sequence[tuple[str, tuple[int, int]]]  # (sbp, parts of rows and of columns)
Purpose = Literal["counts", "ids", "vectors", "gradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStep:
    """A transfer whose size the batch decides, within each of ``groups``: disjoint sets of ranks.

    ``bound_bytes`` is what one rank sends at most, ``total_bound_bytes`` what all ranks together
    do: not every rank can be the one that owns all rows.
    """

    id: str
    collective: str
    groups: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    bound_bytes: int
    total_bound_bytes: int
    what: str

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that ``rank`` passes rows to and takes them from, itself among them."""
        return next(ranks for ranks in self.groups if rank in ranks)


Step = BoxingStep | ExchangeStep
MAX_BATCH_SIZES = 64  # whose steps are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One transfer of a group, of which every rank makes the ``steps``.

    Counts and ids travel ahead of a lookup. In a further round ranks pass on what the last brought.
    """

    purpose: Purpose
    steps: tuple[Step, ...]
    round: int = 0

    @property
    def rows(self) -> ExchangeStep:
        """The step of a stage that moves rows."""
        (step,) = self.steps
        if not isinstance(step, ExchangeStep):
            raise TypeError(f"{step.id}: moves parts of known sizes, not rows")
        return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What decides with which tables of its output a table travels, and is stored.

    ``columns`` is equal for two tables exactly if every rank stores equally many columns of both,
    ``None`` for whole rows; ``stored`` is what tables of one stack must have in common beside that.
    """

    ranks: tuple[int, ...]
    grid: tuple[int, ...]
    columns: Hashable
    sums: bool
    stored: tuple[Hashable, ...]

    @property
    def stack_key(self) -> tuple[Hashable, ...]:
        return (self.columns, *self.stored)


class Exchange(ABC):
    """How ids, vectors and gradients of a group travel: a description without state.

    Several may share a ``name``, as a configuration has it: then layouts, or the world's size, say
    which is meant. ``runs`` names the class that executes it, as ``package.module:Class``, and
    ``calls`` the features of ``costs.counts`` that a group of it adds one to, for each round.
    """

    name: ClassVar[str]
    runs: ClassVar[str]
    calls: ClassVar[tuple[str, ...]]
    pools: ClassVar[bool] = False  # vectors of a sample can be summed before they travel
    copies: ClassVar[bool] = False  # every rank has all of a table, and its updates
    looks_up_all: ClassVar[bool] = False  # owners look up the whole batch, whose ids they need
    adds_terms: ClassVar[bool] = False  # all owners look up, and what they find is added up
    shares_lookups: ClassVar[bool] = False  # an owner reads its share of the lookups alone
    is_default: ClassVar[bool] = False  # where others accept a layout too
    dense_allreduce: ClassVar[bool] = False  # those of whole tables are added up over the ranks

    @abstractmethod
    def accepts(self, layout: Layout, world_size: int) -> bool:
        """Whether a table may be laid out so."""

    def refusal(self, table: TableConfig, layout: Layout, world: Placement) -> str:
        """Why a table cannot have a layout that is accepted for others; "" if it can."""
        return ""

    def suits(self, table: TableConfig, lookups: int, world_size: int) -> bool:
        """Whether it is the one to take among those of its name, for so many lookups a batch."""
        return True

    def cuts(self, num_rows: int, dim: int, world_size: int) -> Cuts:
        """Ways to lay a table out that a planner tries: an sbp, parts of rows and of columns."""
        return ()

    def group_key(self, member: Member) -> tuple[Hashable, ...]:
        """Equal for two tables of an output that can travel together."""
        return ()

    @abstractmethod
    def stages(self, group: "GroupPlan", batch_size: int) -> tuple[Stage, ...]:
        """Every transfer of a group with a batch, in the order they start."""

    @abstractmethod
    def home(self, facts: Facts, cut: Cut) -> Counts:
        """What a table adds to every rank, for its samples."""

    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts:
        """What a shard of so many rows and columns adds to the rank that holds it."""
        return {}


ALONE = "alone"  # the name of what is done in a world of one, whatever was asked for
EXCHANGES: list[Exchange] = []
"""In the order in which they are tried."""


def register(*exchanges: Exchange) -> None:
    """Make exchanges known by their names; ``exchanges`` does it for sbpflow's own."""
    EXCHANGES.extend(one for one in exchanges if one not in EXCHANGES)


def exchange_of(
    name: str, layout: Layout, world_size: int, *, dense_allreduce: bool = False
) -> Exchange:
    """The one of that name that runs a layout; ConfigError if there is none."""
    for one in EXCHANGES:
        fits = one.name == name and one.accepts(layout, world_size)
        if fits and one.dense_allreduce == dense_allreduce:
            return one
    raise ConfigError(f"exchange {name!r}: none of that name runs {layout} on {world_size} ranks")


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The tables of one output that travel together.

    ``shared_state`` are the stacks whose optimizer state is one number per row while ranks share
    the row: their squares are added up. ``dense_allreduce`` of tables are all-reduced where that is
    less than touched rows. Vectors travel as ``comm_dtype``, gradients as ``grad_comm_dtype``.
    """

    name: str
    output: OutputConfig
    exchange: str
    stacks: tuple[TableBatch, ...]
    shared_state: tuple[int, ...]
    world: Placement
    dtype: torch.dtype
    comm_dtype: torch.dtype
    backend: str
    dense_allreduce: bool = False

    @cached_property
    def kind(self) -> Exchange:
        """What is done for ``exchange`` in this world, for these layouts."""
        layout, size = self.stacks[0].layouts[0], self.world.size
        name = ALONE if size == 1 else self.exchange
        return exchange_of(name, layout, size, dense_allreduce=self.dense_allreduce)

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        return tuple(table for stack in self.stacks for table in stack.tables)

    @property
    def grad_comm_dtype(self) -> torch.dtype:
        """bf16 in place of fp16: gradients of a mean over a large batch are below fp16's range."""
        return torch.bfloat16 if self.comm_dtype == torch.float16 else self.comm_dtype

    @property
    def uses(self) -> tuple[FeatureLookup, ...]:
        """The vectors of a sample, in the group's order."""
        return tuple(use for stack in self.stacks for use in stack.uses)

    @property
    def pooled(self) -> bool:
        """Whether the vectors of a sample are summed before they travel."""
        return self.output.sums and self.kind.pools

    @property
    def width(self) -> int:
        """Columns of this group's part of the output at home, before a sum over tables."""
        if self.pooled:
            return self.stacks[0].dim
        return sum(stack.dim * len(stack.uses) for stack in self.stacks)

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that store rows of this group, ascending."""
        layouts = [layout for stack in self.stacks for layout in stack.layouts]
        ranks = {rank for layout in layouts for rank in layout.placement.ranks}
        return tuple(sorted(ranks))

    @property
    def grid(self) -> Placement | None:
        """The rows x columns grid of ranks that the group's tables lie on, if they do."""
        placement = self.stacks[0].layouts[0].placement
        return placement if placement.ndim == 2 else None

    def copy_ranks(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that must hold equal bits of a stack: whole tables, or row state."""
        if self.kind.copies:
            return (self.world.ranks,)
        if index not in self.shared_state:
            return ()
        holders = self.stacks[index].holders()
        if self.grid is None:
            return (holders,)
        rows = [tuple(r for r in ranks if r in holders) for ranks in self.grid.axis_groups(1)]
        return tuple(ranks for ranks in rows if ranks)

    def looks_up_everything(self, rank: int) -> tuple[FeatureLookup, ...]:
        """The uses that ``rank`` looks up for the whole batch, whose ids it therefore needs."""
        if not self.kind.looks_up_all:
            return ()
        return tuple(use for stack in self.stacks for use in stack.uses_on(rank))

    def takes_part(self, index: int, rank: int) -> bool:
        """Whether ``rank`` looks up ids of a stack; where terms are added up, even without rows."""
        holds = bool(self.stacks[index].shards(rank))
        return rank in self.owners if self.kind.adds_terms else holds

    def rank_width(self, rank: int) -> int:
        """Columns that ``rank`` computes for every sample."""
        if self.pooled:
            return self.stacks[0].width(rank)
        return sum(stack.width(rank) * len(stack.uses_on(rank)) for stack in self.stacks)

    def column_order(self) -> tuple[int, ...]:
        """For each column of the vectors as the ranks hold them, its column in the group's order.

        Ranks that hold different columns follow one another: all of them, or the first row of a
        grid. In order already if the columns are not split, or are summed over the tables.
        """
        if self.pooled or (self.kind.adds_terms and self.grid is None):
            return tuple(range(self.width))
        ranks = self.world.ranks if self.grid is None else self.grid.ranks[: self.grid.shape[1]]
        starts: dict[tuple[str, int], int] = {}
        column = 0
        for use in self.uses:
            starts[use.key] = column
            column += use.table.dim
        order: list[int] = []
        for rank in ranks:
            for stack in self.stacks:
                slices = {
                    table.name: layout.part_slices(table.shape, rank)
                    for table, layout in zip(stack.tables, stack.layouts, strict=True)
                }
                for use in stack.uses_on(rank):
                    start, part = starts[use.key], slices[use.table.name]
                    if part is not None:
                        order += range(start + part[1].start, start + part[1].stop)
        return tuple(order)

    def stages(self, batch_size: int) -> tuple[Stage, ...]:
        """Every transfer with a global batch of ``batch_size``, in the order they start."""
        kept = self._planned
        if batch_size not in kept:
            if len(kept) == MAX_BATCH_SIZES:
                kept.clear()
            kept[batch_size] = self.kind.stages(self, batch_size)
        return kept[batch_size]

    @cached_property
    def _planned(self) -> dict[int, tuple[Stage, ...]]:
        return {}

    def steps(self, batch_size: int, *purposes: Purpose) -> tuple[Step, ...]:
        """Those of the stages for these purposes."""
        stages = self.stages(batch_size)
        return tuple(s for stage in stages if stage.purpose in purposes for s in stage.steps)

    def conversion(self, batch_size: int, purpose: Purpose) -> tuple[BoxingStep, ...]:
        """Those whose sizes follow from the batch's."""
        return tuple(s for s in self.steps(batch_size, purpose) if isinstance(s, BoxingStep))

    def last_ids(self, batch_size: int) -> ExchangeStep | None:
        """The transfer of single rows' ids that reaches the stores; ``None`` if there is none."""
        found = [stage.rows for stage in self.stages(batch_size) if stage.purpose == "ids"]
        return found[-1] if found else None

    @cached_property
    def num_rounds(self) -> int:
        """How often ids travel before a lookup."""
        return 1 + max((stage.round for stage in self.stages(1)), default=0)

    def whole_numel(self) -> int:
        """Numbers of a gradient of whole tables: their elements, and each row's count of uses."""
        return sum(table.num_rows * (table.dim + 1) for table in self.tables)

    def boxing(
        self, src: Layout, dst: Layout, shape: tuple[int, ...], what: str, dtype: torch.dtype
    ) -> tuple[BoxingStep, ...]:
        """The steps of a conversion whose sizes follow from the batch's."""
        id = f"{self.name}/{what}"
        return plan_boxing(src, dst, shape, dtype, id=id, backend=self.backend)

    def row_state_steps(self, index: int, num_squares: int) -> tuple[BoxingStep, ...]:
        """Squares of stack ``index``'s touched rows, added over the ranks that share them."""
        stack, most = self.stacks[index], num_squares
        if self.grid is None:
            placement = Placement.of(self.world.device_type, stack.holders())
            src, dst = Layout(placement, (Partial(),)), Layout(placement, (Broadcast(),))
        else:  # each row of ranks has rows of its own
            most *= self.grid.shape[0]
            src = Layout(self.grid, (Split(0), Partial()))
            dst = Layout(self.grid, (Split(0), Broadcast()))
        return self.boxing(src, dst, (most,), f"bwd/row_state.{index}", self.dtype)

    def most_squares(self, index: int, batch_size: int) -> int:
        """Rows of stack ``index`` that a batch of ``batch_size`` can touch, at most."""
        return batch_size * self.stacks[index].lookups()

    def squares_sent(self, index: int, num_touched: int, batch_size: int) -> int:
        """How many numbers stand for the squares of ``num_touched`` rows on their way.

        Where all ranks share all rows of a stack they touch the same ones, which say how many; in
        steps of a 32nd of the most, to keep the sizes few. Elsewhere ranks touch different rows or
        none, so the most goes.
        """
        most = self.most_squares(index, batch_size)
        if not self._all_touch_alike(index):
            return most
        unit = max(1, -(-most // 32))
        return min(most, max(1, -(-num_touched // unit)) * unit)

    def _all_touch_alike(self, index: int) -> bool:
        return self.grid is None and self.stacks[index].holders() == self.world.ranks

    def row_state_bounds(self, index: int, batch_size: int) -> tuple[Step, ...]:
        """``row_state_steps`` of a batch, as far as they are known before it."""
        steps = self.row_state_steps(index, self.most_squares(index, batch_size))
        if not self._all_touch_alike(index):
            return steps
        return tuple(
            ExchangeStep(
                id=step.id,
                collective=step.collective,
                groups=step.groups,
                dtype=step.dtype,
                bound_bytes=max(step.bytes_sent(rank) for rank in step.groups[0]),
                total_bound_bytes=step.total_bytes,
                what="squares of the touched rows",
            )
            for step in steps
            if step.groups
        )

    def address_dtype(self) -> torch.dtype:
        """What row addresses are computed and travel as: int32 while all ranks' rows fit."""
        total = sum(table.num_ids + 1 for table in self.tables)
        return torch.int32 if total < 2**31 else torch.int64

    def row_step(
        self, what: str, collective: str, dtype: torch.dtype, of_one: int, of_all: int, says: str
    ) -> ExchangeStep:
        """A transfer of rows among all ranks; at most so many numbers of one rank, and of all."""
        return ExchangeStep(
            id=f"{self.name}/{what}",
            collective=collective,
            groups=(self.world.ranks,),
            dtype=dtype,
            bound_bytes=of_one * dtype.itemsize,
            total_bound_bytes=of_all * dtype.itemsize,
            what=says,
        )

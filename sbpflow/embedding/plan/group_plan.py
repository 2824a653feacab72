"""Defines groups of tables, the interface of exchanges, and the resulting transfers.

A group consists of the tables of one output that share an exchange and its transfers. This module
contains only pure data and pure functions. An ``Exchange`` describes the transfers
(``boxed_exchanges``, ``row_exchanges``), and the class named by ``Exchange.runs`` executes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Literal

import torch

from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.costs.counts import Counts, Cut, Facts
from sbpflow.embedding.plan.table_batch import FeatureLookup, TableBatch
from sbpflow.embedding.plan.tables import OutputConfig, TableConfig
from sbpflow.errors import ConfigError, SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split

Cuts = Sequence[tuple[str, tuple[int, int]]]  # (sbp, (row parts, column parts))
Purpose = Literal[
    "counts",
    "ids",
    "vectors",
    "flags",
    "early vectors",
    "gradients",
    "late flags",
    "late gradients",
]


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """A transfer within disjoint ``groups`` of ranks, whose size depends on the batch.

    One rank sends up to ``per_rank`` elements, and all ranks together send up to ``total``. The
    total can be less than the sum over the ranks, because not all ranks can reach their maximum in
    the same batch.
    """

    groups: tuple[tuple[int, ...], ...]
    id: str
    collective: str
    dtype: torch.dtype
    per_rank: int
    total: int
    what: str

    @property
    def bound_bytes(self) -> int:
        """Return the maximum that one rank sends."""
        return self.per_rank * self.dtype.itemsize

    @property
    def total_bound_bytes(self) -> int:
        """Return the maximum that all ranks together send."""
        return self.total * self.dtype.itemsize

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that exchange data with ``rank``, including ``rank`` itself."""
        return next(ranks for ranks in self.groups if rank in ranks)


Step = BoxingStep | ExchangeStep
MAX_BATCH_SIZES = 64  # steps are cached for at most this many batch sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One transfer of a group; every rank runs the ``steps`` of the transfer.

    Counts and ids are sent ahead of the lookup. In each round after the first, ranks forward the
    ids that they received in the previous round.
    """

    purpose: Purpose
    steps: tuple[Step, ...]
    round: int = 0

    @property
    def rows(self) -> ExchangeStep:
        """Return the only step of this stage, a transfer of rows."""
        (step,) = self.steps
        if not isinstance(step, ExchangeStep):
            raise TypeError(f"{step.id}: expected an ExchangeStep, got {type(step).__name__}")
        return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The properties of a table that determine its group and its stack.

    Tables of the same dim have equal ``columns`` only if every rank stores the same number of
    columns of both; ``None`` means whole rows. ``stored`` contains all other properties that the
    tables of a stack must share.
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
    """Describes how a group exchanges ids, vectors, and gradients. Exchanges are stateless.

    Several exchanges can share a configuration ``name``; the layout and the world size then select
    one of them. ``runs`` names the executing class as ``package.module:Class``. ``calls`` names,
    for each round of a group, the count in ``costs.counts.FEATURES`` that grows by one.
    """

    name: ClassVar[str]
    runs: ClassVar[str]
    calls: ClassVar[tuple[str, ...]]
    pools: ClassVar[bool] = False  # The vectors of a sample can be summed before they are sent.
    copies: ClassVar[bool] = False  # Every rank stores and updates the whole table.
    even: ClassVar[bool] = False  # All ranks do the same work, and ``home`` counts all of it.
    looks_up_all: ClassVar[bool] = False  # Owners look up the global batch and need all of its ids.
    adds_terms: ClassVar[bool] = False  # Owners compute partial sums, which are then added.
    shares_lookups: ClassVar[bool] = False  # An owner looks up only the ids of rows that it stores.
    is_default: ClassVar[bool] = False  # The default if several exchanges accept a layout.
    dense_allreduce: ClassVar[bool] = False  # Dense gradients of whole tables are all-reduced.
    sends_early: ClassVar[bool] = False  # Groups can have ``early_rows``.

    @abstractmethod
    def accepts(self, layout: Layout, world_size: int) -> bool:
        """Return True if a table can have this layout."""

    def refusal(self, table: TableConfig, layout: Layout, world: Placement) -> str:
        """For a ``layout`` that the exchange accepts, return why this table cannot have it, or ""
        if it can.
        """
        return ""

    def suits(self, table: TableConfig, lookups: int, world_size: int) -> bool:
        """Return True if, among the exchanges with the same name, this exchange is the best one for
        ``lookups`` ids.
        """
        return True

    def cuts(self, num_rows: int, dim: int, world_size: int, num_hosts: int) -> Cuts:
        """Return the layouts that the planner should try, as (sbp, (row parts, column parts)), or
        (sbp, (hosts, ranks per host)) if rows are split over ``num_hosts`` equal hosts.
        """
        return ()

    def group_key(self, member: Member) -> tuple[Hashable, ...]:
        """Return a grouping key: tables of an output with equal keys share a group."""
        return ()

    @abstractmethod
    def stages(self, group: "GroupPlan", batch_size: int) -> tuple[Stage, ...]:
        """Return all transfers of a group for a batch, in the order in which they start."""

    @abstractmethod
    def home(self, facts: Facts, cut: Cut) -> Counts:
        """Return the work of a table on each rank for that rank's own samples."""

    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts:
        """Return the work of a shard of ``rows`` x ``width`` on the rank that stores it."""
        return {}


ALONE = "alone"  # The exchange of every table in a world of one rank.
# All registered exchanges, in the order in which the planner tries them.
EXCHANGES: list[Exchange] = []


def register(*exchanges: Exchange) -> None:
    """Register exchanges; the module ``exchanges`` registers the built-in ones."""
    EXCHANGES.extend(exchange for exchange in exchanges if exchange not in EXCHANGES)


def exchanges_of(name: str, layout: Layout, world_size: int) -> list[Exchange]:
    """Return the exchanges of this name for the layout; raise ConfigError if none accepts it."""
    name = ALONE if world_size == 1 else name
    named = [exchange for exchange in EXCHANGES if exchange.name == name]
    if fitting := [exchange for exchange in named if exchange.accepts(layout, world_size)]:
        return fitting
    raise ConfigError(f"exchange {name!r} does not support {layout} on {world_size} ranks")


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The tables of one output that share their transfers.

    ``shared_state`` lists the stacks whose row state several ranks share; these ranks sum squared
    gradients. Groups with ``dense_allreduce`` all-reduce dense gradients. Vectors are sent as
    ``comm_dtype``, and gradients as ``grad_comm_dtype``. With ``early_rows``, rows that the
    previous batch does not use are sent one batch ahead. With ``late_gradients``, gradients of rows
    that the next batch does not use are sent during the next step.
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
    early_rows: bool = False
    late_gradients: bool = False

    @cached_property
    def kind(self) -> Exchange:
        """Return the exchange that runs for these layouts in this world."""
        fitting = exchanges_of(self.exchange, self.stacks[0].layouts[0], self.world.size)
        return next(each for each in fitting if each.dense_allreduce == self.dense_allreduce)

    def check_step(self, num_batches: int) -> None:
        """Raise SbpError if a step cannot accumulate gradients over ``num_batches`` batches."""
        if num_batches > 1 and self.late_gradients:
            raise SbpError(
                f"{self.name} sends late gradients, which need one batch per step, but the step "
                f"has {num_batches} batches; use train.late_gradients: false"
            )

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        return tuple(table for stack in self.stacks for table in stack.tables)

    @property
    def grad_comm_dtype(self) -> torch.dtype:
        """Return the dtype of sent gradients.

        If vectors are sent as fp16, gradients are sent as bf16: the mean gradients of large batches
        underflow in fp16.
        """
        return torch.bfloat16 if self.comm_dtype == torch.float16 else self.comm_dtype

    @property
    def uses(self) -> tuple[FeatureLookup, ...]:
        """Return the table lookups of a sample, in the group's order. Each lookup gives one
        vector.
        """
        return tuple(use for stack in self.stacks for use in stack.uses)

    @property
    def pooled(self) -> bool:
        """Return True if the vectors of a sample are summed before they are sent."""
        return self.output.sums and self.kind.pools

    @property
    def width(self) -> int:
        """Return the number of vector columns per sample, after the sum if vectors are pooled."""
        if self.pooled:
            return self.stacks[0].dim
        return sum(stack.dim * len(stack.uses) for stack in self.stacks)

    @property
    def owners(self) -> tuple[int, ...]:
        """Return the ranks that store rows of this group, ascending."""
        layouts = [layout for stack in self.stacks for layout in stack.layouts]
        ranks = {rank for layout in layouts for rank in layout.placement.ranks}
        return tuple(sorted(ranks))

    @property
    def grid(self) -> Placement | None:
        """Return the rows x columns grid of ranks that stores the tables, or ``None``."""
        placement = self.stacks[0].layouts[0].placement
        return placement if placement.ndim == 2 else None

    def copy_ranks(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks with copies of a stack, or of its row state, that must be
        bit-equal.
        """
        if self.kind.copies:
            return (self.world.ranks,)
        if index not in self.shared_state:
            return ()
        holders = self.stacks[index].holders()
        if self.grid is None:
            return (holders,)
        rows = [tuple(r for r in ranks if r in holders) for ranks in self.grid.axis_groups(1)]
        return tuple(ranks for ranks in rows if ranks)

    def takes_part(self, index: int, rank: int) -> bool:
        """Return True if ``rank`` takes part in lookups of a stack. A rank may take part without
        storing rows.
        """
        holds = bool(self.stacks[index].shards(rank))
        return rank in self.owners if self.kind.adds_terms else holds

    def rank_width(self, rank: int) -> int:
        """Return the number of columns that ``rank`` computes per sample."""
        if self.pooled:
            return self.stacks[0].width(rank)
        return sum(stack.width(rank) * len(stack.uses_on(rank)) for stack in self.stacks)

    def column_order(self) -> tuple[int, ...]:
        """Return, for each vector column in rank order, its index in the group's order.

        Ranks with the same columns are counted only once, so on a grid, only the first row of ranks
        is counted. The result is the identity if vectors are pooled, or if partial sums of whole
        vectors are added.
        """
        if self.pooled or (self.kind.adds_terms and self.grid is None):
            return tuple(range(self.width))
        ranks = self.world.ranks if self.grid is None else self.grid.ranks[: self.grid.shape[1]]
        layouts = {
            table.name: layout
            for stack in self.stacks
            for table, layout in zip(stack.tables, stack.layouts, strict=True)
        }
        starts = [0, *accumulate(use.table.dim for use in self.uses)]
        order: list[int] = []
        for rank in ranks:
            for start, use in zip(starts, self.uses, strict=False):
                part = layouts[use.table.name].part_slices(use.table.shape, rank)
                if part is not None:
                    order += range(start + part[1].start, start + part[1].stop)
        return tuple(order)

    def stages(self, batch_size: int) -> tuple[Stage, ...]:
        """Return all transfers for a global batch of ``batch_size``, in the order in which they
        start.
        """
        if batch_size not in self._stages:
            if len(self._stages) == MAX_BATCH_SIZES:
                self._stages.clear()
            self._stages[batch_size] = self.kind.stages(self, batch_size)
        return self._stages[batch_size]

    @cached_property
    def _stages(self) -> dict[int, tuple[Stage, ...]]:
        return {}

    def conversion(self, batch_size: int, purpose: Purpose) -> tuple[BoxingStep, ...]:
        """Return the steps for ``purpose``, whose sizes follow from the batch size."""
        stages = [stage for stage in self.stages(batch_size) if stage.purpose == purpose]
        return tuple(s for stage in stages for s in stage.steps if isinstance(s, BoxingStep))

    @cached_property
    def num_rounds(self) -> int:
        """Return the number of rounds of ids before a lookup."""
        return 1 + max((stage.round for stage in self.stages(1)), default=0)

    def boxing(
        self, src: Layout, dst: Layout, shape: tuple[int, ...], name: str, dtype: torch.dtype
    ) -> tuple[BoxingStep, ...]:
        """Return the steps of a conversion whose size follows from the batch size."""
        id = f"{self.name}/{name}"
        return plan_boxing(src, dst, shape, dtype, id=id, backend=self.backend)

    def row_state_steps(self, index: int, num_squares: int) -> tuple[BoxingStep, ...]:
        """Return the steps that sum the squared gradients of stack ``index`` over the ranks that
        share its rows.
        """
        stack, most = self.stacks[index], num_squares
        if self.grid is None:
            placement = Placement.of(self.world.device_type, stack.holders())
            src, dst = Layout(placement, (Partial(),)), Layout(placement, (Broadcast(),))
        else:  # only ranks in the same row of the grid share table rows
            most *= self.grid.shape[0]
            src = Layout(self.grid, (Split(0), Partial()))
            dst = Layout(self.grid, (Split(0), Broadcast()))
        return self.boxing(src, dst, (most,), f"bwd/row_state.{index}", self.dtype)

    def most_squares(self, index: int, batch_size: int) -> int:
        """Return an upper bound on the rows of stack ``index`` that a batch touches on a rank."""
        return batch_size * self.stacks[index].lookups()

    def squares_sent(self, index: int, num_touched: int, batch_size: int) -> int:
        """Return the number of elements to send for the squared gradients of ``num_touched`` rows.

        If all ranks share all rows of a stack, they agree on ``num_touched``. The number is then
        rounded up to a multiple of 1/32 of the maximum, which limits the number of distinct sizes.
        If only some ranks share rows, these ranks send the maximum.
        """
        most = self.most_squares(index, batch_size)
        if not self._all_touch_alike(index):
            return most
        unit = max(1, -(-most // 32))
        return min(most, max(1, -(-num_touched // unit)) * unit)

    def _all_touch_alike(self, index: int) -> bool:
        return self.grid is None and self.stacks[index].holders() == self.world.ranks

    def row_state_bounds(self, index: int, batch_size: int) -> tuple[Step, ...]:
        """Return ``row_state_steps`` with upper bounds for sizes that depend on the batch."""
        steps = self.row_state_steps(index, self.most_squares(index, batch_size))
        if not self._all_touch_alike(index):
            return steps
        return tuple(
            ExchangeStep(
                step.groups,
                step.id,
                step.collective,
                step.dtype,
                max(step.bytes_sent(rank) for rank in step.groups[0]) // step.dtype.itemsize,
                step.total_bytes // step.dtype.itemsize,
                "squared gradients of the touched rows",
            )
            for step in steps
            if step.groups
        )

    def address_dtype(self) -> torch.dtype:
        """Return int32 if the addresses of all rows fit, else int64."""
        total = sum(table.num_rows + 1 for table in self.tables)
        return torch.int32 if total < 2**31 else torch.int64

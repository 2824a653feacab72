"""What a group of tables is and which transfers it makes. Pure data and pure functions.

A group is the tables of one output that share an exchange; it makes one exchange each way per
batch whatever its number of tables.
"""

from dataclasses import dataclass

import torch

from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.embedding.plan.exchanges import Exchange
from sbpflow.embedding.plan.stack import Stack, Use
from sbpflow.embedding.plan.tables import OutputConfig, TableConfig
from sbpflow.errors import unknown_value
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStep:
    """A transfer whose size the batch decides.

    ``bound_bytes`` is what one rank sends at most, ``total_bound_bytes`` what all ranks together
    do: not every rank can be the one that owns all rows.
    """

    id: str
    collective: str
    group: tuple[int, ...]
    dtype: torch.dtype
    bound_bytes: int
    total_bound_bytes: int
    what: str


Step = BoxingStep | ExchangeStep


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSteps:
    """The transfers of single rows; ``vectors`` only where rows are read at their owners.

    How many rows each rank names to each other one, which, their values, their gradients.
    """

    counts: ExchangeStep
    ids: ExchangeStep
    vectors: ExchangeStep | None
    gradients: ExchangeStep

    @property
    def ahead(self) -> tuple[ExchangeStep, ...]:
        """Those that depend on ids alone."""
        return (self.counts, self.ids)


MAX_BATCH_SIZES = 64  # whose steps are kept; others are planned again


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The tables of one output that travel together.

    ``pooled`` says that the vectors of a sample are summed before they travel (possible where the
    exchange is linear in whole vectors: local and reduce). ``shared_state`` are the stacks whose
    optimizer state is one number per row while ranks share the row: their squares are added up.
    ``whole_gradients`` lets a local group all-reduce the gradients of whole tables, where that is
    less than the touched rows'. Vectors travel as ``comm_dtype``, gradients as ``grad_comm_dtype``.
    """

    name: str
    output: OutputConfig
    exchange: Exchange
    stacks: tuple[Stack, ...]
    shared_state: tuple[int, ...]
    world: Placement
    dtype: torch.dtype
    comm_dtype: torch.dtype
    backend: str
    whole_gradients: bool = False

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        return tuple(table for stack in self.stacks for table in stack.tables)

    @property
    def grad_comm_dtype(self) -> torch.dtype:
        """bf16 in place of fp16: gradients of a mean over a large batch are below fp16's range."""
        return torch.bfloat16 if self.comm_dtype == torch.float16 else self.comm_dtype

    @property
    def uses(self) -> tuple[Use, ...]:
        """The vectors of a sample, in the group's order."""
        return tuple(use for stack in self.stacks for use in stack.uses)

    @property
    def pooled(self) -> bool:
        return self.output.sums and self.exchange in ("local", "reduce")

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
    def unique_columns(self) -> bool:
        """Whether unique rows travel and every rank holds columns of each."""
        return self.exchange == "unique" and self.stacks[0].is_column_split

    @property
    def grid(self) -> Placement | None:
        """The rows x columns grid of ranks that a reduce group's tables lie on, if they do."""
        placement = self.stacks[0].layouts[0].placement
        return placement if self.exchange == "reduce" and placement.ndim == 2 else None

    def copy_ranks(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that must hold equal bits of a stack: whole tables, or row state."""
        if self.exchange == "local":
            return (self.world.ranks,)
        if index not in self.shared_state:
            return ()
        holders = self.stacks[index].holders()
        if self.grid is None:
            return (holders,)
        rows = [tuple(r for r in ranks if r in holders) for ranks in self.grid.axis_groups(1)]
        return tuple(ranks for ranks in rows if ranks)

    def looks_up_everything(self, rank: int) -> tuple[Use, ...]:
        """The uses that ``rank`` looks up for the whole batch, whose ids it therefore needs."""
        if self.exchange in ("local", "unique"):
            return ()
        if self.exchange in ("columns", "reduce"):
            return tuple(use for stack in self.stacks for use in stack.uses_on(rank))
        raise unknown_value("exchange", self.exchange, Exchange)

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
        if self.pooled or (self.exchange == "reduce" and self.grid is None):
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

    def vector_layouts(self) -> tuple[Layout, Layout] | None:
        """(layout of the looked-up vectors, layout at home) where boxing moves them, else None."""
        home = Layout(self.world, (Split(0),))
        if self.exchange == "columns":
            sizes = tuple(self.rank_width(rank) for rank in self.world.ranks)
            return Layout(self.world, (Split(1, sizes),)), home
        if self.exchange in ("local", "unique"):
            return None
        if self.exchange == "reduce":
            return self._layout_of_terms(), home
        raise unknown_value("exchange", self.exchange, Exchange)

    def _layout_of_terms(self) -> Layout:
        if self.grid is None:
            return Layout(Placement.of(self.world.device_type, self.owners), (Partial(),))
        first_row = self.grid.ranks[: self.grid.shape[1]]
        sizes = tuple(self.rank_width(rank) for rank in first_row)
        return Layout(self.grid, (Partial(), Split(1, sizes)))

    def forward_steps(self, batch_size: int) -> tuple[BoxingStep, ...]:
        """Vectors to the samples' home ranks, for a global batch of ``batch_size``."""
        layouts = self.vector_layouts()
        if layouts is None:
            return ()
        return self._plan(*layouts, (batch_size, self.width), "fwd/vectors", self.comm_dtype)

    def backward_steps(self, batch_size: int) -> tuple[BoxingStep, ...]:
        """Gradients to the ranks that update: the adjoint of ``forward_steps``."""
        if self.exchange == "local" and self.whole_gradients:
            terms = Layout(self.world, (Partial(),))
            whole = Layout(self.world, (Broadcast(),))
            shape = (self.whole_numel(),)
            return self._plan(terms, whole, shape, "bwd/gradients", self.grad_comm_dtype)
        layouts = self.vector_layouts()
        if layouts is None:
            return ()
        src, dst = layouts
        shape = (batch_size, self.width)
        return self._plan(dst.dual(), src.dual(), shape, "bwd/vectors", self.grad_comm_dtype)

    def whole_numel(self) -> int:
        """Numbers of a gradient of whole tables: their elements, and each row's count of uses."""
        return sum(
            table.num_rows * (table.dim + 1) for stack in self.stacks for table in stack.tables
        )

    def _plan(
        self, src: Layout, dst: Layout, shape: tuple[int, ...], what: str, dtype: torch.dtype
    ) -> tuple[BoxingStep, ...]:
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
        return plan_boxing(
            src,
            dst,
            (most,),
            self.dtype,
            id=f"{self.name}/bwd/row_state.{index}",
            backend=self.backend,
        )

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
                group=step.groups[0],
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

    def row_steps(self, batch_size: int) -> RowSteps | None:
        """The transfers of single rows with their bounds, ``None`` where none travel.

        Unique: to and from the owners, which are all ranks where columns are split. Local: each to
        all other ranks.
        """
        size, dim = self.world.size, self.stacks[0].dim
        if size == 1 or self.exchange not in ("unique", "local") or self.whole_gradients:
            return None
        lookups = sum(stack.lookups() for stack in self.stacks)
        mine = -(-batch_size // size) * lookups  # of one rank, at most
        rows = batch_size * lookups  # of all ranks together: each lookup moves one row, at most
        others = (batch_size - batch_size // size) * lookups  # of all ranks but one
        to_all = self.exchange == "local" or self.unique_columns
        fans = size - 1 if to_all else 1  # each rank's ids go to all others
        told = "all_gather" if to_all else "all_to_all"
        pushed = "all_gather" if self.exchange == "local" else "all_to_all"
        # Columns that leave the owner of a row, and that leave the rank that wants it.
        from_owner, from_home = dim, dim * (size - 1 if self.exchange == "local" else 1)
        if self.unique_columns:
            widths = [self.stacks[0].width(rank) for rank in self.world.ranks]
            from_owner, from_home = max(widths), dim - min(widths)
        ids = self.address_dtype()
        counts = self._row_step(
            "fwd/counts",
            "all_to_all",
            torch.int64,
            8 * (size - 1),
            8 * size * (size - 1),
            "row counts",
        )
        asked = self._row_step(
            "fwd/ids",
            told,
            ids,
            mine * fans * ids.itemsize,
            rows * fans * ids.itemsize,
            "each rank's unique rows",
        )
        vectors = self._row_step(
            "fwd/vectors",
            "all_to_all",
            self.comm_dtype,
            others * from_owner * self.comm_dtype.itemsize,  # of an owner of all rows
            rows * (from_home if self.unique_columns else dim) * self.comm_dtype.itemsize,
            "the rows others asked for",
        )
        gradients = self._row_step(
            "bwd/vectors",
            pushed,
            self.grad_comm_dtype,
            mine * from_home * self.grad_comm_dtype.itemsize,
            rows * from_home * self.grad_comm_dtype.itemsize,
            "unique rows' gradients",
        )
        return RowSteps(
            counts=counts,
            ids=asked,
            vectors=vectors if self.exchange == "unique" else None,
            gradients=gradients,
        )

    def _row_step(
        self,
        suffix: str,
        collective: str,
        dtype: torch.dtype,
        of_one: int,
        of_all: int,
        what: str,
    ) -> ExchangeStep:
        return ExchangeStep(
            id=f"{self.name}/{suffix}",
            collective=collective,
            group=self.world.ranks,
            dtype=dtype,
            bound_bytes=of_one,
            total_bound_bytes=of_all,
            what=what,
        )


def whole_gradients_are_less(table: TableConfig, lookups: int, world_size: int) -> bool:
    """Whether all-reducing a B table's whole gradient sends less than its touched rows would.

    An all-reduce moves 2 (P - 1) R rows. Each rank's touched rows, at most min(R, lookups / P),
    go to P - 1 others: P (P - 1) min(R, lookups / P).
    """
    touched = min(world_size * table.num_rows, lookups)
    return 2 * table.num_rows <= touched

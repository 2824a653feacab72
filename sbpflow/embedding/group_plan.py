"""The values a group of tables is made of: pieces, stacks, steps. Pure data and pure functions.

A group is the tables of one output that share an exchange; it makes one exchange each way per
batch whatever its number of tables. A stack is the tables of a group that share one storage.
"""

from dataclasses import dataclass

import torch

from sbpflow.boxing_plan import BoxingStep, plan_boxing
from sbpflow.embedding.tables import Exchange, OutputConfig, TableConfig
from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import Broadcast, Partial, Split

IDS_DTYPE = torch.int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One shard in a rank's storage: table[row_start:row_stop, col_start:col_stop] at ``base``."""

    table: TableConfig
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    base: int

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def width(self) -> int:
        return self.col_stop - self.col_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Tables of equal dim that every rank stores as one block of rows.

    ``features`` are the tables' columns in the ids of the whole batch.
    """

    tables: tuple[TableConfig, ...]
    layouts: tuple[Layout, ...]
    features: tuple[int, ...]

    @property
    def dim(self) -> int:
        return self.tables[0].dim

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """This rank's shards in storage order; tables it holds nothing of are left out."""
        pieces: list[Piece] = []
        base = 0
        for table, layout in zip(self.tables, self.layouts, strict=True):
            slices = layout.part_slices(table.shape, rank)
            if slices is None:
                continue
            rows, cols = slices
            piece = Piece(
                table=table,
                row_start=rows.start,
                row_stop=rows.stop,
                col_start=cols.start,
                col_stop=cols.stop,
                base=base,
            )
            if piece.num_rows and piece.width:
                pieces.append(piece)
                base += piece.num_rows
        return tuple(pieces)

    def num_rows(self, rank: int) -> int:
        return sum(piece.num_rows for piece in self.pieces(rank))

    def width(self, rank: int) -> int:
        """Columns of the storage, which may have no rows; 0 on a rank outside the layouts."""
        for table, layout in zip(self.tables, self.layouts, strict=True):
            slices = layout.part_slices(table.shape, rank)
            if slices is not None:
                return slices[1].stop - slices[1].start
        return 0

    def holders(self) -> tuple[int, ...]:
        """Ranks that store some of it, ascending."""
        ranks = {rank for layout in self.layouts for rank in layout.placement.ranks}
        return tuple(sorted(rank for rank in ranks if self.pieces(rank)))

    def is_column_split(self) -> bool:
        """Whether a logical row is spread over several ranks."""
        return any(0 < self.width(rank) < self.dim for rank in self.holders())


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
class GroupPlan:
    """The tables of one output that travel together.

    ``pooled`` says that the vectors of a sample are summed before they travel (possible where the
    exchange is linear in whole vectors: local and reduce). ``shared_state`` are the stacks whose
    optimizer state is one number per row while ranks share the row: their squares are added up.
    """

    name: str
    output: OutputConfig
    exchange: Exchange
    stacks: tuple[Stack, ...]
    shared_state: tuple[int, ...]
    world: Placement
    dtype: torch.dtype
    backend: str

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        return tuple(table for stack in self.stacks for table in stack.tables)

    @property
    def pooled(self) -> bool:
        return self.output.combine == "sum" and self.exchange in ("local", "reduce")

    @property
    def width(self) -> int:
        """Columns of this group's part of the output at home, before a sum over tables."""
        return self.stacks[0].dim if self.pooled else sum(table.dim for table in self.tables)

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that store rows of this group, ascending."""
        layouts = [layout for stack in self.stacks for layout in stack.layouts]
        ranks = {rank for layout in layouts for rank in layout.placement.ranks}
        return tuple(sorted(ranks))

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
        return (self.stacks[index].holders(),) if self.grid is None else self.grid.axis_groups(1)

    def rank_width(self, rank: int) -> int:
        """Columns that ``rank`` computes for every sample."""
        if self.pooled:
            return self.stacks[0].width(rank)
        return sum(stack.width(rank) * len(stack.tables) for stack in self.stacks)

    def column_order(self) -> tuple[int, ...]:
        """For each column of the vectors as the ranks hold them, its column in table order.

        Ranks that hold different columns follow one another: all of them, or the first row of a
        grid. In order already if the columns are not split, or are summed over the tables.
        """
        if self.pooled or (self.exchange == "reduce" and self.grid is None):
            return tuple(range(self.width))
        ranks = self.world.ranks if self.grid is None else self.grid.ranks[: self.grid.shape[1]]
        starts: dict[str, int] = {}
        for table in self.tables:
            starts[table.name] = sum(t.dim for t in self.tables[: len(starts)])
        order: list[int] = []
        for rank in ranks:
            for stack in self.stacks:
                for table, layout in zip(stack.tables, stack.layouts, strict=True):
                    slices = layout.part_slices(table.shape, rank)
                    if slices is not None:
                        start = starts[table.name]
                        order += range(start + slices[1].start, start + slices[1].stop)
        return tuple(order)

    def vector_layouts(self) -> tuple[Layout, Layout] | None:
        """(layout of the looked-up vectors, layout at home) where boxing moves them, else None."""
        home = Layout(self.world, (Split(0),))
        if self.exchange == "columns":
            sizes = tuple(self.rank_width(rank) for rank in self.world.ranks)
            return Layout(self.world, (Split(1, sizes),)), home
        if self.exchange != "reduce":
            return None
        if self.grid is None:
            return Layout(Placement.of(self.world.device_type, self.owners), (Partial(),)), home
        first_row = self.grid.ranks[: self.grid.shape[1]]
        sizes = tuple(self.rank_width(rank) for rank in first_row)
        return Layout(self.grid, (Partial(), Split(1, sizes))), home

    def forward_steps(self, num_rows: int) -> tuple[BoxingStep, ...]:
        """Vectors to the samples' home ranks, for a global batch of ``num_rows``."""
        layouts = self.vector_layouts()
        if layouts is None:
            return ()
        return plan_boxing(
            *layouts,
            (num_rows, self.width),
            self.dtype,
            id=f"{self.name}/fwd/vectors",
            backend=self.backend,
        )

    def backward_steps(self, num_rows: int) -> tuple[BoxingStep, ...]:
        """Gradients to the ranks that update: the adjoint of ``forward_steps``."""
        if self.exchange == "local":
            return self._touched(num_rows, self.width, self.dtype, "gradients")
        layouts = self.vector_layouts()
        if layouts is None:
            return ()
        src, dst = layouts
        return plan_boxing(
            dst.dual(),
            src.dual(),
            (num_rows, self.width),
            self.dtype,
            id=f"{self.name}/bwd/vectors",
            backend=self.backend,
        )

    def touched_id_steps(self, num_rows: int) -> tuple[BoxingStep, ...]:
        """Local exchange: every rank learns which rows the others touched, to update alike."""
        return self._touched(num_rows, len(self.tables), IDS_DTYPE, "ids")

    def _touched(
        self, num_rows: int, width: int, dtype: torch.dtype, what: str
    ) -> tuple[BoxingStep, ...]:
        if self.world.size == 1:
            return ()
        return plan_boxing(
            Layout(self.world, (Split(0),)),
            Layout(self.world, (Broadcast(),)),
            (num_rows, width),
            dtype,
            id=f"{self.name}/bwd/{what}",
            backend=self.backend,
        )

    def address_dtype(self) -> torch.dtype:
        """What row addresses travel as in the unique exchange: int32 while they fit."""
        most = max(stack.num_rows(rank) for stack in self.stacks for rank in self.owners)
        return torch.int32 if most < 2**31 else torch.int64

    def row_state_steps(self, index: int, num_rows: int) -> tuple[BoxingStep, ...]:
        """Squares of stack ``index``'s touched rows, added over the ranks that share them.

        Sized for the most rows a batch can touch, so that every rank knows the step beforehand.
        """
        stack = self.stacks[index]
        most = num_rows * len(stack.tables)
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

    def unique_steps(self, num_rows: int) -> tuple[ExchangeStep, ...]:
        """The four transfers of the unique exchange with their bounds: three forward, one back."""
        if self.exchange != "unique" or self.world.size == 1:
            return ()
        size, tables, dim = self.world.size, len(self.tables), self.stacks[0].dim
        lookups = -(-num_rows // size) * tables  # of one rank, at most
        answers = (num_rows - num_rows // size) * tables  # of an owner of all rows, to the others
        rows = num_rows * tables  # of all ranks together: each lookup moves one row, at most
        ids = self.address_dtype()
        return tuple(
            ExchangeStep(
                id=f"{self.name}/{suffix}",
                collective="all_to_all",
                group=self.world.ranks,
                dtype=dtype,
                bound_bytes=of_one * dtype.itemsize,
                total_bound_bytes=of_all * dtype.itemsize,
                what=what,
            )
            for suffix, dtype, of_one, of_all, what in (
                (
                    "fwd/counts",
                    torch.int64,
                    size - 1,
                    size * (size - 1),
                    "rows asked of each",
                ),
                ("fwd/ids", ids, lookups, rows, "addresses of each rank's unique rows"),
                ("fwd/vectors", self.dtype, answers * dim, rows * dim, "the rows others asked for"),
                ("bwd/vectors", self.dtype, lookups * dim, rows * dim, "unique rows' gradients"),
            )
        )

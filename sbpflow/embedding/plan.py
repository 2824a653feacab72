"""From table layouts to the groups, storages and communication steps of an embedding collection.

Pure data and pure functions: ``explain`` prints what is built here without any rank running, and
``EmbeddingCollection`` executes the same objects. Nothing here allocates or communicates.

A group is the tables of one output that share an exchange; it makes one exchange each way per
batch whatever its number of tables. A stack is the tables of a group that share one storage.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from sbpflow.boxing_plan import BoxingStep, plan_boxing
from sbpflow.embedding.optimizers import SparseOptimizer
from sbpflow.embedding.tables import (
    Exchange,
    OutputConfig,
    TableConfig,
    TableLayout,
    check_cover,
    shards_of,
)
from sbpflow.errors import ConfigError
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
        """Columns of the storage; 0 on a rank that holds nothing."""
        pieces = self.pieces(rank)
        return pieces[0].width if pieces else 0

    def holders(self) -> tuple[int, ...]:
        """Ranks that store some of it, ascending."""
        ranks = {rank for layout in self.layouts for rank in layout.placement.ranks}
        return tuple(sorted(rank for rank in ranks if self.pieces(rank)))

    def is_column_split(self) -> bool:
        """Whether a logical row is spread over several ranks."""
        return any(0 < self.width(rank) < self.dim for rank in self.holders())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStep:
    """A transfer whose size the batch decides; ``bound_bytes`` is what one rank sends at most."""

    id: str
    collective: str
    group: tuple[int, ...]
    dtype: torch.dtype
    bound_bytes: int
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

    def rank_width(self, rank: int) -> int:
        """Columns rank ``rank`` computes for every sample (columns exchange)."""
        return sum(piece.width for stack in self.stacks for piece in stack.pieces(rank))

    def vector_layouts(self) -> tuple[Layout, Layout] | None:
        """(layout of the looked-up vectors, layout at home) where boxing moves them, else None."""
        home = Layout(self.world, (Split(0),))
        if self.exchange == "columns":
            sizes = tuple(self.rank_width(rank) for rank in self.world.ranks)
            return Layout(self.world, (Split(1, sizes),)), home
        if self.exchange == "reduce":
            return Layout(Placement.of(self.world.device_type, self.owners), (Partial(),)), home
        return None

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
        holders = list(stack.holders())
        placement = Placement.of(self.world.device_type, holders)
        return plan_boxing(
            Layout(placement, (Partial(),)),
            Layout(placement, (Broadcast(),)),
            (num_rows * len(stack.tables),),
            self.dtype,
            id=f"{self.name}/bwd/row_state.{index}",
            backend=self.backend,
        )

    def unique_steps(self, num_rows: int) -> tuple[ExchangeStep, ...]:
        """The four transfers of the unique exchange with their bounds: three forward, one back."""
        if self.exchange != "unique" or self.world.size == 1:
            return ()
        lookups = -(-num_rows // self.world.size) * len(self.tables)  # of one rank, at most
        answers = num_rows * len(self.tables) - num_rows // self.world.size * len(self.tables)
        dim = self.stacks[0].dim
        counts = torch.int64
        ids = self.address_dtype()
        return tuple(
            ExchangeStep(
                id=f"{self.name}/{suffix}",
                collective="all_to_all",
                group=self.world.ranks,
                dtype=dtype,
                bound_bytes=elements * dtype.itemsize,
                what=what,
            )
            for suffix, dtype, elements, what in (
                ("fwd/counts", counts, self.world.size - 1, "how many rows each owner is asked"),
                ("fwd/ids", ids, lookups, "addresses of this rank's unique rows"),
                ("fwd/vectors", self.dtype, answers * dim, "the rows others asked for"),
                ("bwd/vectors", self.dtype, lookups * dim, "gradients of this rank's unique rows"),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """All groups of a collection, and the ids that travel before any lookup.

    ``features`` names the columns of the batch's ids. ``global_features`` are the columns that
    every rank of ``id_ranks`` needs for the whole batch; both empty if no group needs any.
    """

    outputs: tuple[OutputConfig, ...]
    groups: tuple[GroupPlan, ...]
    features: tuple[str, ...]
    global_features: tuple[int, ...]
    id_ranks: tuple[int, ...]
    optimizer: SparseOptimizer
    dtype: torch.dtype
    world: Placement
    backend: str

    def id_steps(self, num_rows: int) -> tuple[BoxingStep, ...]:
        """S(0) -> B of the ids that owners look up for the whole batch."""
        if not self.global_features:
            return ()
        return plan_boxing(
            Layout(self.world, (Split(0),)),
            Layout(Placement.of(self.world.device_type, self.id_ranks), (Broadcast(),)),
            (num_rows, len(self.global_features)),
            IDS_DTYPE,
            id="ids/fwd",
            backend=self.backend,
        )

    def forward_steps(self, num_rows: int) -> tuple[Step, ...]:
        """Every step of a lookup of ``num_rows`` samples, in the order it runs."""
        steps: list[Step] = list(self.id_steps(num_rows))
        for group in self.groups:
            steps += group.unique_steps(num_rows)[:3]
            steps += group.forward_steps(num_rows)
        return tuple(steps)

    def backward_steps(self, num_rows: int) -> tuple[Step, ...]:
        """Every step of the update that follows, in the order it runs."""
        steps: list[Step] = []
        for group in self.groups:
            if group.exchange == "local" and self.world.size > 1:
                steps += group.touched_id_steps(num_rows)
            steps += group.unique_steps(num_rows)[3:]
            steps += group.backward_steps(num_rows)
            for index in group.shared_state:
                steps += group.row_state_steps(index, num_rows)
        return tuple(steps)


def plan_embeddings(
    outputs: Iterable[OutputConfig],
    layouts: Mapping[str, TableLayout],
    *,
    features: tuple[str, ...],
    optimizer: SparseOptimizer,
    dtype: torch.dtype,
    world: Placement,
    backend: str,
) -> EmbeddingPlan:
    """Group the tables and derive everything that follows from their layouts.

    ``layouts`` has an entry per table name; ``features`` are the columns of the ids of a batch.
    Raises ConfigError if a table's feature is absent or its shards do not tile it.
    """
    outputs = tuple(outputs)
    groups: list[GroupPlan] = []
    for output in outputs:
        groups += _groups_of(output, layouts, features, optimizer, dtype, world, backend)
    needing = [group for group in groups if group.exchange in ("columns", "reduce")]
    global_features = {f for group in needing for stack in group.stacks for f in stack.features}
    return EmbeddingPlan(
        outputs=outputs,
        groups=tuple(groups),
        features=features,
        global_features=tuple(sorted(global_features)),
        id_ranks=tuple(sorted({rank for group in needing for rank in group.owners})),
        optimizer=optimizer,
        dtype=dtype,
        world=world,
        backend=backend,
    )


def _groups_of(
    output: OutputConfig,
    layouts: Mapping[str, TableLayout],
    features: tuple[str, ...],
    optimizer: SparseOptimizer,
    dtype: torch.dtype,
    world: Placement,
    backend: str,
) -> list[GroupPlan]:
    members: dict[tuple[object, ...], list[TableConfig]] = {}
    for table in output.tables:
        layout = layouts[table.name]
        check_cover(table, layout.layout, shards_of(table, layout.layout))
        members.setdefault(_group_key(table, layout, world), []).append(table)
    groups: list[GroupPlan] = []
    for (exchange, *_), tables in members.items():
        same = sum(1 for key in members if key[0] == exchange)
        number = f".{sum(1 for g in groups if g.exchange == exchange)}" if same > 1 else ""
        stacks = _stacks_of(tables, layouts, features, str(exchange))
        rowwise = optimizer.name == "rowwise_adagrad"
        groups.append(
            GroupPlan(
                name=f"{output.name}/{exchange}{number}",
                output=output,
                exchange=cast(Exchange, exchange),
                stacks=stacks,
                shared_state=tuple(
                    i for i, stack in enumerate(stacks) if rowwise and stack.is_column_split()
                ),
                world=world,
                dtype=dtype,
                backend=backend,
            )
        )
    return groups


def _group_key(table: TableConfig, layout: TableLayout, world: Placement) -> tuple[object, ...]:
    if world.size == 1:
        return ("local",)
    if layout.exchange == "reduce":
        return ("reduce", layout.layout.placement.ranks)
    if layout.exchange == "unique":
        return ("unique", table.dim)
    return (layout.exchange,)


def _stacks_of(
    tables: list[TableConfig],
    layouts: Mapping[str, TableLayout],
    features: tuple[str, ...],
    exchange: str,
) -> tuple[Stack, ...]:
    # The unique exchange addresses rows, so tables of any row ranges share a storage; elsewhere
    # a storage holds tables of one layout, whose ids and columns are handled alike.
    stacks: dict[tuple[object, ...], list[TableConfig]] = {}
    for table in tables:
        layout = layouts[table.name].layout
        key = (table.dim,) if exchange == "unique" else (table.dim, layout)
        stacks.setdefault(key, []).append(table)
    return tuple(
        Stack(
            tables=tuple(members),
            layouts=tuple(layouts[table.name].layout for table in members),
            features=tuple(_feature_index(table, features) for table in members),
        )
        for members in stacks.values()
    )


def _feature_index(table: TableConfig, features: tuple[str, ...]) -> int:
    if table.feature not in features:
        raise ConfigError(
            f"table {table.name}: feature {table.feature!r} is not in the data, which has "
            f"{', '.join(features)}"
        )
    return features.index(table.feature)

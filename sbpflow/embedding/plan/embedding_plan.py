"""From table layouts to the groups, storages and communication steps of an embedding collection.

Pure data and pure functions: ``explain`` prints what is built here without any rank running, and
``EmbeddingCollection`` executes the same objects. Nothing here allocates or communicates.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.embedding.plan.exchanges import check_exchange
from sbpflow.embedding.plan.group_plan import ExchangeStep, GroupPlan, Purpose, Step
from sbpflow.embedding.plan.grouping import IdColumns, make_groups
from sbpflow.embedding.plan.tables import (
    HALF_DTYPES,
    FeatureConfig,
    OutputConfig,
    TableConfig,
    TableLayout,
    check_by_key,
    check_cover,
    shards_of,
)
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split

OutOfRange = Literal["error", "clamp", "hash"]
IDS: tuple[Purpose, ...] = ("counts", "ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """All groups of a collection, and the ids that travel before any lookup.

    A batch's ids are a matrix, whose columns ``ids`` assigns to features, and lists. ``needed`` and
    ``needed_lists`` have, per rank, the columns and the lists that it looks up for the whole batch.
    Rows are stored as ``row_dtype`` and computed with as ``dtype``. ``out_of_range`` says what
    becomes of an id that a table of its feature has no row for: an error names it, ``clamp`` and
    ``hash`` replace it.
    """

    outputs: tuple[OutputConfig, ...]
    groups: tuple[GroupPlan, ...]
    features: tuple[FeatureConfig, ...]
    ids: IdColumns
    ids_dtype: torch.dtype
    needed: tuple[tuple[int, ...], ...]
    needed_lists: tuple[tuple[int, ...], ...]
    optimizer: SparseOptimizer
    dtype: torch.dtype
    row_dtype: torch.dtype
    world: Placement
    backend: str
    out_of_range: OutOfRange = "error"

    @property
    def sent_columns(self) -> tuple[int, ...]:
        """Columns of the batch's ids as they are sent: all ranks' needs, once if they are equal."""
        return _sent(self.needed)

    @property
    def sent_lists(self) -> tuple[int, ...]:
        """Lists whose lengths are sent, as ``sent_columns``."""
        return _sent(self.needed_lists)

    @property
    def weighted(self) -> bool:
        """Whether ids in lists travel with a weight each."""
        return any(self.features[feature].weighted for feature in self.ids.lists)

    def id_steps(self, batch_size: int) -> tuple[BoxingStep, ...]:
        """Ids in the matrix to the ranks that look them up for the whole batch.

        S(0) -> B where these ranks need the same columns; else S(0) -> S(1) of the columns laid
        out per rank, so that each gets its own and no other.
        """
        return self._spread(batch_size, self.needed, self.ids_dtype, "ids/fwd")

    def length_steps(self, batch_size: int) -> tuple[BoxingStep, ...]:
        """Lengths of the lists, as ``id_steps`` does it for the matrix."""
        return self._spread(batch_size, self.needed_lists, torch.int32, "ids/fwd/lengths")

    def list_steps(self, batch_size: int) -> tuple[ExchangeStep, ...]:
        """What the lists hold: ids, and weights if any feature has some."""
        if not self.sent_lists or self.world.size == 1:
            return ()
        size = self.world.size
        to = [
            sum(self.features[self.ids.lists[place]].hotness for place in needed)
            for needed in self.needed_lists
        ]
        # A rank sends to every other what that one needs; worst for the one that needs least.
        local = -(-batch_size // size)
        of_one = local * (sum(to) - min(to))
        of_all = batch_size * sum(to)
        payloads = [("ids/fwd/lists", self.ids_dtype, "ids in lists")]
        if self.weighted:
            payloads.append(("ids/fwd/weights", self.dtype, "their weights"))
        return tuple(
            ExchangeStep(
                id=id,
                collective="all_to_all",
                groups=(self.world.ranks,),
                dtype=dtype,
                bound_bytes=of_one * dtype.itemsize,
                total_bound_bytes=of_all * dtype.itemsize,
                what=what,
            )
            for id, dtype, what in payloads
        )

    def ahead_steps(self, batch_size: int) -> tuple[Step, ...]:
        """Every transfer of a training batch's ids; none depends on what an update changes."""
        later = [
            step
            for number in range(1, max((group.num_rounds for group in self.groups), default=1))
            for purpose in IDS
            for step in self._steps(batch_size, purpose, number)
        ]
        return (
            *self.id_steps(batch_size),
            *self.length_steps(batch_size),
            *self._steps(batch_size, "counts"),
            *self.list_steps(batch_size),
            *self._steps(batch_size, "ids"),
            *later,
        )

    def forward_steps(self, batch_size: int) -> tuple[Step, ...]:
        """The transfers of a lookup that follow those of the ids, in the order they start."""
        return self._steps(batch_size, "vectors", None)

    def push_steps(self, batch_size: int) -> tuple[Step, ...]:
        """Gradients on their way to the rows, in the order they start."""
        return self._steps(batch_size, "gradients", None)

    def count_steps(self, batch_size: int) -> tuple[Step, ...]:
        """Of ``ahead_steps``, those of rows that are counted first."""
        return tuple(step for group in self.groups for step in group.steps(batch_size, *IDS))

    def _steps(self, batch_size: int, purpose: Purpose, number: int | None = 0) -> tuple[Step, ...]:
        """Of all groups; ``None``: of every round."""
        return tuple(
            step
            for group in self.groups
            for stage in group.stages(batch_size)
            if stage.purpose == purpose and number in (None, stage.round)
            for step in stage.steps
        )

    def update_steps(self, batch_size: int) -> tuple[Step, ...]:
        """What an update of rows itself sends, in the order it runs."""
        steps: list[Step] = []
        for group in self.groups:
            for index in group.shared_state:
                steps += group.row_state_bounds(index, batch_size)
        return tuple(steps)

    def _spread(
        self, batch_size: int, needed: tuple[tuple[int, ...], ...], dtype: torch.dtype, id: str
    ) -> tuple[BoxingStep, ...]:
        ranks = [rank for rank, mine in zip(self.world.ranks, needed, strict=True) if mine]
        if not ranks:
            return ()
        dst = Layout(self.world, (Split(1, tuple(len(mine) for mine in needed)),))
        if len(set(needed) - {()}) == 1:
            dst = Layout(Placement.of(self.world.device_type, ranks), (Broadcast(),))
        return plan_boxing(
            Layout(self.world, (Split(0),)),
            dst,
            (batch_size, len(_sent(needed))),
            dtype,
            id=id,
            backend=self.backend,
        )


def plan_embeddings(
    outputs: Iterable[OutputConfig],
    layouts: Mapping[str, TableLayout],
    *,
    features: Sequence[FeatureConfig],
    optimizer: SparseOptimizer,
    dtype: torch.dtype,
    world: Placement,
    backend: str,
    batch_size: int,
    row_dtype: torch.dtype | None = None,
    out_of_range: OutOfRange = "error",
) -> EmbeddingPlan:
    """Group the tables and derive everything that follows from their layouts.

    ``layouts`` has an entry per table name. ``features`` are those of a batch, also unused ones, in
    the order of its matrix of ids. ``batch_size``, the rows of a usual batch, decides where whole
    gradients are less than touched rows. ``dtype`` is float32 or float64, ``backend`` gloo or nccl.
    Raises ConfigError for others, or if a table's feature is absent, its shards do not tile it, its
    name is there twice, or tables of different ``num_rows`` share a feature whose ids
    ``out_of_range`` may replace.
    """
    outputs, features = tuple(outputs), tuple(features)
    tables = [table for output in outputs for table in output.tables]
    _check_names("table", [table.name for table in tables])
    _check_names("feature", [feature.name for feature in features])
    _check_names("output", [output.name for output in outputs])
    _check_arguments(dtype, row_dtype, backend, out_of_range)
    for table in tables:
        if table.name not in layouts:
            raise ConfigError(f"table {table.name}: has no layout; give one for each table")
        comm_dtype = layouts[table.name].comm_dtype
        if comm_dtype not in (None, dtype, *HALF_DTYPES):
            raise ConfigError(
                f"table {table.name}: comm_dtype {comm_dtype!r} for tables of {dtype}; use "
                f"{dtype}, torch.float16 or torch.bfloat16"
            )
        layout = layouts[table.name].layout
        check_cover(table, layout, shards_of(table, layout))
        check_exchange(table, layouts[table.name], world)
        check_by_key(table, layout, world)
        if table.by_key and row_dtype not in (None, dtype):
            raise ConfigError(
                f"table {table.name}: has its rows by key and row_dtype {row_dtype}, whose "
                f"rounding goes by row number; use {dtype}"
            )
    if out_of_range != "error":
        _check_substitutes(tables, features, out_of_range)
    groups, ids = make_groups(
        outputs, layouts, features, optimizer, dtype, world, backend, batch_size
    )
    fits = all(table.num_ids < 2**31 for table in tables)
    return EmbeddingPlan(
        outputs=outputs,
        groups=groups,
        features=features,
        ids=ids,
        ids_dtype=torch.int32 if fits else torch.int64,
        needed=tuple(_needed_columns(groups, rank) for rank in world.ranks),
        needed_lists=tuple(_needed_lists(groups, rank) for rank in world.ranks),
        optimizer=optimizer,
        dtype=dtype,
        row_dtype=row_dtype or dtype,
        world=world,
        backend=backend,
        out_of_range=out_of_range,
    )


def _check_arguments(
    dtype: object, row_dtype: object, backend: object, out_of_range: object
) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"dtype: {dtype!r}; use torch.float32 or torch.float64")
    if row_dtype is not None and row_dtype not in (dtype, *HALF_DTYPES):
        raise ConfigError(
            f"row_dtype: {row_dtype!r} beside {dtype}; use {dtype}, torch.float16 or torch.bfloat16"
        )
    if backend not in ("gloo", "nccl"):
        raise ConfigError(f"backend: {backend!r}; use gloo or nccl")
    if out_of_range not in ("error", "clamp", "hash"):
        raise ConfigError(f"out_of_range: {out_of_range!r}; use error, clamp or hash")


def _check_names(what: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        hint = "; a table is in one output, once, with all its features" if what == "table" else ""
        raise ConfigError(f"{what} {twice}: there are two of that name{hint}")


def _check_substitutes(
    tables: Sequence[TableConfig], features: Sequence[FeatureConfig], policy: OutOfRange
) -> None:
    """An id is replaced once, before any lookup, so one row must serve all tables of a feature."""
    for feature in features:
        sharing = [table for table in tables if feature.name in table.features]
        if len({table.num_ids for table in sharing}) > 1:
            sizes = ", ".join(
                f"{table.name} ({'keys' if table.by_key else f'{table.num_rows} rows'})"
                for table in sharing
            )
            raise ConfigError(
                f"feature {feature.name}: out_of_range {policy} would give ids beyond the smallest "
                f"table another row of {sizes}; use tables of equal num_rows, or out_of_range: "
                "error"
            )


def _needed_columns(groups: tuple[GroupPlan, ...], rank: int) -> tuple[int, ...]:
    uses = [use for group in groups for use in group.looks_up_everything(rank)]
    return tuple(sorted({column for use in uses for column in use.columns}))


def _needed_lists(groups: tuple[GroupPlan, ...], rank: int) -> tuple[int, ...]:
    uses = [use for group in groups for use in group.looks_up_everything(rank)]
    return tuple(sorted({use.place for use in uses if use.place is not None}))


def _sent(needed: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    holders = [columns for columns in needed if columns]
    if len(set(holders)) == 1:
        return holders[0]
    return tuple(column for columns in holders for column in columns)

"""From table layouts to the groups, storages and communication steps of an embedding collection.

Pure data and pure functions: ``explain`` prints what is built here without any rank running, and
``EmbeddingCollection`` executes the same objects. Nothing here allocates or communicates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from sbpflow.boxing_plan import BoxingStep, plan_boxing
from sbpflow.embedding.group_plan import IDS_DTYPE, GroupPlan, Stack, Step
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
from sbpflow.sbp import Broadcast, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """All groups of a collection, and the ids that travel before any lookup.

    ``features`` names the columns of the batch's ids. ``needed`` has, per rank, the columns that it
    looks up for the whole batch.
    """

    outputs: tuple[OutputConfig, ...]
    groups: tuple[GroupPlan, ...]
    features: tuple[str, ...]
    needed: tuple[tuple[int, ...], ...]
    optimizer: SparseOptimizer
    dtype: torch.dtype
    world: Placement
    backend: str

    @property
    def sent_columns(self) -> tuple[int, ...]:
        """Columns of the batch's ids as they are sent: all ranks' needs, once if they are equal."""
        holders = [columns for columns in self.needed if columns]
        if len(set(holders)) == 1:
            return holders[0]
        return tuple(column for columns in holders for column in columns)

    def id_steps(self, num_rows: int) -> tuple[BoxingStep, ...]:
        """Ids to the ranks that look them up for the whole batch.

        S(0) -> B where these ranks need the same columns; else S(0) -> S(1) of the columns laid
        out per rank, so that each gets its own and no other.
        """
        ranks = [r for r, columns in zip(self.world.ranks, self.needed, strict=True) if columns]
        if not ranks:
            return ()
        sizes = tuple(len(columns) for columns in self.needed)
        dst = Layout(self.world, (Split(1, sizes),))
        if len(set(self.needed) - {()}) == 1:
            dst = Layout(Placement.of(self.world.device_type, ranks), (Broadcast(),))
        return plan_boxing(
            Layout(self.world, (Split(0),)),
            dst,
            (num_rows, len(self.sent_columns)),
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
            if group.exchange == "local":
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
    return EmbeddingPlan(
        outputs=outputs,
        groups=tuple(groups),
        features=features,
        needed=tuple(_needed(groups, rank) for rank in world.ranks),
        optimizer=optimizer,
        dtype=dtype,
        world=world,
        backend=backend,
    )


def _needed(groups: list[GroupPlan], rank: int) -> tuple[int, ...]:
    """Columns of ids that ``rank`` looks up for the whole batch, ascending."""
    features: set[int] = set()
    for group in groups:
        if group.exchange == "columns":
            for stack in group.stacks:
                if stack.pieces(rank):
                    features.update(stack.features)
        elif group.exchange == "reduce" and rank in group.owners:
            features.update(feature for stack in group.stacks for feature in stack.features)
    return tuple(sorted(features))


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
        return ("reduce", layout.layout.placement.ranks, layout.layout.placement.shape)
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

"""Which tables travel together (groups) and which are stored together (stacks).

Few of each are fast: a group is one collective each way, a stack one kernel call. Tables go apart
only where something about them must differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from sbpflow.embedding.plan.exchanges import Exchange
from sbpflow.embedding.plan.group_plan import GroupPlan, whole_gradients_are_less
from sbpflow.embedding.plan.stack import Stack, Use
from sbpflow.embedding.plan.tables import (
    FeatureConfig,
    OutputConfig,
    TableConfig,
    TableLayout,
)
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.errors import ConfigError, unknown_value
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class IdColumns:
    """Where a batch has the ids of its features.

    ``first`` is each feature's first column in the matrix, ``None`` if it comes as lists only;
    ``lists`` are the features that travel as lists, some of which may be in the matrix too.
    """

    first: tuple[int | None, ...]
    num_columns: int
    lists: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Context:
    """What every group of a plan is made with."""

    layouts: Mapping[str, TableLayout]
    features: tuple[FeatureConfig, ...]
    ragged: frozenset[str]  # tables looked up by lists
    ids: IdColumns
    optimizer: SparseOptimizer
    dtype: torch.dtype
    world: Placement
    backend: str
    batch_size: int


def make_groups(
    outputs: Sequence[OutputConfig],
    layouts: Mapping[str, TableLayout],
    features: tuple[FeatureConfig, ...],
    optimizer: SparseOptimizer,
    dtype: torch.dtype,
    world: Placement,
    backend: str,
    batch_size: int,
) -> tuple[tuple[GroupPlan, ...], IdColumns]:
    """All groups in the order of the outputs, and where ids are; ConfigError as plan_embeddings."""
    by_name = {feature.name: feature for feature in features}
    tables = [table for output in outputs for table in output.tables]
    for table in tables:
        for name in table.features:
            if name not in by_name:
                raise ConfigError(
                    f"table {table.name}: feature {name!r} is not in the data, which has "
                    f"{', '.join(by_name)}"
                )
    ragged = frozenset(
        table.name
        for table in tables
        if any(by_name[name].ragged or by_name[name].weighted for name in table.features)
    )
    listed = {name for table in tables if table.name in ragged for name in table.features}
    context = _Context(
        layouts,
        features,
        ragged,
        _assign_columns(features, listed),
        optimizer,
        dtype,
        world,
        backend,
        batch_size,
    )
    groups = tuple(group for output in outputs for group in _groups_of(output, context))
    return groups, context.ids


def _assign_columns(features: tuple[FeatureConfig, ...], listed: set[str]) -> IdColumns:
    first: list[int | None] = []
    column = 0
    for feature in features:
        in_matrix = not (feature.ragged or feature.weighted)
        first.append(column if in_matrix else None)
        column += feature.hotness if in_matrix else 0
    lists = tuple(n for n, feature in enumerate(features) if feature.name in listed)
    return IdColumns(first=tuple(first), num_columns=column, lists=lists)


def _groups_of(output: OutputConfig, context: _Context) -> list[GroupPlan]:
    members: dict[_GroupKey, list[TableConfig]] = {}
    for table in output.tables:
        members.setdefault(_group_key(table, output, context), []).append(table)
    groups: list[GroupPlan] = []
    for key, tables in members.items():
        same = sum(1 for other in members if other.exchange == key.exchange)
        number = f".{sum(1 for g in groups if g.exchange == key.exchange)}" if same > 1 else ""
        stacks = _stacks_of(tables, context)
        groups.append(
            GroupPlan(
                name=f"{output.name}/{key.exchange}{number}",
                output=output,
                exchange=key.exchange,
                stacks=stacks,
                shared_state=tuple(
                    i
                    for i, stack in enumerate(stacks)
                    if stack.optimizer.shares_row_state and stack.is_column_split
                ),
                world=context.world,
                dtype=context.dtype,
                comm_dtype=key.comm_dtype,
                backend=context.backend,
                whole_gradients=key.whole_gradients,
            )
        )
    return groups


@dataclass(frozen=True, slots=True)
class _GroupKey:
    """Tables of one output with equal keys travel together; ``alike`` has what else decides.

    Optimizers differ between the stacks of a group. Only where rows travel is there one stack to a
    group, whose rows have one numbering, and so one optimizer.
    """

    exchange: Exchange
    comm_dtype: torch.dtype
    whole_gradients: bool = False
    alike: tuple[object, ...] = ()


def _group_key(table: TableConfig, output: OutputConfig, context: _Context) -> _GroupKey:
    given = context.layouts[table.name]
    comm_dtype = given.comm_dtype or context.dtype
    if context.world.size == 1:
        return _GroupKey("local", context.dtype)
    if given.exchange == "reduce":
        placement = given.layout.placement
        split = _column_split(given.layout) if output.sums else None
        return _GroupKey("reduce", comm_dtype, alike=(placement.ranks, placement.shape, split))
    if given.exchange == "local":
        lookups = context.batch_size * sum(
            feature.hotness for feature in context.features if feature.name in table.features
        )
        if whole_gradients_are_less(table, lookups, context.world.size):
            return _GroupKey("local", comm_dtype, whole_gradients=True)
    if given.exchange in ("local", "unique"):  # rows travel, of one width, found in one way
        alike = (
            table.dim,
            _column_split(given.layout),
            table.name in context.ragged,
            _rule_of(table, context),
            table.kernel,
            table.by_key and table.name,
        )
        return _GroupKey(given.exchange, comm_dtype, alike=alike)
    if given.exchange == "columns":
        return _GroupKey("columns", comm_dtype)
    raise unknown_value("exchange", given.exchange, Exchange)


def _rule_of(table: TableConfig, context: _Context) -> SparseOptimizer:
    return table.optimizer or context.optimizer


def _stacks_of(tables: list[TableConfig], context: _Context) -> tuple[Stack, ...]:
    stacks: dict[tuple[object, ...], list[TableConfig]] = {}
    for table in tables:
        split = _column_split(context.layouts[table.name].layout)
        rule = _rule_of(table, context)
        alone = table.by_key and table.name  # one map for all rows of a storage
        key = (table.dim, split, table.name in context.ragged, rule, table.kernel, alone)
        stacks.setdefault(key, []).append(table)
    return tuple(
        Stack(
            tables=tuple(members),
            layouts=tuple(context.layouts[table.name].layout for table in members),
            uses=tuple(use for table in members for use in _uses_of(table, ragged, context)),
            optimizer=_rule_of(members[0], context),
            ragged=ragged,
        )
        for (_, _, ragged, *_), members in cast(
            "dict[tuple[object, object, bool, object, object], list[TableConfig]]", stacks
        ).items()
    )


def _column_split(layout: Layout) -> object:
    """Equal for two layouts exactly if every rank stores equally many columns of both."""
    for axis, sbp in enumerate(layout.nd_sbp):
        if isinstance(sbp, Split) and sbp.dim == 1:
            return (layout.placement, axis, sbp)
    return None


def _uses_of(table: TableConfig, ragged: bool, context: _Context) -> list[Use]:
    uses: list[Use] = []
    for number, feature in enumerate(context.features):
        if feature.name not in table.features:
            continue
        first = context.ids.first[number]
        if ragged or first is None:
            place = context.ids.lists.index(number)
            use = Use(table=table, feature=number, place=place, hotness=feature.hotness)
        else:
            columns = tuple(range(first, first + feature.hotness))
            use = Use(table=table, feature=number, columns=columns, hotness=feature.hotness)
        uses.append(use)
    return sorted(uses, key=lambda use: table.features.index(context.features[use.feature].name))

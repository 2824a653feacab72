"""Decides which tables share transfers (groups) and which tables share a store (stacks).

Fewer groups and stacks are faster, because each group needs its own collectives in both directions,
and each stack its own kernel calls. Tables are separated only if they differ in a relevant
property.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sbpflow.embedding.plan.exchanges import exchange_for
from sbpflow.embedding.plan.group_plan import Exchange, GroupPlan, Member
from sbpflow.embedding.plan.table_batch import FeatureLookup, TableBatch
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.errors import ConfigError, choices
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class IdColumns:
    """Where the ids of each feature are stored in a batch.

    ``first`` is each feature's first column in the matrix, or ``None`` if the feature has only a
    list. ``lists`` contains the features that are sent as lists; some of them may also be in the
    matrix.
    """

    first: tuple[int | None, ...]
    num_columns: int
    lists: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupingFacts:
    """What all groups of a plan share."""

    layouts: Mapping[str, TableLayout]
    features: tuple[FeatureConfig, ...]
    ragged: frozenset[str]  # names of tables with lists of ids
    ids: IdColumns
    optimizer: SparseOptimizer
    dtype: torch.dtype
    world: Placement
    backend: str
    batch_size: int
    places: Mapping[str, int]  # of the features, by name


def place_ids(
    tables: Sequence[TableConfig], features: Sequence[FeatureConfig]
) -> tuple[IdColumns, frozenset[str]]:
    """Return the places of the ids in a batch, and the names of the tables with lists of ids.

    Raise ConfigError if a table uses a feature that the data does not have.
    """
    by_name = {feature.name: feature for feature in features}
    for table in tables:
        for name in table.features:
            if name not in by_name:
                raise ConfigError(
                    f"table {table.name}: the data has no feature {name!r}; use one of "
                    f"{choices(name, by_name)}"
                )
    ragged = frozenset(
        table.name
        for table in tables
        if any(by_name[name].ragged or by_name[name].weighted for name in table.features)
    )
    listed = {name for table in tables if table.name in ragged for name in table.features}
    first: list[int | None] = []
    column = 0
    for feature in features:
        in_matrix = not (feature.ragged or feature.weighted)
        first.append(column if in_matrix else None)
        column += feature.hotness if in_matrix else 0
    lists = tuple(n for n, feature in enumerate(features) if feature.name in listed)
    return IdColumns(first=tuple(first), num_columns=column, lists=lists), ragged


def groups_of(output: OutputConfig, facts: GroupingFacts) -> list[GroupPlan]:
    """Return the groups of an output's tables."""
    members: dict[_GroupKey, list[TableConfig]] = {}
    for table in output.tables:
        members.setdefault(_group_key(table, output, facts), []).append(table)
    groups: list[GroupPlan] = []
    for (exchange, kind, comm_dtype, _), tables in members.items():
        same = sum(other[0] == exchange for other in members)
        number = f".{sum(g.exchange == exchange for g in groups)}" if same > 1 else ""
        stacks = _stacks_of(tables, output, facts)
        groups.append(
            GroupPlan(
                name=f"{output.name}/{exchange}{number}",
                output=output,
                exchange=exchange,
                stacks=stacks,
                shared_state=tuple(
                    i
                    for i, stack in enumerate(stacks)
                    if stack.optimizer.shares_row_state and stack.is_column_split
                ),
                world=facts.world,
                dtype=facts.dtype,
                comm_dtype=comm_dtype,
                backend=facts.backend,
                dense_allreduce=kind.dense_allreduce,
            )
        )
    return groups


# Tables of an output share a group if their keys are equal. A key consists of the configured
# exchange, the exchange that runs, the dtype of sent vectors, and the exchange's own grouping key.
_GroupKey = tuple[str, Exchange, torch.dtype, tuple[Hashable, ...]]


def _group_key(table: TableConfig, output: OutputConfig, facts: GroupingFacts) -> _GroupKey:
    config, size = facts.layouts[table.name], facts.world.size
    lookups = facts.batch_size * sum(
        facts.features[number].hotness for number in {facts.places[n] for n in table.features}
    )
    kind = exchange_for(table, config.layout, config.exchange, lookups, size)
    key = kind.group_key(_member(table, output, facts))
    if size == 1:  # no transfers
        return "local", kind, facts.dtype, key
    return config.exchange, kind, config.comm_dtype or facts.dtype, key


def _member(table: TableConfig, output: OutputConfig, facts: GroupingFacts) -> Member:
    layout = facts.layouts[table.name].layout
    ragged, rule = table.name in facts.ragged, table.optimizer or facts.optimizer
    return Member(
        ranks=layout.placement.ranks,
        grid=layout.placement.shape,
        columns=_column_split(layout),
        sums=output.sums,
        stored=(table.dim, ragged, rule, table.kernel, table.growth is not None, table.storage),
    )


def _stacks_of(
    tables: list[TableConfig], output: OutputConfig, facts: GroupingFacts
) -> tuple[TableBatch, ...]:
    stacks: dict[tuple[Hashable, ...], list[TableConfig]] = {}
    for table in tables:
        stacks.setdefault(_member(table, output, facts).stack_key, []).append(table)
    result: list[TableBatch] = []
    for members in stacks.values():
        ragged = members[0].name in facts.ragged
        stack = TableBatch(
            tables=tuple(members),
            layouts=tuple(facts.layouts[table.name].layout for table in members),
            uses=tuple(use for table in members for use in _uses_of(table, ragged, facts)),
            optimizer=members[0].optimizer or facts.optimizer,
            ragged=ragged,
        )
        result.append(stack)
    return tuple(result)


def _column_split(layout: Layout) -> Hashable:
    """Return a key that the layouts of two tables of the same dim share only if every rank stores
    the same number of columns in both.
    """
    for axis, sbp in enumerate(layout.nd_sbp):
        if isinstance(sbp, Split) and sbp.dim == 1:
            return (layout.placement, axis, sbp)
    return None


def _uses_of(table: TableConfig, ragged: bool, facts: GroupingFacts) -> list[FeatureLookup]:
    uses: list[FeatureLookup] = []
    for name in table.features:
        number = facts.places[name]
        first, hotness = facts.ids.first[number], facts.features[number].hotness
        columns, place = (), None
        if ragged or first is None:
            place = facts.ids.lists.index(number)
        else:
            columns = tuple(range(first, first + hotness))
        uses.append(
            FeatureLookup(
                table=table, feature=number, columns=columns, place=place, hotness=hotness
            )
        )
    return uses

"""Turns table layouts into the groups, stores, and transfers of an embedding collection.

This module contains only pure data and pure functions; it neither allocates nor communicates.
``explain`` prints the plan without starting any rank, and ``EmbeddingCollection`` executes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.embedding.plan.exchanges import check_exchange
from sbpflow.embedding.plan.group_plan import ExchangeStep, GroupPlan, Purpose, Step
from sbpflow.embedding.plan.grouping import GroupingFacts, IdColumns, groups_of, place_ids
from sbpflow.embedding.plan.growth import has_idle_time, most_freed
from sbpflow.embedding.plan.out_of_range import OutOfRange
from sbpflow.embedding.plan.tables import (
    HALF_DTYPES,
    FeatureConfig,
    OutputConfig,
    TableConfig,
    TableLayout,
)
from sbpflow.embedding.plan.vocabularies import VocabularyPlan, aligned, plan_vocabularies
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """All groups of a collection, and the id transfers that precede the lookups.

    The ids of a batch consist of a matrix and lists; ``ids`` says which matrix columns and lists
    belong to which feature. ``needed`` and ``needed_lists`` are the columns and lists that each
    rank looks up for the global batch. Rows are stored as ``row_dtype``; arithmetic uses ``dtype``.
    ``out_of_range`` is the policy for ids outside a table's rows: raise an error, or replace the
    ids (clamp, hash). The keys of growing tables are first converted to row numbers by
    ``vocabularies``.
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
    vocabularies: tuple[VocabularyPlan, ...] = ()

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        """Return the tables of all outputs, in order."""
        return tuple(table for output in self.outputs for table in output.tables)

    @property
    def ids_on_host(self) -> bool:
        """Return True if batches must have their ids in host memory, where the vocabularies of
        growing tables are; otherwise, ids must be on the device of the tables.
        """
        return bool(self.vocabularies)

    @property
    def sent_columns(self) -> tuple[int, ...]:
        """Return the matrix columns in the order in which they are sent: each column once if the
        ranks that need any columns all need the same, else the columns of each rank in turn.
        """
        return _sent(self.needed)

    @property
    def sent_lists(self) -> tuple[int, ...]:
        """Return the lists whose lengths are sent, in the same arrangement as ``sent_columns``."""
        return _sent(self.needed_lists)

    @property
    def weighted(self) -> bool:
        """Return True if any of the lists have weights."""
        return any(self.features[feature].weighted for feature in self.ids.lists)

    def id_steps(self, batch_size: int) -> tuple[BoxingStep, ...]:
        """Return the steps that send the id matrix to the ranks that look up ids of other ranks.

        The conversion is S(0) -> B if these ranks need the same columns, else S(0) -> S(1) with the
        columns arranged by rank, so that each rank receives only the columns that it needs.
        """
        return self._spread(batch_size, self.needed, self.ids_dtype, "ids/fwd")

    def length_steps(self, batch_size: int) -> tuple[BoxingStep, ...]:
        """Return the steps that send the lengths of lists, analogous to ``id_steps``."""
        return self._spread(batch_size, self.needed_lists, torch.int32, "ids/fwd/lengths")

    def list_steps(self, batch_size: int) -> tuple[ExchangeStep, ...]:
        """Return the steps that send the contents of the lists: ids and any weights."""
        if not self.sent_lists or self.world.size == 1:
            return ()
        needs = [
            sum(self.features[self.ids.lists[place]].hotness for place in needed)
            for needed in self.needed_lists
        ]
        # A rank sends the others the lists that they need. The rank that itself needs the fewest
        # lists may therefore send the most.
        per_rank = -(-batch_size // self.world.size) * (sum(needs) - min(needs))
        payloads = [("ids/fwd/lists", self.ids_dtype, "ids in lists")]
        if self.weighted:
            payloads.append(("ids/fwd/weights", self.dtype, "weights of ids in lists"))
        groups, sizes = (self.world.ranks,), (per_rank, batch_size * sum(needs))
        return tuple(
            ExchangeStep(groups, id, "all_to_all", dtype, *sizes, what)
            for id, dtype, what in payloads
        )

    def key_steps(self, batch_size: int) -> tuple[ExchangeStep, ...]:
        """Return the transfers that send keys and counts to the owners of the keys, return row
        numbers, and, if other ranks store rows of these keys, announce new keys and freed rows.
        """
        size, vocabularies = self.world.size, self.vocabularies
        if not vocabularies or size == 1:
            return ()
        lookups = sum(vocabulary.hotness for vocabulary in vocabularies)
        most, every = -(-batch_size // size) * lookups, batch_size * lookups
        timed = any(has_idle_time(vocabulary.growth) for vocabulary in vocabularies)
        counts, what = size * (len(vocabularies) + timed), " and event times" * timed
        steps = [
            ("keys/counts", "all_to_all", counts, counts * size, f"numbers of unique keys{what}"),
            ("keys/fwd", "all_to_all", 2 * most, 2 * every, "unique keys and their counts"),
            ("keys/rows", "all_to_all", every, every, "rows of the keys"),
        ]
        if not all(vocabulary.is_local for vocabulary in vocabularies):
            freed = sum(most_freed(each.growth, each.num_rows) for each in vocabularies)
            sent, sizes = 2 * (every + freed) * (size - 1), 2 * size * len(vocabularies)
            steps += [
                ("keys/changed", "all_to_all", sizes, sizes * size, "sizes of keys/new"),
                ("keys/new", "all_gather", sent, sent, "new keys and freed rows"),
            ]
        return tuple(
            ExchangeStep((self.world.ranks,), id, collective, torch.int64, per_rank, total, what)
            for id, collective, per_rank, total, what in steps
        )

    def ahead_steps(self, batch_size: int) -> tuple[Step, ...]:
        """Return all id transfers of a training batch. None of these transfers depends on an
        update, so they can run ahead.
        """
        steps: list[Step] = [
            *self.key_steps(batch_size),
            *self.id_steps(batch_size),
            *self.length_steps(batch_size),
            *self.steps(batch_size, "counts", 0),
            *self.list_steps(batch_size),
            *self.steps(batch_size, "ids", 0),
        ]
        for number in range(1, max((group.num_rounds for group in self.groups), default=1)):
            steps += self.steps(batch_size, "counts", number)
            steps += self.steps(batch_size, "ids", number)
        return tuple(steps)

    def forward_steps(self, batch_size: int) -> tuple[Step, ...]:
        """Return the transfers of a lookup, except id transfers, in the order in which they start.

        The ``flags`` and early vectors belong to the next batch, and the late gradients to the
        previous batch.
        """
        purposes: tuple[Purpose, ...]
        purposes = ("vectors", "flags", "late flags", "late gradients", "early vectors")
        return tuple(step for purpose in purposes for step in self.steps(batch_size, purpose))

    def steps(
        self, batch_size: int, purpose: Purpose, number: int | None = None
    ) -> tuple[Step, ...]:
        """Return the steps of all groups for ``purpose`` in round ``number``, or by default in all
        rounds.
        """
        return tuple(
            step
            for group in self.groups
            for stage in group.stages(batch_size)
            if stage.purpose == purpose and number in (None, stage.round)
            for step in stage.steps
        )

    def update_steps(self, batch_size: int) -> tuple[Step, ...]:
        """Return the transfers during the row update, in the order in which they run."""
        steps: list[Step] = []
        for group in self.groups:
            for index in group.shared_state:
                steps += group.row_state_bounds(index, batch_size)
        return tuple(steps)

    def _spread(
        self, batch_size: int, needed: tuple[tuple[int, ...], ...], dtype: torch.dtype, id: str
    ) -> tuple[BoxingStep, ...]:
        ranks = [rank for rank, columns in zip(self.world.ranks, needed, strict=True) if columns]
        if not ranks:
            return ()
        dst = Layout(self.world, (Split(1, tuple(len(columns) for columns in needed)),))
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
    """Group the tables and derive their transfers from the layouts.

    ``layouts`` contains an entry for every table. ``features`` lists all features of a batch, used
    or not, in the order of the id matrix. ``batch_size`` is the usual global batch size; it decides
    which B tables all-reduce dense gradients. ``dtype`` is float32 or float64; ``backend`` is gloo
    or nccl.

    Raise ConfigError if an argument is invalid, the layout or a feature of a table is missing,
    an exchange does not support a layout, a name occurs twice, or ``out_of_range`` would replace
    ids of a feature whose tables differ in ``num_ids``.
    """
    outputs, features = tuple(outputs), tuple(features)
    tables = [table for output in outputs for table in output.tables]
    layouts = aligned(tables, layouts)
    _check_names("table", [table.name for table in tables])
    _check_names("feature", [feature.name for feature in features])
    _check_names("output", [output.name for output in outputs])
    _check_arguments(dtype, row_dtype, backend, out_of_range)
    for table in tables:
        if table.name not in layouts:
            raise ConfigError(f"table {table.name} has no layout; give it one, such as S(0)")
        comm_dtype = layouts[table.name].comm_dtype
        if comm_dtype not in (None, dtype, *HALF_DTYPES):
            raise ConfigError(
                f"table {table.name}: comm_dtype must be {dtype}, torch.float16, or "
                f"torch.bfloat16 for {dtype} tables, got {comm_dtype!r}"
            )
        check_exchange(table, layouts[table.name], world)
    if out_of_range != "error":
        _check_substitutes(tables, features, out_of_range)
    ids, ragged = place_ids(tables, features)
    places = {feature.name: place for place, feature in enumerate(features)}
    facts = GroupingFacts(
        layouts, features, ragged, ids, optimizer, dtype, world, backend, batch_size, places
    )
    groups = tuple(group for output in outputs for group in groups_of(output, facts))
    looked_up = [_looked_up_everywhere(groups, rank) for rank in world.ranks]
    fits = all(table.num_ids < 2**31 for table in tables)
    return EmbeddingPlan(
        outputs=outputs,
        groups=groups,
        features=features,
        ids=ids,
        ids_dtype=torch.int32 if fits else torch.int64,
        needed=tuple(columns for columns, _ in looked_up),
        needed_lists=tuple(lists for _, lists in looked_up),
        optimizer=optimizer,
        dtype=dtype,
        row_dtype=row_dtype or dtype,
        world=world,
        backend=backend,
        out_of_range=out_of_range,
        vocabularies=plan_vocabularies(outputs, layouts, features, ids, world),
    )


def _check_arguments(
    dtype: object, row_dtype: object, backend: object, out_of_range: object
) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
    if row_dtype is not None and row_dtype not in (dtype, *HALF_DTYPES):
        raise ConfigError(
            f"row_dtype must be {dtype}, torch.float16, or torch.bfloat16 for dtype {dtype}, got "
            f"{row_dtype!r}"
        )
    if backend not in ("gloo", "nccl"):
        raise ConfigError(f"backend must be gloo or nccl, got {backend!r}")
    if out_of_range not in get_args(OutOfRange):
        raise ConfigError(
            f"out_of_range must be {' or '.join(get_args(OutOfRange))}, got {out_of_range!r}"
        )


def _check_names(kind: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        hint = "; list a table once, in one output, with all its features"
        raise ConfigError(
            f"{kind} {twice}: this name is used twice{hint if kind == 'table' else ''}"
        )


def _check_substitutes(
    tables: Sequence[TableConfig], features: Sequence[FeatureConfig], policy: OutOfRange
) -> None:
    """Check that a replaced id is valid in all tables of its feature, because all tables get the
    same id.
    """
    for feature in features:
        sharing = [table for table in tables if feature.name in table.features]
        if len({table.num_ids for table in sharing}) > 1:
            sizes = ", ".join(
                f"{table.name} ({'keys' if table.growth else f'{table.num_rows} rows'})"
                for table in sharing
            )
            raise ConfigError(
                f"feature {feature.name}: out_of_range {policy} would change ids that are valid "
                f"in some of the tables {sizes}; make all of these tables grow, give all the "
                "same num_rows, or use out_of_range: error"
            )


def _looked_up_everywhere(
    groups: tuple[GroupPlan, ...], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the (matrix columns, lists) that ``rank`` looks up for the global batch."""
    stacks = [stack for group in groups if group.kind.looks_up_all for stack in group.stacks]
    uses = [use for stack in stacks for use in stack.uses_on(rank)]
    columns = {column for use in uses for column in use.columns}
    return tuple(sorted(columns)), tuple(sorted({u.place for u in uses if u.place is not None}))


def _sent(needed: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    holders = [columns for columns in needed if columns]
    if len(set(holders)) == 1:
        return holders[0]
    return tuple(column for columns in holders for column in columns)

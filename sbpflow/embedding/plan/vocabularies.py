"""Plans which rank assigns rows to the keys of each growing field.

The row number of a key is chosen before any table is looked up. All tables of a field therefore
share row numbers, whatever their layouts, and the exchanges see only row numbers. If a table splits
its rows, the rank that stores a range of rows also owns the corresponding range of key buckets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from sbpflow.embedding.plan.grouping import IdColumns
from sbpflow.embedding.plan.growth import MAX_ROWS_OF_PART, NUM_BUCKETS, Growth, first_row_of
from sbpflow.embedding.plan.tables import (
    FeatureConfig,
    OutputConfig,
    TableConfig,
    TableLayout,
    shards_of,
)
from sbpflow.embedding.plan.two_level import is_two_level
from sbpflow.errors import ConfigError
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split, balanced_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPlan:
    """The keys of ``features``, whose tables share row numbers.

    ``owners`` lists (rank, first bucket, last bucket + 1) in ascending order. The keys are in
    ``columns`` of the id matrix and in the lists at ``places``. If ``is_local``, only the owner of
    a key stores rows of that key.
    """

    name: str
    features: tuple[str, ...]
    growth: Growth
    num_rows: int
    owners: tuple[tuple[int, int, int], ...]
    columns: tuple[int, ...]
    places: tuple[int, ...]
    hotness: int
    is_local: bool
    tables: tuple[str, ...]


def vocabulary_name(features: Sequence[str]) -> str:
    """Return the name of the vocabulary of growing tables with these features."""
    return "+".join(features)


def aligned(
    tables: Sequence[TableConfig], layouts: Mapping[str, TableLayout]
) -> dict[str, TableLayout]:
    """Return the layouts, with the rows of growing tables split at bucket boundaries."""
    result = dict(layouts)
    for table in tables:
        config = layouts.get(table.name)
        if table.growth is None or config is None:
            continue
        layout, nd_sbp = config.layout, list(config.layout.nd_sbp)
        if is_two_level(layout):
            split = _split_twice(table, config.key, *layout.placement.shape)
            result[table.name] = replace(config, layout=replace(layout, nd_sbp=split))
            continue
        for axis, sbp in enumerate(nd_sbp):
            if not (isinstance(sbp, Split) and sbp.dim == 0):
                continue
            parts = layout.placement.shape[axis]
            sizes = _bucket_sizes(table.num_rows, parts)
            if sbp.sizes is None:
                nd_sbp[axis] = Split(0, sizes)
            elif not _bounds(table.num_rows).issuperset(accumulate(sbp.sizes)):
                raise ConfigError(
                    f"{config.key or f'table {table.name}'}: sizes {list(sbp.sizes)} split the "
                    "rows of a single key bucket; use sizes that end at bucket boundaries (for "
                    f"example, {list(sizes)})"
                )
        result[table.name] = replace(config, layout=replace(layout, nd_sbp=tuple(nd_sbp)))
    return result


def _split_twice(table: TableConfig, key: str, hosts: int, width: int) -> tuple[Split, Split]:
    """Return how rows are split over hosts, and over the ranks on each host, at bucket boundaries.

    A layout has the same second split on all hosts, so all buckets must have the same number of
    rows, and all hosts the same number of buckets. Raise ConfigError if this is not possible.
    """
    each, rest = divmod(table.num_rows, NUM_BUCKETS)
    if rest or NUM_BUCKETS % hosts:
        uses = [f"evict.max_rows: {NUM_BUCKETS * (each + 1)}"] if rest else []
        uses += ["2, 4, 8, .. hosts"] if NUM_BUCKETS % hosts else []
        raise ConfigError(
            f"{key or f'table {table.name}'}: (S(0), S(0)) gives each host an equal part of the "
            f"{NUM_BUCKETS} buckets of keys, but the {table.num_rows} rows of {table.name} cannot "
            f"be divided that way over {hosts} hosts; use {' and '.join(uses)}, or sbp: S(0)"
        )
    of_host = balanced_sizes(NUM_BUCKETS // hosts, width)
    return (
        Split(0, (table.num_rows // hosts,) * hosts),
        Split(0, tuple(each * buckets for buckets in of_host)),
    )


def plan_vocabularies(
    outputs: Sequence[OutputConfig],
    layouts: Mapping[str, TableLayout],
    features: Sequence[FeatureConfig],
    ids: IdColumns,
    world: Placement,
) -> tuple[VocabularyPlan, ...]:
    """Return a plan for each set of features that have growing tables."""
    tables = [table for output in outputs for table in output.tables]
    by_features: dict[tuple[str, ...], list[TableConfig]] = {}
    for table in tables:
        if table.growth is not None:
            _check_table(table, layouts[table.name])
            by_features.setdefault(table.features, []).append(table)
    _check_sharing(tables, by_features)
    numbers = {feature.name: number for number, feature in enumerate(features)}
    result: list[VocabularyPlan] = []
    for names, growing in by_features.items():
        columns: list[int] = []
        places: list[int] = []
        for number in (numbers[name] for name in names):
            first = ids.first[number]
            if first is not None:
                columns += range(first, first + features[number].hotness)
            if number in ids.lists:
                places.append(ids.lists.index(number))
        growth = growing[0].growth
        if growth is None:
            raise RuntimeError(f"table {growing[0].name} does not grow")
        owners = _owners(growing, layouts, world)
        _check_parts(vocabulary_name(names), growing[0].num_rows, owners)
        result.append(
            VocabularyPlan(
                name=vocabulary_name(names),
                features=names,
                growth=growth,
                num_rows=growing[0].num_rows,
                owners=owners,
                columns=tuple(columns),
                places=tuple(places),
                hotness=sum(features[numbers[name]].hotness for name in names),
                is_local=world.size == 1
                or all(_stored_parts(table, layouts) == {*owners} for table in growing),
                tables=tuple(table.name for table in growing),
            )
        )
    return tuple(result)


def _check_sharing(
    tables: Sequence[TableConfig], by_features: Mapping[tuple[str, ...], Sequence[TableConfig]]
) -> None:
    """Raise ConfigError if a table shares only some features, or not the growth settings, with a
    growing table.
    """
    grows: dict[str, list[TableConfig]] = {}
    for names, growing in by_features.items():
        for name in names:
            grows.setdefault(name, []).append(growing[0])
    for table in tables:
        for first in (first for name in table.features for first in grows.get(name, ())):
            if (table.features, table.growth) != (first.features, first.growth):
                shared = sorted({*first.features} & {*table.features})
                raise ConfigError(
                    f"table {table.name} shares features {shared} with growing table "
                    f"{first.name}, so both must have the same features, in the same order, and "
                    "the same growth settings"
                )


def _check_table(table: TableConfig, config: TableLayout) -> None:
    layout, problem = config.layout, ""
    if layout.placement.size > 1 and any(isinstance(sbp, Broadcast) for sbp in layout.nd_sbp):
        problem = (
            f"layout {layout} is not supported, because every rank would need the new rows of all "
            "ranks; use S(0) or S(1) (for example, parallel.scheme: row, or sbp in parallel.tables)"
        )
    elif list(layout.placement.ranks) != sorted(layout.placement.ranks):
        # The hosts set the order of a layout of two levels.
        fix = "use sbp: S(0)" if is_two_level(layout) else "list them in ascending order"
        problem = f"layout {layout} has its ranks out of order; {fix}"
    if problem:
        raise ConfigError(f"table {table.name}: grows: {problem}")


def _check_parts(field: str, num_rows: int, owners: Sequence[tuple[int, int, int]]) -> None:
    share = max(last - first for _, first, last in owners)
    if num_rows * share > MAX_ROWS_OF_PART * NUM_BUCKETS:
        raise ConfigError(
            f"field {field}: evict.max_rows {num_rows} gives a rank more than {MAX_ROWS_OF_PART} "
            f"rows with keys; use {MAX_ROWS_OF_PART * NUM_BUCKETS // share} or fewer, or more ranks"
        )


def _owners(
    tables: Sequence[TableConfig], layouts: Mapping[str, TableLayout], world: Placement
) -> tuple[tuple[int, int, int], ...]:
    """Return the owners of the buckets: the ranks that store the rows if a table splits its rows,
    else all ranks.
    """
    split: dict[tuple[tuple[int, int, int], ...], str] = {}
    for table in tables:
        owners = _row_owners(table, layouts)
        if len(owners) > 1:
            split.setdefault(owners, table.name)
    if len(split) > 1:
        first, second, *_ = split.values()
        raise ConfigError(
            f"table {second} splits its rows differently from table {first}, but both use the "
            "keys of the same field; use the same ranks and sizes for both, or S(1)"
        )
    if split:
        return next(iter(split))
    ends = [NUM_BUCKETS * rank // world.size for rank in range(world.size + 1)]
    return tuple(zip(world.ranks, ends[:-1], ends[1:], strict=True))


def _row_owners(
    table: TableConfig, layouts: Mapping[str, TableLayout]
) -> tuple[tuple[int, int, int], ...]:
    """Return (lowest rank that stores the part, first bucket, last bucket + 1) for each row part of
    a table.
    """
    parts: dict[int, tuple[int, int, int]] = {}
    for rank, first, last in sorted(_stored_parts(table, layouts)):
        parts.setdefault(first, (rank, first, last))
    return tuple(parts[first] for first in sorted(parts))


def _stored_parts(
    table: TableConfig, layouts: Mapping[str, TableLayout]
) -> set[tuple[int, int, int]]:
    """Return (rank, first bucket, last bucket + 1) for each shard of a table."""

    def bucket_at(row: int) -> int:
        return -(-row * NUM_BUCKETS // table.num_rows)

    return {
        (shard.rank, bucket_at(shard.row_start), bucket_at(shard.row_stop))
        for shard in shards_of(table, layouts[table.name].layout)
    }


def _bounds(num_rows: int) -> frozenset[int]:
    return frozenset(first_row_of(bucket, num_rows) for bucket in range(NUM_BUCKETS + 1))


def _bucket_sizes(num_rows: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of row parts with about the same number of buckets each."""
    ends = [0, *accumulate(balanced_sizes(NUM_BUCKETS, parts))]
    rows = [first_row_of(end, num_rows) for end in ends]
    return tuple(stop - start for start, stop in pairwise(rows))

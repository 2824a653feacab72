"""Defines stacks. A stack consists of tables that share a store on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from sbpflow.embedding.plan.tables import Shard, TableConfig, shard_on
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.sbp.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLookup:
    """One use of a table: the lookup of the ids of one feature, which produces one vector per
    sample.

    ``feature`` is the index of the feature in the plan. The ids are in ``columns`` of the batch's
    id matrix or, in ragged stacks, in list ``place`` of every sample.
    """

    table: TableConfig
    feature: int
    columns: tuple[int, ...] = ()
    place: int | None = None
    hotness: int = 1


@dataclass(frozen=True, kw_only=True)
class TableBatch:
    """A stack: tables of equal dim that every rank stores as one block of equally wide rows.

    ``optimizer`` updates all tables of the stack. The ids of ``ragged`` stacks are lists; those of
    other stacks are columns of a matrix.
    """

    tables: tuple[TableConfig, ...]
    layouts: tuple[Layout, ...]
    uses: tuple[FeatureLookup, ...]
    optimizer: SparseOptimizer
    ragged: bool = False

    @property
    def dim(self) -> int:
        return self.tables[0].dim

    @property
    def grows(self) -> bool:
        """Return True if the tables assign their rows to keys. Either all tables of a stack grow,
        or none of them does.
        """
        return self.tables[0].growth is not None

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """Return the non-empty shards of ``rank``, in storage order."""
        return self.shards_by_rank.get(rank, ())

    @cached_property
    def shards_by_rank(self) -> Mapping[int, tuple[Shard, ...]]:
        """Return the ``shards`` of all ``holders``, in ascending order of ranks.

        The result is cached, because planning a stack needs the shards of all ranks many times.
        """
        by_rank: dict[int, list[Shard]] = {}
        for table, layout in zip(self.tables, self.layouts, strict=True):
            for rank in layout.placement.ranks:
                shards = by_rank.setdefault(rank, [])
                base = shards[-1].base + shards[-1].num_rows if shards else 0
                shard = shard_on(table, layout, rank, base)
                if shard is not None:
                    shards.append(shard)
        return {rank: tuple(by_rank[rank]) for rank in sorted(by_rank) if by_rank[rank]}

    @cached_property
    def ranks_by_size(self) -> Mapping[str, Mapping[tuple[int, int], list[int]]]:
        """For each table, return the ranks that store part of it, by the numbers of rows and
        columns in that part. Even a large world has few distinct sizes.
        """
        found: dict[str, dict[tuple[int, int], list[int]]] = {}
        for rank, shards in self.shards_by_rank.items():
            for shard in shards:
                by_size = found.setdefault(shard.table.name, {})
                by_size.setdefault((shard.num_rows, shard.width), []).append(rank)
        return found

    def num_rows(self, rank: int) -> int:
        return sum(shard.num_rows for shard in self.shards(rank))

    def width(self, rank: int) -> int:
        """Return the number of columns of a rank's store, even if the store has no rows, or 0 if
        the rank is not in the layouts.
        """
        for table, layout in zip(self.tables, self.layouts, strict=True):
            slices = layout.part_slices(table.shape, rank)
            if slices is not None:
                return slices[1].stop - slices[1].start
        return 0

    def uses_on(self, rank: int) -> tuple[FeatureLookup, ...]:
        """Return the uses of tables whose layouts include ``rank``, even if the rank stores no
        rows."""
        placed = {
            table.name
            for table, layout in zip(self.tables, self.layouts, strict=True)
            if rank in layout.placement
        }
        return tuple(use for use in self.uses if use.table.name in placed)

    def lookups(self) -> int:
        """Return the maximum number of ids of one sample, summed over all uses."""
        return sum(use.hotness for use in self.uses)

    def holders(self) -> tuple[int, ...]:
        """Return the ranks that store rows, ascending."""
        return tuple(self.shards_by_rank)

    @cached_property
    def is_column_split(self) -> bool:
        """Return True if the columns of a row are distributed over several ranks."""
        return any(shards[0].width < self.dim for shards in self.shards_by_rank.values())

"""Tables that share a storage on every rank, and the shard of each that a rank holds there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbpflow.embedding.plan.numbering import Numbering
from sbpflow.embedding.plan.tables import Shard, TableConfig, shard_on
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.sbp.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLookup:
    """A table looked up by a feature: one vector of every sample.

    ``feature`` counts the features of the plan. One-hot and multi-hot ids lie in ``columns`` of the
    batch's matrix of ids; ragged ones are the ``place``-th list of every sample.
    """

    table: TableConfig
    feature: int
    columns: tuple[int, ...] = ()
    place: int | None = None
    hotness: int = 1

    @property
    def key(self) -> tuple[str, int]:
        return (self.table.name, self.feature)


@dataclass(frozen=True, kw_only=True)
class TableBatch:
    """Tables of equal dim whose parts every rank stores as one block of rows, all equally wide.

    ``optimizer`` updates every one of them. ``ragged``: its ids come as lists, weighted or of any
    length; else as columns of a matrix. A table with rows by key has a stack of its own.
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
    def numbering(self) -> Numbering:
        """How ids name the rows of its tables."""
        return self.tables[0].numbering

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """What this rank holds, in storage order; tables it holds nothing of are left out."""
        return self.shards_by_rank.get(rank, ())

    @cached_property
    def shards_by_rank(self) -> Mapping[int, tuple[Shard, ...]]:
        """``shards`` of each of ``holders``, in their order; kept, for all that is planned of a
        stack asks for those of every rank.
        """
        held: dict[int, list[Shard]] = {}
        for table, layout in zip(self.tables, self.layouts, strict=True):
            for rank in layout.placement.ranks:
                mine = held.setdefault(rank, [])
                base = mine[-1].base + mine[-1].num_rows if mine else 0
                shard = shard_on(table, layout, rank, base)
                if shard is not None:
                    mine.append(shard)
        return {rank: tuple(held[rank]) for rank in sorted(held) if held[rank]}

    def held(self, table: TableConfig) -> Mapping[int, tuple[int, int]]:
        """Rows and columns of a table by rank, of those that store some of it."""
        return self._held.get(table.name, {})

    @cached_property
    def _held(self) -> dict[str, dict[int, tuple[int, int]]]:
        held: dict[str, dict[int, tuple[int, int]]] = {}
        for rank, shards in self.shards_by_rank.items():
            for shard in shards:
                held.setdefault(shard.table.name, {})[rank] = (shard.num_rows, shard.width)
        return held

    def num_rows(self, rank: int) -> int:
        return sum(shard.num_rows for shard in self.shards(rank))

    def width(self, rank: int) -> int:
        """Columns of the storage, which may have no rows; 0 on a rank outside the layouts."""
        for table, layout in zip(self.tables, self.layouts, strict=True):
            slices = layout.part_slices(table.shape, rank)
            if slices is not None:
                return slices[1].stop - slices[1].start
        return 0

    def columns_by_rank(self) -> list[slice]:
        """The columns that each rank stores, of a stack that all ranks store some of."""
        table, layout = self.tables[0], self.layouts[0]
        shards = (shard_on(table, layout, rank) for rank in sorted(layout.placement.ranks))
        return [slice(one.col_start, one.col_stop) for one in shards if one is not None]

    def uses_on(self, rank: int) -> tuple[FeatureLookup, ...]:
        """Uses of the tables that are placed on ``rank``, be it with no row."""
        placed = {
            table.name
            for table, layout in zip(self.tables, self.layouts, strict=True)
            if rank in layout.placement
        }
        return tuple(use for use in self.uses if use.table.name in placed)

    def lookups(self) -> int:
        """Most ids of one sample, over all uses."""
        return sum(use.hotness for use in self.uses)

    def holders(self) -> tuple[int, ...]:
        """Ranks that store some of it, ascending."""
        return tuple(self.shards_by_rank)

    @cached_property
    def is_column_split(self) -> bool:
        """Whether a logical row is spread over several ranks."""
        return any(shards[0].width < self.dim for shards in self.shards_by_rank.values())


def columns_of(uses: Sequence[FeatureLookup]) -> list[int]:
    """Columns of the matrix of ids, use by use."""
    return [column for use in uses for column in use.columns]

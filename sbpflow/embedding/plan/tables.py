"""Defines features, embedding tables, their layouts, and the shards of a layout.

Only this module derives the shards of a table from its layout. (EMBark describes shards as a list
of (table, row shard, column shard) -> rank.) All types are plain values.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from sbpflow.embedding.plan.growth import Growth
from sbpflow.embedding.plan.row_storage import RowStorage
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.kernels import KernelRequest
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout

HALF_DTYPES = (torch.bfloat16, torch.float16)  # half-precision dtypes of rows and sent vectors
Combine = Literal["concat", "sum"]
Pooling = Literal["sum", "mean"]
ANY_ID = 2**63 - 1  # Value of ``num_ids`` if every 64-bit id is valid.
# The default distribution is U(-0.05, 0.05), as in OneFlow-Benchmark's wdl_train_eval.py at
# de4698a7.
INITIAL_RANGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureConfig:
    """A categorical feature with ``hotness`` ids per sample, or 0 to ``hotness`` ids if ``ragged``.

    If ``weighted``, each id has a weight that multiplies its row. If several tables use the
    feature, each id must be valid in all of them; the policies ``clamp`` and ``hash``, which
    replace ids, then require tables with equal ``num_ids``.
    """

    name: str
    hotness: int = 1
    ragged: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.hotness < 1:
            raise ConfigError(f"feature {self.name}: hotness must be 1 or more, got {self.hotness}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """A logical table [num_rows, dim] that is looked up with the ids of each feature in
    ``features``.

    ``pooling`` (sum or mean) combines a sample's rows for a feature into one vector. ``optimizer``
    and ``kernel`` override the settings of the plan and the run. Initial values are distributed as
    U(-initial_range, initial_range). With ``growth``, ids are arbitrary 64-bit keys, and the
    ``num_rows`` rows are assigned to keys during training. ``storage`` is set if only some rows are
    on the device.
    """

    name: str
    features: tuple[str, ...]
    num_rows: int
    dim: int
    pooling: Pooling = "sum"
    optimizer: SparseOptimizer | None = None
    initial_range: float = INITIAL_RANGE
    kernel: KernelRequest | None = None
    growth: Growth | None = None
    storage: RowStorage | None = None

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1:
            raise ConfigError(
                f"table {self.name}: num_rows and dim must be 1 or more, got {self.num_rows} and "
                f"{self.dim}"
            )
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(
                f"table {self.name}: pooling must be sum or mean, got {self.pooling!r}"
            )
        if not 0.0 <= self.initial_range < math.inf:
            raise ConfigError(
                f"table {self.name}: initial_range must be a finite number of 0 or more (for "
                f"example, 0.05), got {self.initial_range}"
            )
        if self.growth is not None and self.growth.evict.max_rows != self.num_rows:
            raise ConfigError(
                f"table {self.name}: num_rows must equal evict.max_rows, "
                f"{self.growth.evict.max_rows}, got {self.num_rows}"
            )
        if not self.features or len(set(self.features)) != len(self.features):
            raise ConfigError(
                f"table {self.name}: features must contain at least one feature, and each only "
                f"once, got {list(self.features)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return (self.num_rows, self.dim)

    @property
    def num_ids(self) -> int:
        """Return the limit below which ids are valid, or ``ANY_ID`` if all 64-bit ids are valid."""
        return self.num_rows if self.growth is None else ANY_ID

    @property
    def averages(self) -> bool:
        """Return True if a bag is the mean of its rows rather than their sum."""
        return self.pooling == "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """The ``layout`` of a table [num_rows, dim], and the exchange for its ids and vectors.

    ``comm_dtype`` is the dtype of sent vectors and gradients; ``None`` means the compute dtype.
    ``key`` is the configuration key that set the layout, or "".
    """

    layout: Layout
    exchange: str
    comm_dtype: torch.dtype | None = None
    key: str = ""

    def __str__(self) -> str:
        return f"{self.layout} {self.exchange}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """An output of a collection, with layout S(0) over the batch.

    An output combines one vector for each feature of each table, in the order of ``tables`` and of
    their features. ``concat`` gives [batch, sum of dims]; ``sum`` adds the vectors, which must have
    equal dims, and gives [batch, dim].
    """

    name: str
    tables: tuple[TableConfig, ...]
    combine: Combine = "concat"

    def __post_init__(self) -> None:
        if not self.tables:
            raise ConfigError(f"output {self.name}: tables must contain at least one table")
        if self.combine not in ("concat", "sum"):
            raise ConfigError(
                f"output {self.name}: combine must be concat or sum, got {self.combine!r}"
            )
        dims = {table.dim for table in self.tables}
        if self.combine == "sum" and len(dims) > 1:
            raise ConfigError(
                f"output {self.name}: combine: sum needs tables of equal dim, got {sorted(dims)}; "
                "use concat"
            )

    @property
    def sums(self) -> bool:
        """Return True if vectors are added rather than concatenated."""
        return self.combine == "sum"

    @property
    def width(self) -> int:
        if self.sums:
            return self.tables[0].dim
        return sum(table.dim * len(table.features) for table in self.tables)

    def starts(self) -> dict[tuple[str, str], int]:
        """Return the first column of the vector of each (table, feature), before any sum."""
        starts: dict[tuple[str, str], int] = {}
        column = 0
        for table in self.tables:
            for feature in table.features:
                starts[table.name, feature] = column
                column += table.dim
        return starts


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A rectangle [row_start:row_stop, col_start:col_stop] of a table or another tensor.

    All dims after the first are flattened to columns. A 1-d tensor has one column.
    """

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def width(self) -> int:
        return self.col_stop - self.col_start

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.width

    def common(self, other: "Place") -> "Place | None":
        """Return the intersection, or ``None`` if it is empty."""
        both = Place(
            max(self.row_start, other.row_start),
            min(self.row_stop, other.row_stop),
            max(self.col_start, other.col_start),
            min(self.col_stop, other.col_stop),
        )
        return both if both.num_rows > 0 and both.width > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Place):
    """The part of a table that one rank stores.

    ``base`` is the first row of the shard in the rank's store, which can contain shards of several
    tables.
    """

    table: TableConfig
    rank: int
    base: int = 0

    @property
    def shift(self) -> int:
        """Return a row's number in the store minus its number in the table."""
        return self.base - self.row_start


def shard_on(table: TableConfig, layout: Layout, rank: int, base: int = 0) -> Shard | None:
    """Return the part of the table on ``rank``, or ``None`` if it is empty."""
    slices = layout.part_slices(table.shape, rank)
    if slices is None:
        return None
    rows, cols = slices
    shard = Shard(rows.start, rows.stop, cols.start, cols.stop, table=table, rank=rank, base=base)
    return shard if shard.num_elements else None


def shards_of(table: TableConfig, layout: Layout) -> tuple[Shard, ...]:
    """Return all non-empty shards of the table in placement order."""
    shards = (shard_on(table, layout, rank) for rank in layout.placement.ranks)
    return tuple(shard for shard in shards if shard is not None)

"""What features, embedding tables and their layouts are, and which shards a layout compiles to.

Values only. The shard list (EMBark's (table, row shard, column shard) -> rank) is derived from the
layout here and nowhere else.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sbpflow.embedding.plan.numbering import NUMBERINGS, Numbering
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial

HALF_DTYPES = (torch.bfloat16, torch.float16)  # what rows and vectors may be narrowed to
Combine = Literal["concat", "sum"]
Pooling = Literal["sum", "mean"]
KernelRequest = Literal["auto", "fbgemm", "torch", "numba", "triton"]
INITIAL_RANGE = 0.05  # U(-0.05, 0.05), as OneFlow-Benchmark's wdl_train_eval.py at de4698a7


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureConfig:
    """A categorical feature: a sample has ``hotness`` ids of it, or with ``ragged`` 0 to that many.

    ``weighted`` ids come with a weight each, which multiplies the id's row. Where several tables
    look the feature up, each of its ids must be a row of every one; the policies that replace ids
    (clamp, hash) take tables of equal ``num_rows`` only.
    """

    name: str
    hotness: int = 1
    ragged: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.hotness < 1:
            raise ConfigError(f"feature {self.name}: hotness {self.hotness}; use 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """One logical table: ``num_rows`` x ``dim``, looked up by the ids of each of ``features``.

    ``pooling`` makes one vector of a sample's rows: their sum, or that by the number of ids.
    ``optimizer`` updates it in place of the plan's, and ``kernel`` is asked for in place of the
    run's. It starts as U(-initial_range, initial_range). ``by_key``: ids are any numbers of 64
    bits, each of which gets one of the ``num_rows`` rows when it is first trained.
    """

    name: str
    features: tuple[str, ...]
    num_rows: int
    dim: int
    pooling: Pooling = "sum"
    optimizer: SparseOptimizer | None = None
    initial_range: float = INITIAL_RANGE
    kernel: KernelRequest | None = None
    by_key: bool = False

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1:
            raise ConfigError(
                f"table {self.name}: {self.num_rows} rows x {self.dim} columns; both must be >= 1"
            )
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"table {self.name}: pooling {self.pooling!r}; use sum or mean")
        if not 0.0 <= self.initial_range < math.inf:
            raise ConfigError(
                f"table {self.name}: initial_range {self.initial_range}; use a finite number of 0 "
                "or more, for example 0.05"
            )
        if not self.features or len(set(self.features)) != len(self.features):
            raise ConfigError(
                f"table {self.name}: features {list(self.features)}; name one or more, each once"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return (self.num_rows, self.dim)

    @property
    def numbering(self) -> Numbering:
        """How ids name its rows."""
        return NUMBERINGS[self.by_key]

    @property
    def num_ids(self) -> int:
        """As ``Numbering.num_ids``."""
        return self.numbering.num_ids(self.num_rows)

    @property
    def averages(self) -> bool:
        """Whether a bag is the mean of its rows, not their sum."""
        return {"sum": False, "mean": True}[self.pooling]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """``layout`` of the [num_rows, dim] table and how its ids and vectors travel.

    ``comm_dtype`` is what vectors and gradients travel as; ``None``: the dtype they are computed
    in.
    ``key`` is the configuration key that decided, "" if none did.
    """

    layout: Layout
    exchange: str
    comm_dtype: torch.dtype | None = None
    key: str = ""

    def __str__(self) -> str:
        return f"{self.layout} {self.exchange}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """One output of a collection over the batch, laid out S(0).

    It has a vector per table and feature, in that order: ``concat`` gives [batch, sum of dims],
    ``sum`` adds them ([batch, dim]; all dims equal).
    """

    name: str
    tables: tuple[TableConfig, ...]
    combine: Combine = "concat"

    def __post_init__(self) -> None:
        if not self.tables:
            raise ConfigError(f"output {self.name}: has no tables; name one or more")
        if self.combine not in ("concat", "sum"):
            raise ConfigError(f"output {self.name}: combine {self.combine!r}; use concat or sum")
        dims = {table.dim for table in self.tables}
        if self.combine == "sum" and len(dims) > 1:
            raise ConfigError(f"output {self.name}: a sum needs equal dims, not {sorted(dims)}")

    @property
    def sums(self) -> bool:
        """Whether the vectors are added up, not put side by side."""
        return {"concat": False, "sum": True}[self.combine]

    @property
    def width(self) -> int:
        if self.sums:
            return self.tables[0].dim
        return sum(table.dim * len(table.features) for table in self.tables)

    def starts(self) -> dict[tuple[str, str], int]:
        """(table, feature) -> first column of its vector before a sum over them."""
        starts: dict[tuple[str, str], int] = {}
        column = 0
        for table in self.tables:
            for feature in table.features:
                starts[table.name, feature] = column
                column += table.dim
        return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The rectangle table[row_start:row_stop, col_start:col_stop] that one rank stores.

    ``base`` is its first row in the rank's storage, which may hold shards of several tables.
    """

    table: TableConfig
    rank: int
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    base: int = 0

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def width(self) -> int:
        return self.col_stop - self.col_start

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.width

    @property
    def span(self) -> tuple[int, int]:
        """First and last address of its rows."""
        return self.table.numbering.span(self.row_start, self.row_stop, self.table.num_rows)

    @property
    def shift(self) -> int:
        """From addresses to rows of the rank's storage, or of a keyed table to addresses."""
        return self.table.numbering.shift(self.base, self.row_start)


def shard_on(table: TableConfig, layout: Layout, rank: int, base: int = 0) -> Shard | None:
    """What ``rank`` stores of the table; ``None`` if that is nothing."""
    slices = layout.part_slices(table.shape, rank)
    if slices is None:
        return None
    rows, cols = slices
    shard = Shard(
        table=table,
        rank=rank,
        row_start=rows.start,
        row_stop=rows.stop,
        col_start=cols.start,
        col_stop=cols.stop,
        base=base,
    )
    return shard if shard.num_elements else None


def shards_of(table: TableConfig, layout: Layout) -> tuple[Shard, ...]:
    """Every rank's rectangle of the table, empty ones left out, in placement order."""
    found = (shard_on(table, layout, rank) for rank in layout.placement.ranks)
    return tuple(shard for shard in found if shard is not None)


def check_cover(table: TableConfig, layout: Layout, shards: tuple[Shard, ...]) -> None:
    """Raise ConfigError unless the shards tile the table: no hole, no overlap but replicas of B."""
    replicas = 1
    for axis, sbp in enumerate(layout.nd_sbp):
        if isinstance(sbp, Broadcast):
            replicas *= layout.placement.shape[axis]
        if isinstance(sbp, Partial):
            raise ConfigError(f"table {table.name}: {layout} stores terms of a sum; use S or B")
    stored = sum(shard.num_elements for shard in shards)
    if stored != replicas * table.num_rows * table.dim:
        raise ConfigError(
            f"table {table.name}: shards of {layout} hold {stored} elements, "
            f"the table has {table.num_rows} x {table.dim} (x {replicas} replicas)"
        )
    distinct = {(s.row_start, s.row_stop, s.col_start, s.col_stop): s for s in shards}
    both = _overlap([shard for shard in distinct.values() if shard.num_elements])
    if both is not None:
        raise ConfigError(f"table {table.name}: shards {both[0]} and {both[1]} overlap")


def check_by_key(table: TableConfig, layout: Layout, world: Placement) -> None:
    """Raise ConfigError for a table with rows by key that is not split by rows, or not on a CPU."""
    if not table.by_key:
        return
    shards, ranks, why = shards_of(table, layout), layout.placement.ranks, ""
    if world.device_type != "cpu":
        why = f"is on {world.device_type}, where buffers need an address of no row; use device cpu"
    elif any(shard.width < table.dim for shard in shards) or (
        layout.placement.size > 1 and isinstance(layout.nd_sbp[0], Broadcast)
    ):
        why = f"is laid out {layout}, where several ranks would keep the map of a key; use S(0)"
    elif list(ranks) != sorted(ranks):
        why = f"is laid out {layout}; name its ranks in ascending order"
    if why:
        raise ConfigError(f"table {table.name}: has its rows by key and {why}")


def _overlap(shards: Sequence[Shard]) -> tuple[Shard, Shard] | None:
    """Two of these that share an element, if any do; none is empty.

    A line sweeps the rows and keeps, in order of columns, the shards that it crosses: the next one
    can overlap its neighbours there only. Comparing all pairs would take seconds for 1024 ranks.
    """
    stops = [(shard.row_stop, False, number) for number, shard in enumerate(shards)]
    starts = [(shard.row_start, True, number) for number, shard in enumerate(shards)]
    crossed: list[tuple[int, int]] = []  # (first column, position in shards)
    for _, begins, number in sorted(stops + starts):
        one = shards[number]
        at = bisect_left(crossed, (one.col_start, number))
        if not begins:
            del crossed[at]
            continue
        for _, neighbour in crossed[max(0, at - 1) : at + 1]:
            other = shards[neighbour]
            if one.col_start < other.col_stop and other.col_start < one.col_stop:
                return other, one
        crossed.insert(at, (one.col_start, number))
    return None

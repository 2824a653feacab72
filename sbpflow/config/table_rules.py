"""The ``parallel`` group: which layout each embedding table gets.

A scheme is a list of patterns that the model gives; ``parallel.tables`` adds patterns after them,
and the last one that matches a table's name decides. ``table_layouts`` makes one ``TableLayout``
per table of it, which is all that the rest of sbpflow sees: nothing downstream knows schemes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch

from sbpflow.config.parse import Aliases, Example, PathOr, brief
from sbpflow.embedding.plan.exchanges import exchange_names
from sbpflow.embedding.plan.tables import KernelRequest, TableLayout
from sbpflow.errors import ConfigError, SbpError
from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.fields.ranges import Range
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, NdSbp, Split, format_nd_sbp, parse_nd_sbp

Scheme = Literal["dp", "1", "2", "3", "auto"]
SCHEME_ALIASES: Mapping[str, Scheme] = {"column": "1", "row": "2", "row_dedup": "3"}
Dtype = Literal["float32", "float64"]
RowDtype = Literal["float32", "float64", "float16", "bfloat16"]
CommDtype = Literal["float32", "float64", "float16", "bfloat16"]
Shape = tuple[int, int]
Size = Annotated[int, Range(low=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRule:
    """Layout of the tables that a pattern matches."""

    sbp: Annotated[
        str, Example("S(0)"), Key("execution", "B, S(0), S(1), or (S(0), S(1)) on a grid of ranks.")
    ]
    ranks: Annotated[
        tuple[int | tuple[int, ...], ...] | None,
        Example((0, 1)),
        Key("execution", "Ranks that hold the table, nested for a grid; all if not given."),
    ] = None
    sizes: Annotated[
        tuple[Size | tuple[Size, ...], ...] | None,
        Example((60, 40)),
        Key("execution", "Rows or columns per rank, 0 for none; balanced if not given."),
    ] = None
    exchange: Annotated[
        str | None,
        Example("unique"),
        Key("execution", "How ids and vectors travel; the first that fits the layout by default."),
    ] = None
    comm_dtype: Annotated[
        CommDtype | None,
        Example("bfloat16"),
        Key("results", "Number format of its vectors in transfers."),
    ] = None

    def check(self, key: str) -> None:
        """What needs neither a table nor the world size."""
        sbps = self.parsed(key)
        if self.exchange not in (None, *exchange_names()):
            raise ConfigError(
                f"{key}.exchange: {brief(self.exchange)}; use {', '.join(exchange_names())}"
            )
        placement = self.placement(key, "cpu", 1)
        if self.sizes is None:
            return
        if not isinstance(sbps[0], Split):
            raise ConfigError(f"{key}.sizes: {sbps[0]} has no parts; remove sizes, or use S(0)")
        if len(sbps) == 1 and any(isinstance(size, tuple) for size in self.sizes):
            raise ConfigError(f"{key}.sizes: {self.sbp} has one axis; for example sizes: [60, 40]")
        lists = [size for size in self.sizes if isinstance(size, tuple)]
        if len(sbps) == 2 and (len(lists) != 2 or len(self.sizes) != 2):
            raise ConfigError(
                f"{key}.sizes: {self.sbp} takes row sizes and column sizes; for example "
                "sizes: [[60, 40], [8, 8]]"
            )
        for axis, num_ranks in enumerate(placement.shape):
            sizes = self.axis_sizes(axis) or ()
            if self.ranks is not None and len(sizes) != num_ranks:
                raise ConfigError(
                    f"{key}.sizes: {len(sizes)} sizes {list(sizes)} for {num_ranks} ranks along "
                    f"axis {axis} of {placement}; give one size per rank"
                )

    def parsed(self, key: str) -> NdSbp:
        """B, S(0) or S(1) on a list of ranks, (S(0), S(1)) on a grid of them."""
        accepted = "a table takes B, S(0) or S(1), or (S(0), S(1)) on a grid of ranks"
        try:
            nd_sbp = parse_nd_sbp(self.sbp)
        except SbpError as error:
            raise ConfigError(
                f"{key}.sbp: {brief(self.sbp)} is not a layout; {accepted}"
            ) from error
        if nd_sbp not in ((Broadcast(),), (Split(0),), (Split(1),), (Split(0), Split(1))):
            raise ConfigError(f"{key}.sbp: {self.sbp[:100]} is no layout of a table; {accepted}")
        return nd_sbp

    def placement(self, key: str, device_type: str, world_size: int) -> Placement:
        """The ranks, all of them by default; as many axes as the sbp has."""
        axes = len(self.parsed(key))
        ranks = self.ranks
        if ranks is None and axes == 1:
            return Placement.line(device_type, world_size)
        example = "[0, 1]" if axes == 1 else "[[0, 1], [2, 3]]"
        if ranks is None:
            raise ConfigError(f"{key}.ranks: not given; {self.sbp} needs a grid such as {example}")
        try:
            placement = Placement.of(device_type, ranks)
        except SbpError as error:
            raise ConfigError(
                f"{key}.ranks: {list(ranks)}: {error}; for example ranks: {example}"
            ) from error
        if placement.ndim != axes:
            raise ConfigError(
                f"{key}.ranks: {placement} has {placement.ndim} axes, {self.sbp} has {axes}; "
                f"for example ranks: {example}"
            )
        return placement

    def axis_sizes(self, axis: int) -> tuple[int, ...] | None:
        """Explicit sizes of the parts along one axis."""
        if self.sizes is None:
            return None
        sizes = self.sizes[axis] if len(parse_nd_sbp(self.sbp)) > 1 else self.sizes
        listed = sizes if isinstance(sizes, tuple) else (sizes,)
        return tuple(size for size in listed if isinstance(size, int))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Where tables and dense parameters live, number formats, and how steps execute.

    A scheme or a plan says where all tables live; ``tables`` changes that by pattern.
    """

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Key("execution", "auto is cuda with NCCL where there is a GPU, else cpu with gloo."),
    ] = "auto"
    scheme: Annotated[
        Scheme | None,
        Aliases(SCHEME_ALIASES),
        Example("1"),
        Key("execution", "Layout of all tables; auto takes the cheapest of several plans."),
    ] = None
    plan: Annotated[
        str | None,
        PathOr(("auto",)),
        Example("auto"),
        Key(
            "execution",
            "In place of a scheme: a file of table rules, or auto to run the planner at the start.",
        ),
    ] = None
    link_gb_per_s: Annotated[
        float | None,
        Range(above=0),
        Example(0.125),
        Key(
            "execution",
            "What a rank can send in GB/s, for scheme: auto; that of one machine if not given. 1 "
            "Gbit/s is 0.125.",
        ),
    ] = None
    topology: Annotated[
        Path | None,
        Example("hosts.yaml"),
        Key(
            "execution",
            "File that describes hosts and links, in place of what ranks find when they start; "
            "link_gb_per_s replaces its link between hosts.",
        ),
    ] = None
    tables: Annotated[
        Mapping[str, TableRule],
        Example({"*.C1": {"sbp": "S(0)"}}),
        Key("execution", "Layouts by pattern of table names; the last match wins."),
    ] = field(default_factory=dict[str, TableRule])
    dense: Annotated[
        Mapping[str, str],
        Example({"*.weight": "S(0)"}),
        Key(
            "execution",
            "Layouts over all ranks by pattern of parameter names; B if none matches. A weight is "
            "[outputs, inputs]: S(0) with its bias S(0) is column-parallel, S(1) row-parallel.",
        ),
    ] = field(default_factory=dict[str, str])
    kernel: Annotated[
        KernelRequest,
        Key("execution", "What looks up and updates rows; auto measures and takes the fastest."),
    ] = "auto"
    kernels: Annotated[
        Mapping[str, KernelRequest],
        Example({"*.C1": "torch"}),
        Key("execution", "Kernels by pattern of table names, in place of parallel.kernel."),
    ] = field(default_factory=dict[str, KernelRequest])
    dtype: Annotated[Dtype, Key("results", "Number format of the arithmetic.")] = "float32"
    tf32: Annotated[
        bool, Key("execution", "Products of float32 in TF32, whose factors have 10 bits; on CUDA.")
    ] = False
    table_dtype: Annotated[
        RowDtype | None,
        Example("bfloat16"),
        Key("results", "Number format of stored rows; that of dtype if not given."),
    ] = None
    comm_dtype: Annotated[
        CommDtype | None,
        Example("bfloat16"),
        Key("results", "Number format of vectors in transfers; that of dtype if not given."),
    ] = None
    overlap: Annotated[
        bool,
        Key("execution", "Compute during transfers; false waits for each and sends no ids ahead."),
    ] = True
    cuda_graph: Annotated[
        bool,
        Key("execution", "Replay a step as one CUDA graph; on several ranks, its dense part."),
    ] = False
    row_buffer_fraction: Annotated[
        float | None,
        Range(above=0, high=1),
        Example(0.25),
        Key(
            "execution",
            "On CUDA, rows of the exchanges unique and local travel in buffers of this share of "
            "the most rows there can be; the host then needs no counts. A batch with more rows is "
            "sent again.",
        ),
    ] = None
    timeout_s: Annotated[
        float,
        Range(above=0, high=1e6),
        Key("execution", "Seconds after which a rank that waits gives up."),
    ] = 300.0
    checked: Annotated[
        bool,
        Key("execution", "Before each transfer, compare what all ranks are about to do; slow."),
    ] = False

    def __post_init__(self) -> None:
        for pattern, rule in self.tables.items():
            rule.check(f"parallel.tables.{pattern}")
        if self.plan is not None and self.scheme is not None:
            raise ConfigError(
                f"parallel.plan: {self.plan} beside parallel.scheme: {self.scheme}; each says "
                "where all tables live: leave one out, for example parallel.scheme=null"
            )
        if self.cuda_graph and self.checked:
            raise ConfigError(
                "parallel.cuda_graph: true beside parallel.checked: true, which compares the ranks "
                "at every transfer, on the host; leave one out, for example parallel.checked=false"
            )
        named = {"table_dtype": self.table_dtype, "comm_dtype": self.comm_dtype}
        named |= {f"tables.{p}.comm_dtype": r.comm_dtype for p, r in self.tables.items()}
        for key, value in named.items():
            if value in ("float32", "float64") and value != self.dtype:
                raise ConfigError(
                    f"parallel.{key}: {value} beside parallel.dtype: {self.dtype}; use "
                    f"{self.dtype}, float16 or bfloat16"
                )


DTYPES: dict[CommDtype, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


# What each scheme means for a model: rules by pattern of table names, the last match deciding.
Schemes = Mapping[Scheme, Mapping[str, TableRule]]


def rule_of(given: TableLayout) -> TableRule:
    """The rule that gives a table this layout."""
    placement, axes = given.layout.placement, given.layout.nd_sbp
    sizes = [one.sizes for one in axes if isinstance(one, Split) and one.sizes is not None]
    plain = tuple(Split(one.dim) if isinstance(one, Split) else one for one in axes)
    dtypes: dict[torch.dtype, CommDtype] = {dtype: name for name, dtype in DTYPES.items()}
    return TableRule(
        sbp=format_nd_sbp(plain),
        ranks=tuple(tuple(one) if isinstance(one, list) else one for one in placement.nested()),
        sizes=None if not sizes else sizes[0] if len(axes) == 1 else tuple(sizes),
        exchange=given.exchange,
        comm_dtype=None if given.comm_dtype is None else dtypes[given.comm_dtype],
    )

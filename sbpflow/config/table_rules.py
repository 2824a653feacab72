"""Defines the ``parallel`` group, which determines the layout of each embedding table.

A scheme is a list of patterns with layouts, which the model defines. ``parallel.tables`` appends
patterns to this list; the last pattern that matches a table's name wins. ``table_layouts`` turns
the patterns into one ``TableLayout`` per table. The rest of sbpflow uses only these layouts, not
schemes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch

from sbpflow.config.parse import Aliases, PathOr, brief
from sbpflow.config.storage_rules import server_rule
from sbpflow.embedding.plan.exchanges import exchange_names
from sbpflow.embedding.plan.row_storage import StorageRule
from sbpflow.embedding.plan.tables import TableLayout
from sbpflow.embedding.rules.kernels import KernelRequest
from sbpflow.errors import ConfigError, SbpError
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import Range
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, NdSbp, Split, format_nd_sbp, parse_nd_sbp

Scheme = Literal["dp", "1", "2", "3", "auto"]
SCHEME_ALIASES: Mapping[str, Scheme] = {"column": "1", "row": "2", "row_dedup": "3"}
Dtype = Literal["float32", "float64"]
RowDtype = Literal["float32", "float64", "float16", "bfloat16"]
CommDtype = Literal["float32", "float64", "float16", "bfloat16"]
Shape = tuple[int, int]
Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host
Size = Annotated[int, Range(low=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRule:
    """Sets the layout of the tables that match a pattern."""

    sbp: Annotated[
        str,
        Example("S(0)"),
        Key(
            "execution",
            "B, S(0), S(1), (S(0), S(1)) on a grid of ranks, or (S(0), S(0)) over hosts and"
            " their ranks.",
        ),
    ]
    ranks: Annotated[
        tuple[int | tuple[int, ...], ...] | None,
        Example((0, 1)),
        Key(
            "execution",
            "Ranks that store the table, as a nested list for a grid; all ranks by default."
            " The default grid of (S(0), S(0)) has a row per host.",
        ),
    ] = None
    sizes: Annotated[
        tuple[Size | tuple[Size, ...], ...] | None,
        Example((60, 40)),
        Key(
            "execution",
            "Number of rows or columns on each rank, which may be 0. By default, the table "
            "is split evenly.",
        ),
    ] = None
    exchange: Annotated[
        str | None,
        Example("unique"),
        Key(
            "execution",
            f"How IDs and vectors are exchanged: {', '.join(exchange_names())}. The default "
            "depends on the layout.",
        ),
    ] = None
    comm_dtype: Annotated[
        CommDtype | None,
        Example("bfloat16"),
        Key("results", "The same as parallel.comm_dtype, for these tables."),
    ] = None

    def check(self, key: str) -> None:
        """Check settings that do not depend on a table or the world size. Raises ConfigError."""
        sbps = self.parsed(key)
        if self.exchange not in (None, *exchange_names()):
            raise ConfigError(
                f"{key}.exchange must be one of {', '.join(exchange_names())}, got "
                f"{brief(self.exchange)}"
            )
        placement = self.placement(key, "cpu", 1)
        if self.sizes is None:
            return
        if self.splits_rows_twice:
            raise ConfigError(
                f"{key}.sizes: {self.sbp} splits rows evenly over hosts and ranks and takes no "
                "sizes; remove sizes, or use sbp: S(0)"
            )
        if not isinstance(sbps[0], Split):
            raise ConfigError(
                f"{key}.sizes: {sbps[0]} does not split the table and takes no sizes; remove "
                "sizes, or use sbp: S(0)"
            )
        if len(sbps) == 1 and any(isinstance(size, tuple) for size in self.sizes):
            raise ConfigError(
                f"{key}.sizes: {self.sbp} has one axis and takes one list; use, for example, "
                "sizes: [60, 40]"
            )
        lists = [size for size in self.sizes if isinstance(size, tuple)]
        if len(sbps) == 2 and (len(lists) != 2 or len(self.sizes) != 2):
            raise ConfigError(
                f"{key}.sizes: {self.sbp} takes a list of row sizes and a list of column sizes; "
                "use, for example, sizes: [[60, 40], [8, 8]]"
            )
        for axis, num_ranks in enumerate(placement.shape):
            sizes = self.axis_sizes(axis) or ()
            if self.ranks is not None and len(sizes) != num_ranks:
                raise ConfigError(
                    f"{key}.sizes: {list(sizes)} has {len(sizes)} sizes, but axis {axis} of "
                    f"{placement} has {num_ranks} ranks; give one size per rank"
                )

    @property
    def splits_rows_twice(self) -> bool:
        """Return True for (S(0), S(0)), which splits rows over hosts and then over their ranks."""
        return parse_nd_sbp(self.sbp) == (Split(0), Split(0))

    def parsed(self, key: str) -> NdSbp:
        """Return one sbp per axis:

        B, S(0), or S(1) on a list of ranks; (S(0), S(1)) or (S(0), S(0)) on a grid.
        """
        accepted = "use B, S(0), or S(1); or, on a grid of ranks, (S(0), S(1)) or (S(0), S(0))"
        try:
            nd_sbp = parse_nd_sbp(self.sbp)
        except SbpError as error:
            raise ConfigError(
                f"{key}.sbp: {brief(self.sbp)} is not a layout; {accepted}"
            ) from error
        grids = ((Split(0), Split(1)), (Split(0), Split(0)))
        if nd_sbp not in ((Broadcast(),), (Split(0),), (Split(1),), *grids):
            raise ConfigError(f"{key}.sbp: {self.sbp[:100]} is not a table layout; {accepted}")
        return nd_sbp

    def placement(
        self, key: str, device_type: str, world_size: int, hosts: Hosts | None = None
    ) -> Placement:
        """Return the ranks (by default, all ranks), arranged in as many axes as the sbp has.

        ``hosts`` contains the ranks of each host; by default, all ranks share a host.
        """
        axes = len(self.parsed(key))
        ranks = self.ranks
        if ranks is None and self.splits_rows_twice:
            ranks = hosts or (tuple(range(world_size)),)
            if len(set(map(len, ranks))) > 1:
                raise ConfigError(
                    f"{key}.sbp: {self.sbp} needs the same number of ranks on every host, but the "
                    f"hosts have {', '.join(str(len(host)) for host in ranks)}; use sbp: S(0), or "
                    "start the same number of ranks on every host"
                )
        if ranks is None and axes == 1:
            return Placement.line(device_type, world_size)
        example = "[0, 1]" if axes == 1 else "[[0, 1], [2, 3]]"
        if ranks is None:
            raise ConfigError(
                f"{key}.ranks is not given, but {self.sbp} needs a grid such as {example}"
            )
        try:
            placement = Placement.of(device_type, ranks)
        except SbpError as error:
            raise ConfigError(
                f"{key}.ranks: {list(ranks)}: {error}; use, for example, ranks: {example}"
            ) from error
        if placement.ndim != axes:
            raise ConfigError(
                f"{key}.ranks: {placement} has {placement.ndim} axes, but {self.sbp} has {axes}; "
                f"use, for example, ranks: {example}"
            )
        return placement

    def axis_sizes(self, axis: int) -> tuple[int, ...] | None:
        """Return the explicit sizes of the parts along one axis, or None if sizes are not given."""
        if self.sizes is None:
            return None
        sizes = self.sizes[axis] if len(parse_nd_sbp(self.sbp)) > 1 else self.sizes
        listed = sizes if isinstance(sizes, tuple) else (sizes,)
        return tuple(size for size in listed if isinstance(size, int))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sets the layouts of tables and dense parameters, number formats, and the execution of steps.

    A scheme or a plan sets the layouts of all tables; ``tables`` overrides them by pattern.
    """

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Key(
            "execution",
            "Device type. auto is cuda (with NCCL) if there is a GPU, and cpu (with gloo) "
            "otherwise.",
        ),
    ] = "auto"
    scheme: Annotated[
        Scheme | None,
        Aliases(SCHEME_ALIASES),
        Example("1"),
        Key(
            "execution",
            "Layouts of all tables. auto picks the cheapest of several plans. Required unless "
            "parallel.plan is given or parallel.tables matches all tables; cannot be combined with "
            "parallel.plan.",
        ),
    ] = None
    plan: Annotated[
        str | None,
        PathOr(("auto",)),
        Example("auto"),
        Key(
            "execution",
            "File with table rules, used instead of a scheme. auto runs the planner at startup.",
        ),
    ] = None
    link_gb_per_s: Annotated[
        float | None,
        Range(above=0),
        Example(0.125),
        Key(
            "execution",
            "Speed, in GB/s, at which a rank sends to other machines (scheme: auto and early "
            "rows). 1 Gbit/s is 0.125. The default is the speed within a machine.",
        ),
    ] = None
    topology: Annotated[
        Path | None,
        Example("hosts.yaml"),
        Key(
            "execution",
            "File that describes hosts and links. By default, hosts are detected at "
            "startup. link_gb_per_s overrides the file's link between hosts.",
        ),
    ] = None
    tables: Annotated[
        Mapping[str, TableRule],
        Example({"*.C1": {"sbp": "S(0)"}}),
        Key("execution", "Layouts, by pattern of table names; the last match wins."),
    ] = field(default_factory=dict[str, TableRule])
    storage: Annotated[
        Mapping[str, StorageRule],
        Example({"*.C1": {"kind": "file", "cache": "10%"}}),
        Key(
            "execution",
            "Storage of tables that are larger than memory, by pattern of table names; the "
            "last match wins.",
        ),
    ] = field(default_factory=dict[str, StorageRule])
    dense: Annotated[
        Mapping[str, str],
        Example({"*.weight": "S(0)"}),
        Key(
            "execution",
            "Layouts of dense parameters over all ranks, by pattern of parameter names; the "
            "default is B. Weights are [outputs, inputs]: S(0) with bias S(0) is "
            "column-parallel, and S(1) is row-parallel.",
        ),
    ] = field(default_factory=dict[str, str])
    kernel: Annotated[
        KernelRequest,
        Key(
            "execution",
            "Kernel that looks up and updates rows. auto measures the kernels and picks the"
            " fastest.",
            device="",
        ),
    ] = "auto"
    kernels: Annotated[
        Mapping[str, KernelRequest],
        Example({"*.C1": "torch"}),
        Key(
            "execution",
            "Kernels, by pattern of table names, used instead of parallel.kernel.",
            device="",
        ),
    ] = field(default_factory=dict[str, KernelRequest])
    dtype: Annotated[Dtype, Key("results", "Number format of the arithmetic.")] = "float32"
    tf32: Annotated[
        bool,
        Key(
            "execution",
            "CUDA only: multiply float32 values in TF32, with a 10-bit mantissa.",
            device="which has no TF32",
        ),
    ] = False
    table_dtype: Annotated[
        RowDtype | None,
        Example("bfloat16"),
        Key("results", "Number format of stored rows. The default is parallel.dtype."),
    ] = None
    comm_dtype: Annotated[
        CommDtype | None,
        Example("bfloat16"),
        Key(
            "results",
            "Data type in which vectors and their gradients are sent between ranks; with "
            "float16, gradients are sent as bfloat16. The default is parallel.dtype.",
        ),
    ] = None
    overlap: Annotated[
        bool,
        Key(
            "execution",
            "Overlap computation with transfers. false also turns off early rows, but IDs are "
            "still exchanged train.lookahead batches in advance.",
        ),
    ] = True
    cuda_graph: Annotated[
        bool | Literal["auto"],
        Key(
            "execution",
            "Replay each step as a CUDA graph. On several ranks, only the dense part is replayed. "
            "auto does this for the models and optimizers of sbpflow, on one rank with a GPU, "
            "unless another key rules it out.",
            device="which has no CUDA graphs",
        ),
    ] = "auto"
    row_buffer_fraction: Annotated[
        float | None,
        Range(above=0, high=1),
        Example(0.25),
        Key(
            "execution",
            "CUDA only: size of the buffers in which the exchanges unique and local send rows, "
            "as a fraction of the maximum number of rows. With buffers of fixed size, the host "
            "does not wait for row counts. A batch that does not fit is sent again.",
            device="where the host knows the row counts",
        ),
    ] = None
    timeout_s: Annotated[
        float,
        Range(above=0, high=1e6),
        Key("execution", "Time in seconds that a rank waits for other ranks before it fails."),
    ] = 300.0
    shared_memory: Annotated[
        bool,
        Key(
            "execution",
            "CPU only: ranks of a host pass messages through shared memory (Linux, with"
            " numba) instead of gloo.",
        ),
    ] = True
    checked: Annotated[
        bool,
        Key(
            "execution",
            "Before each transfer, check that the next operation is the same on all ranks. "
            "This check is slow.",
        ),
    ] = False

    def __post_init__(self) -> None:
        for pattern, rule in self.tables.items():
            rule.check(f"parallel.tables.{pattern}")
        for pattern, rule in self.storage.items():
            rule.check(f"parallel.storage.{pattern}")
        server_rule(self.storage)
        if self.plan is not None and self.scheme is not None:
            raise ConfigError(
                f"parallel.plan: {self.plan} cannot be combined with parallel.scheme: "
                f"{self.scheme}, because both lay out all tables; remove one of them (for "
                "example, parallel.scheme=null)"
            )
        if self.cuda_graph is True and self.checked:
            raise ConfigError(
                "parallel.cuda_graph: true cannot be combined with parallel.checked: true, which "
                "compares the ranks on the host at every transfer; remove one of them (for "
                "example, parallel.checked=false)"
            )
        named = {"table_dtype": self.table_dtype, "comm_dtype": self.comm_dtype}
        named |= {f"tables.{p}.comm_dtype": r.comm_dtype for p, r in self.tables.items()}
        for key, value in named.items():
            if value in ("float32", "float64") and value != self.dtype:
                raise ConfigError(
                    f"parallel.{key}: {value} cannot be combined with parallel.dtype: "
                    f"{self.dtype}; use {self.dtype}, float16, or bfloat16"
                )


DTYPES: dict[CommDtype, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


# For each scheme, a model's rules by table name pattern; the last match wins.
Schemes = Mapping[Scheme, Mapping[str, TableRule]]


def rule_of(given: TableLayout) -> TableRule:
    """Return the rule that produces this layout.

    ``rule_of`` is the inverse of ``resolve_table_layouts``.
    """
    placement, axes = given.layout.placement, given.layout.nd_sbp
    sizes = [sbp.sizes for sbp in axes if isinstance(sbp, Split) and sbp.sizes is not None]
    plain = tuple(Split(sbp.dim) if isinstance(sbp, Split) else sbp for sbp in axes)
    dtypes: dict[torch.dtype, CommDtype] = {dtype: name for name, dtype in DTYPES.items()}
    return TableRule(
        sbp=format_nd_sbp(plain),
        ranks=tuple(tuple(row) if isinstance(row, list) else row for row in placement.nested()),
        sizes=None if not sizes else sizes[0] if len(axes) == 1 else tuple(sizes),
        exchange=given.exchange,
        comm_dtype=None if given.comm_dtype is None else dtypes[given.comm_dtype],
    )

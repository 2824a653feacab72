"""The ``parallel`` group: which layout each embedding table gets.

A scheme is a list of patterns that the model gives; ``parallel.tables`` adds patterns after them,
and the last one that matches a table's name decides. The result, one ``TableLayout`` per table, is
all that the rest of sbpflow sees: nothing downstream knows schemes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch

from sbpflow.config.model_tables import check_matches
from sbpflow.config.parse import Example, PathOr, brief
from sbpflow.embedding.plan.exchanges import exchange_names, legal_exchanges
from sbpflow.embedding.plan.tables import KernelRequest, TableLayout
from sbpflow.errors import ConfigError, SbpError
from sbpflow.runtime.ranges import Range
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import (
    Broadcast,
    NdSbp,
    Partial,
    Sbp,
    Split,
    balanced_sizes,
    format_nd_sbp,
    parse_nd_sbp,
)

Scheme = Literal["dp", "1", "2", "3", "auto"]
Dtype = Literal["float32", "float64"]
RowDtype = Literal["float32", "float64", "float16", "bfloat16"]
CommDtype = Literal["float32", "float64", "float16", "bfloat16"]
Shape = tuple[int, int]
Size = Annotated[int, Range(low=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRule:
    """Layout of the tables that a pattern matches.

    ``ranks`` defaults to all ranks, ``sizes`` to balanced parts, ``exchange`` to the first legal.
    With ``sizes`` a rank may hold nothing.
    """

    sbp: Annotated[str, Example("S(0)")]
    ranks: Annotated[tuple[int | tuple[int, ...], ...] | None, Example((0, 1))] = None
    sizes: Annotated[tuple[Size | tuple[Size, ...], ...] | None, Example((60, 40))] = None
    exchange: Annotated[str | None, Example("unique")] = None
    comm_dtype: Annotated[CommDtype | None, Example("bfloat16")] = None

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
    """Where tables live: a scheme for all, then patterns; the last that matches a table wins.

    ``kernels`` asks for kernels by table pattern, in place of ``kernel``.
    ``dense`` does the same for the parameters of the dense part, over all ranks; B by default. A
    weight is [outputs, inputs]: S(0) with its bias S(0) is column-parallel, S(1) row-parallel.
    Arithmetic is in ``dtype``, on CUDA with ``tf32: true`` in products whose factors keep 10 bits
    behind the point; rows are stored as ``table_dtype`` and vectors travel as
    ``comm_dtype``, both ``dtype`` by default. ``overlap: false`` waits for every transfer
    where it starts, and sends no ids ahead. ``cuda_graph: true`` replays a step as one graph, on
    CUDA, in place of launching it op by op; on several ranks its dense part. With
    ``row_capacity``, on CUDA, rows of the exchanges unique and local travel in buffers of a fixed
    size, this share of the most rows that one rank can name to another, so that the host need not
    know how many there are; a batch that names more is sent again, to the same numbers.
    ``checked: true`` compares, before each transfer, what every rank is about to do: for finding
    ranks that take different steps, at the cost of a round trip each.

    ``plan``, in place of a scheme, is a file of rules that a planner or a person wrote, or
    ``auto``: a planner chooses when the run starts, by what was measured on its machine.
    ``scheme: auto`` takes the cheapest of several complete plans; ``link_gb_per_s`` is what a rank
    can send in a second, for it alone, and by default what ranks of one machine can (1 Gbit/s is
    0.125).
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    scheme: Annotated[Scheme | None, Example("1")] = None
    plan: Annotated[str | None, PathOr(("auto",)), Example("auto")] = None
    link_gb_per_s: Annotated[float | None, Range(above=0), Example(0.125)] = None
    tables: Annotated[Mapping[str, TableRule], Example({"*.C1": {"sbp": "S(0)"}})] = field(
        default_factory=dict[str, TableRule]
    )
    dense: Annotated[Mapping[str, str], Example({"*.weight": "S(0)"})] = field(
        default_factory=dict[str, str]
    )
    kernel: KernelRequest = "auto"
    kernels: Annotated[Mapping[str, KernelRequest], Example({"*.C1": "torch"})] = field(
        default_factory=dict[str, KernelRequest]
    )
    dtype: Dtype = "float32"
    tf32: bool = False
    table_dtype: Annotated[RowDtype | None, Example("bfloat16")] = None
    comm_dtype: Annotated[CommDtype | None, Example("bfloat16")] = None
    overlap: bool = True
    cuda_graph: bool = False
    row_capacity: Annotated[float | None, Range(above=0, high=1), Example(0.25)] = None
    timeout_s: Annotated[float, Range(above=0)] = 300.0
    checked: bool = False

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


def resolve_dense_layouts(
    parallel: ParallelConfig,
    parameters: Mapping[str, tuple[int, ...]],
    device_type: str,
    world_size: int,
) -> dict[str, Layout]:
    """The layout of every dense parameter (name -> shape), over all ranks.

    ConfigError where a pattern matches nothing, is no layout, or splits what is too short.
    """
    check_matches("parallel.dense", parallel.dense, parameters, "parameter")
    world = Placement.line(device_type, world_size)
    layouts = {name: Layout(world, (Broadcast(),)) for name in parameters}
    for pattern, text in parallel.dense.items():
        key = f"parallel.dense.{pattern}"
        for name, shape in parameters.items():
            if fnmatchcase(name, pattern):
                layouts[name] = _dense_layout(key, text, name, shape, world)
    return layouts


def _dense_layout(
    key: str, text: str, name: str, shape: tuple[int, ...], world: Placement
) -> Layout:
    legal = " or ".join(["B", *(f"S({dim})" for dim in range(len(shape)))])
    try:
        layout = Layout(world, parse_nd_sbp(text))
        layout.check_user(shape)
    except SbpError as error:
        raise ConfigError(
            f"{key}: {brief(text)} does not fit {name} {list(shape)}: {error}"
        ) from error
    if isinstance(layout.nd_sbp[0], Partial):
        raise ConfigError(f"{key}: {text} is no layout of a parameter; {name} takes {legal}")
    return layout


def resolve_table_layouts(
    parallel: ParallelConfig,
    tables: Mapping[str, Shape],
    schemes: Schemes,
    world_size: int,
    device_type: str = "cpu",
    planned: Mapping[str, TableRule] | None = None,
) -> dict[str, TableLayout]:
    """The layout of every table, in the order of ``tables`` (name -> (rows, dim)).

    ``planned`` are the rules of ``parallel.plan``, which stand where a scheme's would.
    ConfigError where a rule does not fit a table or the world, a pattern matches nothing, or a
    table is matched by nothing.
    """
    check_matches("parallel.tables", parallel.tables, tables, "table")
    check_matches(f"parallel.plan {parallel.plan}", planned or {}, tables, "table")
    return {
        name: _fit(
            *_rule_of(parallel, schemes, planned, name),
            name,
            shape,
            device_type,
            world_size,
            parallel.comm_dtype or parallel.dtype,
        )
        for name, shape in tables.items()
    }


def _rule_of(
    parallel: ParallelConfig,
    schemes: Schemes,
    planned: Mapping[str, TableRule] | None,
    name: str,
) -> tuple[str, TableRule]:
    """The key and the rule that decide: the last match, those of plan or scheme coming first."""
    found: tuple[str, TableRule] | None = None
    for pattern, rule in (planned or {}).items():
        if fnmatchcase(name, pattern):
            found = (f"parallel.plan {parallel.plan}", rule)
    if parallel.scheme is not None:
        for pattern, rule in schemes[parallel.scheme].items():
            if fnmatchcase(name, pattern):
                found = (f"parallel.scheme {parallel.scheme}", rule)
    for pattern, rule in parallel.tables.items():
        if fnmatchcase(name, pattern):
            found = (f"parallel.tables.{pattern}", rule)
    if found is None and parallel.plan is not None:
        raise ConfigError(
            f"parallel.plan {parallel.plan}: no pattern of its tables matches {name}; add "
            f"one there, or parallel.tables: {{{name}: {{sbp: S(0)}}}}"
        )
    if found is None:
        raise ConfigError(
            f"parallel.scheme: {parallel.scheme or 'not given'}, and no pattern of parallel.tables "
            f"matches {name}; set parallel.scheme to dp, 1, 2 or 3, or add "
            f"parallel.tables: {{{name}: {{sbp: S(0)}}}}"
        )
    return found


def _fit(
    key: str,
    rule: TableRule,
    name: str,
    shape: Shape,
    device_type: str,
    world_size: int,
    comm_dtype: CommDtype,
) -> TableLayout:
    """One rule on one table in one world, every part of the combination checked."""
    placement = rule.placement(key, device_type, world_size)
    if outside := [rank for rank in placement.ranks if rank >= world_size]:
        of = f" ({name})" if key.startswith("parallel.plan") else ""
        raise ConfigError(
            f"{key}.ranks{of}: {outside} not in a world of {world_size}; use ranks "
            f"0..{world_size - 1}, or leave ranks and sizes out for all that there are"
            + ("; a plan is of the ranks that it was made for" if of else "")
        )
    sbps = [
        _fit_axis(key, rule, axis, sbp, name, shape, placement)
        for axis, sbp in enumerate(rule.parsed(key))
    ]
    if isinstance(sbps[0], Broadcast) and placement.size not in (1, world_size):
        ranks = list(placement.ranks)
        raise ConfigError(
            f"{key} ({name}): B on ranks {ranks} of {world_size}; a copied table is on all ranks, "
            f"a whole one on a single rank: remove ranks, or use ranks: [{ranks[0]}]"
        )
    layout = Layout(placement, tuple(sbps))
    legal = legal_exchanges(layout, world_size)
    if rule.exchange is not None and rule.exchange not in legal:
        raise ConfigError(
            f"{key}.exchange: {rule.exchange} does not go with {rule.sbp} of {name} on "
            f"{placement.size} of {world_size} ranks; use {' or '.join(legal)}"
        )
    return TableLayout(
        layout=layout,
        exchange=rule.exchange or legal[0],
        comm_dtype=DTYPES[rule.comm_dtype or comm_dtype],
        key=key,
    )


def _fit_axis(
    key: str,
    rule: TableRule,
    axis: int,
    sbp: Sbp,
    name: str,
    shape: Shape,
    placement: Placement,
) -> Sbp:
    """The sbp along one axis of the placement, with its explicit sizes if there are any."""
    if not isinstance(sbp, Split):
        return sbp
    num_ranks, what, length = placement.shape[axis], ("rows", "columns")[sbp.dim], shape[sbp.dim]
    sizes = rule.axis_sizes(axis)
    if sbp.dim == 1 and sizes is None and length < num_ranks:
        raise ConfigError(
            f"{key} ({name}): S(1) needs a column for each of {num_ranks} ranks, {name} has "
            f"{length}; use S(0), or {length} rank{'s' * (length > 1)}, or explicit sizes, or a "
            f"table of {num_ranks} columns or more"
        )
    fit = f"for example {list(balanced_sizes(length, num_ranks))}"
    if sizes is None:
        return sbp
    if len(sizes) != num_ranks:
        raise ConfigError(
            f"{key}.sizes: {len(sizes)} sizes {list(sizes)} for {num_ranks} ranks; {fit}"
        )
    if sum(sizes) != length:
        raise ConfigError(
            f"{key}.sizes: {list(sizes)} sum to {sum(sizes)}, {name} has {length} {what}; {fit}"
        )
    return Split(sbp.dim, sizes)

"""The ``parallel`` group: which layout each embedding table gets.

A scheme is a short list of patterns; ``parallel.tables`` adds patterns after them, and the last one
that matches a table's name decides. The result, one ``TableLayoutConfig`` per table, is all that
the rest of sbpflow sees: nothing downstream knows schemes.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from sbpflow.config_parse import Example, Range
from sbpflow.errors import ConfigError, SbpError
from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import (
    Broadcast,
    NdSbp,
    Partial,
    Split,
    balanced_sizes,
    format_nd_sbp,
    parse_nd_sbp,
)

Scheme = Literal["dp", "1", "2", "3"]
Exchange = Literal["local", "columns", "reduce", "unique"]
Kernel = Literal["auto", "fbgemm", "torch"]
Dtype = Literal["float32", "float64"]
Shape = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRule:
    """Layout of the tables that a pattern matches.

    ``ranks`` defaults to all ranks, ``sizes`` to balanced parts, ``exchange`` to the first legal.
    """

    sbp: Annotated[str, Example("S(0)")]
    ranks: Annotated[tuple[int | tuple[int, ...], ...] | None, Example((0, 1))] = None
    sizes: Annotated[tuple[Annotated[int, Range(low=0)], ...] | None, Example((60, 40))] = None
    exchange: Exchange | None = None

    def check(self, key: str) -> None:
        """What needs neither a table nor the world size."""
        sbp = self.parsed(key)
        ranks = self.flat_ranks(key)
        if ranks is not None and (not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks)):
            raise ConfigError(
                f"{key}.ranks: {list(ranks)} must be one or more different ranks from 0 up; "
                "for example ranks: [0, 1]"
            )
        if self.sizes is not None:
            if not isinstance(sbp, Split):
                raise ConfigError(f"{key}.sizes: {sbp} has no parts; remove sizes, or use S(0)")
            if ranks is not None and len(self.sizes) != len(ranks):
                raise ConfigError(
                    f"{key}.sizes: {len(self.sizes)} sizes {list(self.sizes)} for {len(ranks)} "
                    f"ranks {list(ranks)}; give one size per rank"
                )

    def parsed(self, key: str) -> Split | Broadcast:
        """The one sbp; tables take B, S(0) or S(1) on a plain list of ranks."""
        accepted = "a table takes B, S(0) or S(1); for example sbp: S(0)"
        try:
            nd_sbp = parse_nd_sbp(self.sbp)
        except SbpError as error:
            raise ConfigError(f"{key}.sbp: {self.sbp!r} is not a layout; {accepted}") from error
        if len(nd_sbp) != 1:
            raise ConfigError(
                f"{key}.sbp: {self.sbp} has {len(nd_sbp)} axes, grids are not supported; {accepted}"
            )
        sbp = nd_sbp[0]
        if isinstance(sbp, Partial) or (isinstance(sbp, Split) and sbp.dim > 1):
            raise ConfigError(f"{key}.sbp: {sbp} is no layout of a table; {accepted}")
        return sbp

    def flat_ranks(self, key: str) -> tuple[int, ...] | None:
        if self.ranks is None:
            return None
        flat = tuple(rank for rank in self.ranks if isinstance(rank, int))
        if len(flat) != len(self.ranks):
            raise ConfigError(
                f"{key}.ranks: a grid of ranks is not supported; list them, for example [0, 1]"
            )
        return flat


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Where tables live: a scheme for all, then patterns; the last that matches a table wins.

    ``dense`` does the same for the parameters of the dense part, over all ranks; B by default. A
    weight is [outputs, inputs]: S(0) with its bias S(0) is column-parallel, S(1) row-parallel.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    scheme: Annotated[Scheme | None, Example("1")] = None
    tables: Annotated[Mapping[str, TableRule], Example({"deep.*": {"sbp": "S(0)"}})] = field(
        default_factory=dict[str, TableRule]
    )
    dense: Annotated[Mapping[str, str], Example({"mlp.0.*": "S(0)"})] = field(
        default_factory=dict[str, str]
    )
    kernel: Kernel = "auto"
    dtype: Dtype = "float32"
    timeout_s: Annotated[float, Range(above=0)] = 300.0

    def __post_init__(self) -> None:
        for pattern, rule in self.tables.items():
            rule.check(f"parallel.tables.{pattern}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLayoutConfig:
    """The resolved layout of one table; ``key`` is the config key that decided it."""

    nd_sbp: NdSbp
    ranks: tuple[int, ...]
    exchange: Exchange
    key: str

    def layout(self, device_type: str) -> Layout:
        placement = Placement(device_type, self.ranks, (len(self.ranks),))
        return Layout(placement, self.nd_sbp)

    def __str__(self) -> str:
        sizes = [sbp.sizes for sbp in self.nd_sbp if isinstance(sbp, Split) and sbp.sizes]
        parts = f" sizes {list(sizes[0])}" if sizes else ""
        return f"{format_nd_sbp(self.nd_sbp)}@{list(self.ranks)}{parts} {self.exchange}"


_SCHEMES: dict[Scheme, dict[str, TableRule]] = {
    "dp": {
        "wide.*": TableRule(sbp="B", exchange="local"),
        "deep.*": TableRule(sbp="B", exchange="local"),
    },
    "1": {
        "wide.*": TableRule(sbp="S(0)", exchange="reduce"),
        "deep.*": TableRule(sbp="S(1)", exchange="columns"),
    },
    "2": {
        "wide.*": TableRule(sbp="S(0)", exchange="reduce"),
        "deep.*": TableRule(sbp="S(0)", exchange="reduce"),
    },
    "3": {
        "wide.*": TableRule(sbp="S(0)", exchange="unique"),
        "deep.*": TableRule(sbp="S(0)", exchange="unique"),
    },
}


def resolve_dense_layouts(
    parallel: ParallelConfig,
    parameters: Mapping[str, tuple[int, ...]],
    device_type: str,
    world_size: int,
) -> dict[str, Layout]:
    """The layout of every dense parameter (name -> shape), over all ranks.

    ConfigError where a pattern matches nothing, is no layout, or splits what is too short.
    """
    _check_patterns("parallel.dense", parallel.dense, parameters, "parameter")
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
        raise ConfigError(f"{key}: {text!r} does not fit {name} {list(shape)}: {error}") from error
    if isinstance(layout.nd_sbp[0], Partial):
        raise ConfigError(f"{key}: {text} is no layout of a parameter; {name} takes {legal}")
    return layout


def resolve_table_layouts(
    parallel: ParallelConfig, tables: Mapping[str, Shape], world_size: int
) -> dict[str, TableLayoutConfig]:
    """The layout of every table, in the order of ``tables`` (name -> (rows, dim)).

    ConfigError where a rule does not fit a table or the world, a pattern matches nothing, or a
    table is matched by nothing.
    """
    _check_patterns("parallel.tables", parallel.tables, tables, "table")
    return {
        name: _fit(*_rule_of(parallel, name), name, shape, world_size)
        for name, shape in tables.items()
    }


def _check_patterns(key: str, patterns: Iterable[str], names: Iterable[str], what: str) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, known, 3, cutoff=0.5) or known[:5]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there is no {what}"
            raise ConfigError(f"{key}.{pattern}: matches no {what}; {hint}")


def _rule_of(parallel: ParallelConfig, name: str) -> tuple[str, TableRule]:
    """The key and the rule that decide: the last match, the scheme's patterns coming first."""
    found: tuple[str, TableRule] | None = None
    if parallel.scheme is not None:
        for pattern, rule in _SCHEMES[parallel.scheme].items():
            if fnmatchcase(name, pattern):
                found = (f"parallel.scheme {parallel.scheme}", rule)
    for pattern, rule in parallel.tables.items():
        if fnmatchcase(name, pattern):
            found = (f"parallel.tables.{pattern}", rule)
    if found is None:
        raise ConfigError(
            f"parallel.scheme: {parallel.scheme or 'not given'}, and no pattern of parallel.tables "
            f"matches {name}; set parallel.scheme to dp, 1, 2 or 3, or add "
            f"parallel.tables: {{{name}: {{sbp: S(0)}}}}"
        )
    return found


def _fit(key: str, rule: TableRule, name: str, shape: Shape, world_size: int) -> TableLayoutConfig:
    """One rule on one table in one world, every part of the combination checked."""
    where = f"{key} ({name})"
    ranks = rule.flat_ranks(key) or tuple(range(world_size))
    if outside := [rank for rank in ranks if rank >= world_size]:
        raise ConfigError(
            f"{key}.ranks: {outside} not in a world of {world_size}; use ranks 0..{world_size - 1}"
        )
    sbp = rule.parsed(key)
    if isinstance(sbp, Split):
        _check_columns(where, sbp, name, shape, ranks)
        if rule.sizes is not None:
            _check_sizes(key, rule.sizes, sbp.dim, name, shape, len(ranks))
        sbp = Split(sbp.dim, rule.sizes)
    elif len(ranks) not in (1, world_size):
        raise ConfigError(
            f"{where}: B on ranks {list(ranks)} of {world_size}; a copied table is on all ranks, a "
            f"whole one on a single rank: remove ranks, or use ranks: [{ranks[0]}]"
        )
    legal = _legal_exchanges(sbp, len(ranks), world_size)
    if rule.exchange is not None and rule.exchange not in legal:
        raise ConfigError(
            f"{key}.exchange: {rule.exchange} does not go with {sbp} of {name} on "
            f"{len(ranks)} of {world_size} ranks; use {' or '.join(legal)}"
        )
    exchange = rule.exchange or legal[0]
    return TableLayoutConfig(nd_sbp=(sbp,), ranks=ranks, exchange=exchange, key=key)


def _check_columns(where: str, sbp: Split, name: str, shape: Shape, ranks: tuple[int, ...]) -> None:
    dim = shape[1]
    if sbp.dim == 1 and dim < len(ranks):
        raise ConfigError(
            f"{where}: S(1) needs a column for each of {len(ranks)} ranks, {name} has {dim}; use "
            f"S(0), or ranks: {list(ranks[:dim])}, or a table of {len(ranks)} columns or more"
        )


def _check_sizes(
    key: str, sizes: tuple[int, ...], dim: int, name: str, shape: Shape, num_ranks: int
) -> None:
    what, length = ("rows", "columns")[dim], shape[dim]
    fit = f"for example sizes: {list(balanced_sizes(length, num_ranks))}"
    if len(sizes) != num_ranks:
        raise ConfigError(
            f"{key}.sizes: {len(sizes)} sizes {list(sizes)} for {num_ranks} ranks; {fit}"
        )
    if sum(sizes) != length:
        raise ConfigError(
            f"{key}.sizes: {list(sizes)} sum to {sum(sizes)}, {name} has {length} {what}; {fit}"
        )
    if dim == 1 and 0 in sizes:
        raise ConfigError(f"{key}.sizes: {list(sizes)} leave a rank without columns; {fit}")


def _legal_exchanges(
    sbp: Split | Broadcast, num_ranks: int, world_size: int
) -> tuple[Exchange, ...]:
    """The exchanges a layout can run, the default first."""
    if isinstance(sbp, Split):
        return ("columns",) if sbp.dim == 1 else ("reduce", "unique")
    if num_ranks < world_size:
        return ("columns",)
    return ("local",) if world_size > 1 else ("local", "columns")

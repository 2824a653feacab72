"""Resolves the ``parallel`` group to the layout of each table and each dense parameter.

``table_rules`` defines the group. A rule that does not fit a table or the world is rejected.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NoReturn, get_args

from sbpflow.config.model_tables import check_matches, last_matches
from sbpflow.config.parse import brief
from sbpflow.config.table_rules import (
    DTYPES,
    CommDtype,
    Hosts,
    ParallelConfig,
    Scheme,
    Schemes,
    Shape,
    TableRule,
)
from sbpflow.embedding.plan.exchanges import legal_exchanges
from sbpflow.embedding.plan.tables import TableLayout
from sbpflow.errors import ConfigError, SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Sbp, Split, balanced_sizes, parse_nd_sbp


def resolve_dense_layouts(
    parallel: ParallelConfig,
    parameters: Mapping[str, tuple[int, ...]],
    device_type: str,
    world_size: int,
) -> dict[str, Layout]:
    """Return a layout over all ranks for every dense parameter; ``parameters`` maps names to
    shapes. Raises ConfigError if a pattern matches nothing, or if its value is not a layout that
    fits the parameter.
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
        (sbp,) = layout.nd_sbp
        if isinstance(sbp, Partial) or (isinstance(sbp, Split) and sbp.dim >= len(shape)):
            raise ConfigError(
                f"{key}: {brief(text)} cannot be the layout of parameter {name} {list(shape)}, "
                f"which supports {legal}"
            )
        layout.check_user(shape)
    except SbpError as error:
        raise ConfigError(
            f"{key}: {brief(text)} does not fit {name} {list(shape)}: {error}"
        ) from error
    return layout


def resolve_table_layouts(
    parallel: ParallelConfig,
    tables: Mapping[str, Shape],
    schemes: Schemes,
    world_size: int,
    device_type: str = "cpu",
    planned: Mapping[str, TableRule] | None = None,
    hosts: Hosts | None = None,
) -> dict[str, TableLayout]:
    """Return the layout of every table, in the order of ``tables`` (name -> (rows, dim)).

    ``planned`` contains the rules of ``parallel.plan``, which replace the rules of a scheme.
    ``hosts`` contains the ranks of each host; by default, all ranks share a host. Raises
    ConfigError if a rule does not fit a table or the world, a pattern matches nothing, or no
    pattern matches a table.
    """
    check_matches("parallel.tables", parallel.tables, tables, "table")
    check_matches(f"parallel.plan {parallel.plan}", planned or {}, tables, "table")
    rules = _rules(parallel, schemes, planned)
    last = last_matches([pattern for pattern, _, _ in rules], tables)
    if missing := [name for name in tables if name not in last]:
        _raise_unmatched(parallel, missing[0])
    return {
        name: _fit(
            *rules[last[name]][1:],
            name,
            shape,
            device_type,
            world_size,
            parallel.comm_dtype or parallel.dtype,
            hosts,
        )
        for name, shape in tables.items()
    }


def _rules(
    parallel: ParallelConfig, schemes: Schemes, planned: Mapping[str, TableRule] | None
) -> list[tuple[str, str, TableRule]]:
    """Return the pattern, the key, and the rule of every pattern; the last one that matches a table
    applies. Patterns of ``parallel.tables`` come after those of a plan or scheme.
    """
    plan_key, scheme = f"parallel.plan {parallel.plan}", parallel.scheme
    result = [(pattern, plan_key, rule) for pattern, rule in (planned or {}).items()]
    if scheme is not None:
        if scheme not in schemes:
            raise ConfigError(
                f"parallel.scheme: this model's spec has no rules for scheme {scheme}; use one of "
                f"{', '.join([*schemes, 'auto'])}"
            )
        rules = schemes[scheme].items()
        result += [(pattern, f"parallel.scheme {scheme}", rule) for pattern, rule in rules]
    return result + [(p, f"parallel.tables.{p}", rule) for p, rule in parallel.tables.items()]


def _raise_unmatched(parallel: ParallelConfig, name: str) -> NoReturn:
    if parallel.plan is not None:
        raise ConfigError(
            f"parallel.plan {parallel.plan}: no pattern of the plan matches {name}; add a pattern, "
            f"or parallel.tables: {{{name}: {{sbp: S(0)}}}}"
        )
    raise ConfigError(
        f"parallel.scheme is {parallel.scheme or 'not given'}, and no pattern of parallel.tables "
        f"matches {name}; set parallel.scheme to one of {', '.join(get_args(Scheme))}, or add "
        f"parallel.tables: {{{name}: {{sbp: S(0)}}}}"
    )


def _fit(
    key: str,
    rule: TableRule,
    name: str,
    shape: Shape,
    device_type: str,
    world_size: int,
    comm_dtype: CommDtype,
    hosts: Hosts | None,
) -> TableLayout:
    """Apply a rule to a table, and check that the rule fits the table and the world."""
    placement = rule.placement(key, device_type, world_size, hosts)
    if outside := [rank for rank in placement.ranks if rank >= world_size]:
        table = f" ({name})" if key.startswith("parallel.plan") else ""
        raise ConfigError(
            f"{key}.ranks{table}: {outside} are not in a world of {world_size}; use ranks "
            f"0..{world_size - 1}, or remove ranks and sizes to use all ranks"
            + (
                "; a plan is only valid for the number of ranks that it was made for"
                if table
                else ""
            )
        )
    sbps = [
        _fit_axis(key, rule, axis, sbp, name, shape, placement)
        for axis, sbp in enumerate(rule.parsed(key))
    ]
    if isinstance(sbps[0], Broadcast) and placement.size not in (1, world_size):
        ranks = list(placement.ranks)
        raise ConfigError(
            f"{key} ({name}): B needs either all {world_size} ranks or a single one, got {ranks}; "
            f"remove the key ranks, or use ranks: [{ranks[0]}]"
        )
    if rule.splits_rows_twice:
        _check_hosts(f"{key}.ranks ({name})", placement, world_size, hosts)
    layout = Layout(placement, tuple(sbps))
    legal = legal_exchanges(layout, world_size)
    if rule.exchange is not None and rule.exchange not in legal:
        raise ConfigError(
            f"{key}.exchange: {rule.exchange} does not support {rule.sbp} for {name} on "
            f"{placement.size} of {world_size} ranks; use {' or '.join(legal)}"
        )
    return TableLayout(
        layout=layout,
        exchange=rule.exchange or legal[0],
        comm_dtype=DTYPES[rule.comm_dtype or comm_dtype],
        key=key,
    )


def _check_hosts(key: str, grid: Placement, world_size: int, hosts: Hosts | None) -> None:
    """Check that a grid of hosts and ranks contains all ranks, and that each of its rows is on one
    host.
    """
    host_of = {rank: number for number, host in enumerate(hosts or ()) for rank in host}
    shown = [list(host) for host in hosts or ()]
    if grid.size != world_size:
        raise ConfigError(
            f"{key}: (S(0), S(0)) needs all {world_size} ranks, but {grid} has {grid.size}; "
            "remove the key ranks to use the hosts of the run"
        )
    for row in grid.axis_groups(1):
        if len({host_of.get(rank) for rank in row}) > 1:
            raise ConfigError(
                f"{key}: {grid} has ranks {list(row)} in one row, but they are on different hosts "
                f"({shown}); remove the key ranks to use the hosts of the run"
            )


def _fit_axis(
    key: str, rule: TableRule, axis: int, sbp: Sbp, name: str, shape: Shape, placement: Placement
) -> Sbp:
    """Return the sbp along one axis of the placement, with explicit sizes if given."""
    if not isinstance(sbp, Split):
        return sbp
    num_ranks, length = placement.shape[axis], shape[sbp.dim]
    sizes = rule.axis_sizes(axis)
    if sbp.dim == 1 and sizes is None and length < num_ranks:
        raise ConfigError(
            f"{key} ({name}): S(1) needs at least one column for each of {num_ranks} ranks, but "
            f"{name} has {length} column{'s' * (length > 1)}; use S(0), {length} "
            f"rank{'s' * (length > 1)}, explicit sizes, or a table with at least {num_ranks} "
            "columns"
        )
    fit = f"use, for example, {list(balanced_sizes(length, num_ranks))}"
    if sizes is None:
        return sbp
    if len(sizes) != num_ranks:
        raise ConfigError(
            f"{key}.sizes: {len(sizes)} sizes {list(sizes)} for {num_ranks} ranks; {fit}"
        )
    if sum(sizes) != length:
        raise ConfigError(
            f"{key}.sizes: {list(sizes)} adds up to {sum(sizes)}, but {name} has {length} "
            f"{('rows', 'columns')[sbp.dim]}; {fit}"
        )
    return Split(sbp.dim, sizes)

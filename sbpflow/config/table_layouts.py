"""What the ``parallel`` group means for given tables and parameters: the layout of each.

``table_rules`` has the group itself; a rule that does not fit a table or the world is refused here.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from sbpflow.config.model_tables import check_matches
from sbpflow.config.parse import brief
from sbpflow.config.table_rules import (
    DTYPES,
    CommDtype,
    ParallelConfig,
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

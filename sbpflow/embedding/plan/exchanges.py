"""Which exchanges there are, and which of them a table's layout can run."""

from sbpflow.embedding.plan.boxed_exchanges import Alone, Columns, DenseAllreduce, Reduce
from sbpflow.embedding.plan.group_plan import ALONE, EXCHANGES, Exchange, exchange_of, register
from sbpflow.embedding.plan.row_exchanges import CopiedRows, Unique, UniqueColumns
from sbpflow.embedding.plan.tables import TableConfig, TableLayout
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement

# The simplest first, as a planner tries them; of one name, the first that suits a table is taken.
register(Alone(), DenseAllreduce(), CopiedRows(), Columns(), UniqueColumns(), Unique(), Reduce())


def exchange_names() -> tuple[str, ...]:
    """What ``exchange`` may be in a configuration."""
    return tuple(sorted({one.name for one in EXCHANGES} - {ALONE}))


def copies(name: str) -> bool:
    """Whether every rank has all of a table with the exchange of that name."""
    return any(one.copies for one in EXCHANGES if one.name == name)


def legal_exchanges(layout: Layout, world_size: int) -> tuple[str, ...]:
    """The names of those that a table's layout can run, the default first; none for no such layout.

    A whole table on one rank may call itself B or S(0). B is on all ranks, or on one. Unique rows
    of S(1) are asked of all ranks.
    """
    legal = [one for one in EXCHANGES if one.name != ALONE and one.accepts(layout, world_size)]
    legal.sort(key=lambda one: not one.is_default)
    return tuple(dict.fromkeys(one.name for one in legal))


def exchange_for(
    table: TableConfig, layout: Layout, name: str, lookups: int, world_size: int
) -> Exchange:
    """The one that a table runs with ``lookups`` ids in a batch."""
    asked = ALONE if world_size == 1 else name
    for one in EXCHANGES:
        fits = one.name == asked and one.accepts(layout, world_size)
        if fits and one.suits(table, lookups, world_size):
            return one
    return exchange_of(asked, layout, world_size)


def check_exchange(table: TableConfig, given: TableLayout, world: Placement) -> None:
    """Raise ConfigError unless the layout is of this world and can run its exchange."""
    layout = given.layout
    if outside := [rank for rank in layout.placement.ranks if rank not in world]:
        raise ConfigError(f"table {table.name}: {layout} names ranks {outside} outside {world}")
    legal = legal_exchanges(layout, world.size)
    if given.exchange not in legal:
        use = f"use {' or '.join(legal)}" if legal else "use B, S(0), S(1) or (S(0), S(1))"
        raise ConfigError(
            f"table {table.name}: {given.exchange} does not go with {layout} in a world of "
            f"{world.size}; {use}"
        )
    why = exchange_of(given.exchange, layout, world.size).refusal(table, layout, world)
    if why:
        raise ConfigError(f"table {table.name}: {given.exchange} of {layout} {why}")

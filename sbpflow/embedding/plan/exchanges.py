"""Registers the built-in exchanges and finds the exchanges that a table's layout can use."""

from sbpflow.embedding.plan.boxed_exchanges import Alone, Columns, DenseAllreduce, Reduce
from sbpflow.embedding.plan.group_plan import ALONE, EXCHANGES, Exchange, exchanges_of, register
from sbpflow.embedding.plan.row_exchanges import CopiedRows, Unique, UniqueColumns
from sbpflow.embedding.plan.tables import TableConfig, TableLayout
from sbpflow.embedding.plan.two_level import UniqueTwoLevel
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement

# The planner tries the exchanges in this order, simplest first. Of several exchanges with the same
# name, a table uses the first that suits it.
register(Alone(), DenseAllreduce(), CopiedRows(), Columns(), UniqueColumns(), Unique())
register(Reduce(), UniqueTwoLevel())


def exchange_names() -> tuple[str, ...]:
    """Return the valid values of ``exchange`` in a configuration."""
    return tuple(sorted({exchange.name for exchange in EXCHANGES} - {ALONE}))


def copies(name: str) -> bool:
    """Return True if this exchange keeps a full copy of a table on every rank."""
    return any(exchange.copies for exchange in EXCHANGES if exchange.name == name)


def legal_exchanges(layout: Layout, world_size: int) -> tuple[str, ...]:
    """Return the names of the exchanges that support a table's layout, starting with the default.

    A whole table on one rank may have layout B, S(0), or S(1). A B table must be on all ranks or on
    one. For S(1), the exchange ``unique`` requires all ranks.
    """
    legal = [e for e in EXCHANGES if e.name != ALONE and e.accepts(layout, world_size)]
    legal.sort(key=lambda exchange: not exchange.is_default)
    return tuple(dict.fromkeys(exchange.name for exchange in legal))


def exchange_for(
    table: TableConfig, layout: Layout, name: str, lookups: int, world_size: int
) -> Exchange:
    """Return the exchange that a table uses if a batch has ``lookups`` ids for it."""
    fitting = exchanges_of(name, layout, world_size)
    suited = (exchange for exchange in fitting if exchange.suits(table, lookups, world_size))
    return next(suited, fitting[-1])


def check_exchange(table: TableConfig, config: TableLayout, world: Placement) -> None:
    """Raise ConfigError unless the layout is within ``world`` and the exchange supports the
    layout."""
    layout = config.layout
    if outside := [rank for rank in layout.placement.ranks if rank not in world]:
        raise ConfigError(
            f"table {table.name}: {layout} contains ranks {outside}, which are not in the world; "
            f"use the ranks of {world}"
        )
    legal = legal_exchanges(layout, world.size)
    if config.exchange not in legal:
        use = f"use {' or '.join(legal)}"
        if not legal:
            use = "use S(0), S(1), (S(0), S(1)), or, on all ranks, B or (S(0), S(0))"
        raise ConfigError(
            f"table {table.name}: exchange {config.exchange} does not support {layout} in a world "
            f"of {world.size}; {use}"
        )
    exchange = exchanges_of(config.exchange, layout, world.size)[0]
    if reason := exchange.refusal(table, layout, world):
        raise ConfigError(f"table {table.name}: {config.exchange} of {layout} {reason}")

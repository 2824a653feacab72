"""How the ids and vectors of a table travel, and which layouts can do which. No torch."""

from typing import Literal

from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast, Split

Exchange = Literal["local", "columns", "reduce", "unique"]


def legal_exchanges(layout: Layout, world_size: int) -> tuple[Exchange, ...]:
    """The exchanges that a table's layout can run, the default first; none for no such layout.

    A whole table on one rank may call itself B or S(0). B is on all ranks, or on one. Unique rows
    of S(1) are asked of all ranks.
    """
    num_ranks, first = layout.placement.size, layout.nd_sbp[0]
    if len(layout.nd_sbp) == 2:
        is_grid = tuple(sbp.dim for sbp in layout.nd_sbp if isinstance(sbp, Split)) == (0, 1)
        return ("reduce",) if is_grid else ()
    if isinstance(first, Split):
        if first.dim == 0:
            return ("reduce", "unique", "columns") if num_ranks == 1 else ("reduce", "unique")
        if first.dim != 1:
            return ()
        return ("columns", "unique") if num_ranks == world_size else ("columns",)
    if not isinstance(first, Broadcast):
        return ()
    if num_ranks == 1:
        return ("columns",) if world_size > 1 else ("local", "columns")
    return ("local",) if num_ranks == world_size else ()

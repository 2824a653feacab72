"""Defines the exchanges that deduplicate ids, so that each rank requests a row only once.

``exchange/rows.py`` and ``exchange/unique.py`` run them.
"""

from abc import abstractmethod
from collections.abc import Hashable
from typing import ClassVar

import torch

from sbpflow.costs.counts import Counts, Cut, Facts, expanded, looked_up
from sbpflow.embedding.plan.boxed_exchanges import LEAST_COLUMNS, is_copied, powers
from sbpflow.embedding.plan.group_plan import (
    Cuts,
    Exchange,
    ExchangeStep,
    GroupPlan,
    Member,
    Purpose,
    Stage,
)
from sbpflow.embedding.plan.tables import TableConfig, shards_of
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement

Stages = tuple[Stage, ...]
# The name of each transfer, and what it sends.
_TRANSFERS: dict[Purpose, tuple[str, str]] = {
    "counts": ("fwd/counts", "row counts"),
    "ids": ("fwd/ids", "each rank's unique rows"),
    "vectors": ("fwd/vectors", "rows requested by other ranks"),
    "flags": ("fwd/flags", "one bit per row requested by other ranks"),
    "early vectors": ("fwd/early", "rows that the previous batch does not use"),
    "gradients": ("bwd/vectors", "unique rows' gradients"),
    "late flags": ("bwd/late flags", "one bit per row requested by other ranks"),
    "late gradients": ("bwd/late", "gradients of rows that the next batch does not use"),
}


class RowExchange(Exchange):
    """Base class of the exchanges that deduplicate ids.

    Each group consists of a single stack, so that all rows share a numbering, an optimizer, and a
    width.
    """

    to_all: ClassVar[bool]  # True if each rank sends its requests to all other ranks

    def group_key(self, member: Member) -> tuple[Hashable, ...]:
        return member.stack_key

    @abstractmethod
    def row_stages(self, group: GroupPlan, most: int, rows: int, others: int) -> Stages:
        """Return the stages that send vectors and gradients.

        One rank requests at most ``most`` rows, all P ranks together request at most ``rows``, and
        any P - 1 ranks together request at most ``others``.
        """

    def stages(self, group: GroupPlan, batch_size: int) -> Stages:
        size, lookups = group.world.size, sum(stack.lookups() for stack in group.stacks)
        most, rows = -(-batch_size // size) * lookups, batch_size * lookups
        others = (batch_size - batch_size // size) * lookups
        fans, collective = (size - 1, "all_gather") if self.to_all else (1, "all_to_all")
        to_others = (size - 1, size * (size - 1))
        return (
            _stage(group, "counts", to_others),
            _stage(group, "ids", (most * fans, rows * fans), collective),
            *self.row_stages(group, most, rows, others),
        )


def _stage(
    group: GroupPlan, purpose: Purpose, sizes: tuple[int, int], collective: str = "all_to_all"
) -> Stage:
    """Return a stage with one transfer among all ranks; ``sizes`` are the ``per_rank`` and
    ``total`` of its ``ExchangeStep``.
    """
    dtypes = {
        "counts": torch.int64,
        "ids": group.address_dtype(),
        "vectors": group.comm_dtype,
        "flags": torch.uint8,
        "gradients": group.grad_comm_dtype,
    }
    dtype = dtypes[purpose.split()[-1]]  # "late gradients" are gradients
    name, what = _TRANSFERS[purpose]
    id, groups = f"{group.name}/{name}", (group.world.ranks,)
    step = ExchangeStep(groups, id, collective, dtype, *sizes, what)
    return Stage(purpose=purpose, steps=(step,))


class CopiedRows(RowExchange):
    """The exchange for B tables: each rank looks up its own samples, and all ranks gather the
    gradients of the touched rows.
    """

    name = "local"
    runs = "sbpflow.embedding.exchange.rows:LocalRowsGroup"
    calls = ("num_row_gathers",)
    pools = copies = to_all = True

    def accepts(self, layout: Layout, world_size: int) -> bool:
        return is_copied(layout, world_size)

    def cuts(self, num_rows: int, dim: int, world_size: int, num_hosts: int) -> Cuts:
        return [("B", (1, 1))]

    def row_stages(self, group: GroupPlan, most: int, rows: int, others: int) -> Stages:
        to_others = group.stacks[0].dim * (group.world.size - 1)
        sizes = most * to_others, rows * to_others
        return (_stage(group, "gradients", sizes, "all_gather"),)

    def home(self, facts: Facts, cut: Cut) -> Counts:
        size, dim, wanted = facts.world_size, facts.dim, facts.wanted
        sums = facts.sums_bytes(facts.touched, dim, facts.samples * dim * facts.vectors)
        own, gathered = wanted * dim, wanted * dim * size
        return {
            "memory_bytes": facts.stored(facts.num_rows, dim),
            **facts.steps(facts.touched, dim),
            **expanded(facts.local_lookups, wanted, dim),
            "read_rows": wanted,
            "read_elements": wanted * dim,
            "repeat_elements": wanted * dim * size,
            "copied_bytes": wanted * dim * size * facts.sent_item,
            "counted_bytes": 4.0 * wanted * (size - 1),
            "gradient_bytes": wanted * dim * (size - 1) * facts.sent_item,
            "update_ids": wanted * size,
            "update_elements": wanted * size * dim,
            "buffer_bytes": facts.window * facts.index_item * facts.local_lookups
            + facts.request_bytes(wanted * size)
            # The rank's own gradients are freed before the update sums the gathered ones.
            + max(
                (own + gathered) * facts.sent_item,
                facts.collected_bytes(gathered, wanted * size, sums),
            ),
        }


class Unique(RowExchange):
    """The exchange for S(0) tables with skewed ids: ranks request unique rows from their owners and
    expand them.
    """

    name = "unique"
    runs = "sbpflow.embedding.exchange.unique:UniqueGroup"
    calls = ("num_row_transfers",)
    to_all = False
    sends_early = True

    def accepts(self, layout: Layout, world_size: int) -> bool:
        return layout.split_dims == (0,)

    def cuts(self, num_rows: int, dim: int, world_size: int, num_hosts: int) -> Cuts:
        rows = [cut for cut in powers(world_size) if cut <= num_rows]
        return [("S(0)", (cut, 1)) for cut in (1, *rows)]

    def row_stages(self, group: GroupPlan, most: int, rows: int, others: int) -> Stages:
        dim, size = group.stacks[0].dim, group.world.size
        # the maximum, which is reached if one rank owns all rows
        sent, returned = (others * dim, rows * dim), (most * dim, rows * dim)
        # one bit per requested row; the bits for each pair of ranks are padded to whole bytes
        flags = others // 8 + size - 1, rows // 8 + size * (size - 1)
        stages = [_stage(group, "vectors", sent)]
        if group.early_rows:
            stages += [_stage(group, "flags", flags), _stage(group, "early vectors", sent)]
        stages.append(_stage(group, "gradients", returned))
        if group.late_gradients:
            late = _stage(group, "late gradients", returned)
            stages += [_stage(group, "late flags", flags), late]
        return tuple(stages)

    def home(self, facts: Facts, cut: Cut) -> Counts:
        return {**_received(facts), "counted_bytes": 4.0 * facts.wanted}

    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts:
        size, wanted, touched = facts.world_size, facts.wanted, facts.touched / cut[0]
        # Number of rows that all ranks together request from one owner.
        requested = size * wanted / cut[0]
        sent = (size - 1) / size * requested * width
        local = -wanted / cut[0]
        return {
            **_served(facts, requested, touched, rows, width),
            "vector_bytes": sent * facts.sent_item,
            "counted_bytes": 4.0 * local,
            "gradient_bytes": local * width * facts.sent_item,
        }


class UniqueColumns(RowExchange):
    """The exchange for S(1) tables with skewed ids: every rank sends its columns of the requested
    rows.
    """

    name = "unique"
    runs = "sbpflow.embedding.exchange.rows:UniqueColumnsGroup"
    calls = ("num_row_transfers",)
    to_all = True

    def accepts(self, layout: Layout, world_size: int) -> bool:
        return layout.split_dims == (1,) and layout.placement.size == world_size

    def refusal(self, table: TableConfig, layout: Layout, world: Placement) -> str:
        if (count := len(shards_of(table, layout))) == world.size:
            return ""
        fix = "sizes of 1 or more" if table.dim >= world.size else f"a dim of {world.size} or more"
        return (
            f"needs at least one column on every rank, but only {count} of {world.size} ranks have "
            f"columns; use exchange columns, or {fix}"
        )

    def cuts(self, num_rows: int, dim: int, world_size: int, num_hosts: int) -> Cuts:
        return [("S(1)", (1, world_size))] if dim // world_size >= LEAST_COLUMNS else []

    def row_stages(self, group: GroupPlan, most: int, rows: int, others: int) -> Stages:
        dim, widths = group.stacks[0].dim, [group.stacks[0].width(r) for r in group.world.ranks]
        # Number of columns of a row that other ranks send if the requester stores the fewest
        # columns.
        leaving = dim - min(widths)
        sent, returned = (others * max(widths), rows * leaving), (most * leaving, rows * leaving)
        return _stage(group, "vectors", sent), _stage(group, "gradients", returned)

    def home(self, facts: Facts, cut: Cut) -> Counts:
        # Number of elements copied to join the columns from all ranks into rows.
        sides = facts.wanted * facts.dim
        received = _received(facts)
        return {
            **received,
            # The gradients exist as sums, as columns for each rank, and as received; or, after they
            # have been sent, as received and in the dtype of the arithmetic, which ``part`` counts.
            "buffer_bytes": received["buffer_bytes"]
            + sides * max(2 * facts.sent_item - facts.item, 0.0),
            "home_elements": sides,
            "copied_bytes": 4 * sides * facts.sent_item,
            "counted_bytes": 4.0 * facts.wanted * (facts.world_size - 1),
        }

    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts:
        size, wanted = facts.world_size, facts.wanted
        return {
            **_served(facts, size * wanted, facts.touched, rows, width),
            "vector_bytes": (size - 1) * wanted * width * facts.sent_item,
            # A rank keeps its own columns of the rows that it requests itself.
            "gradient_bytes": -wanted * width * facts.sent_item,
            **facts.squares(facts.step_share * facts.touched, cut),
        }


def _received(facts: Facts) -> dict[str, float]:
    """Return the work of deduplicating a rank's ids, of receiving and expanding the requested rows,
    and of sending their gradients.
    """
    elements = facts.wanted * facts.dim
    return {
        **expanded(facts.local_lookups, facts.wanted, facts.dim),
        "gradient_bytes": elements * facts.sent_item,
        "copied_bytes": 2 * elements * facts.sent_item,
        "buffer_bytes": facts.window * facts.index_item * facts.local_lookups
        + elements * facts.sent_item,
    }


def _served(
    facts: Facts, requested: float, touched: float, rows: float, width: float
) -> dict[str, float]:
    """Return the work of reading and updating ``requested`` rows, of which ``touched`` are
    distinct."""
    elements = requested * width
    sums = facts.sums_bytes(touched, width, elements)
    return {
        "memory_bytes": facts.stored(rows, width),
        "buffer_bytes": facts.request_bytes(requested)
        + facts.collected_bytes(elements, requested, sums),
        **looked_up(requested, width),
        **facts.steps(touched, width),
    }

"""Defines the exchanges that deduplicate ids, so that each rank requests a row only once.

``exchange/rows.py`` and ``exchange/unique.py`` run them.
"""

from abc import abstractmethod
from collections.abc import Hashable
from typing import ClassVar

import torch

from sbpflow.costs.counts import Counts, Cut, Facts
from sbpflow.embedding.plan.boxed_exchanges import LEAST_COLUMNS, is_copied, powers
from sbpflow.embedding.plan.group_plan import Cuts, Exchange, GroupPlan, Member, Purpose, Stage
from sbpflow.embedding.plan.tables import TableConfig, shards_of
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement

Stages = tuple[Stage, ...]


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
        sent, what, dtype = (most * fans, rows * fans), "each rank's unique rows", torch.int64
        return (
            group.row_stage("counts", "fwd/counts", "all_to_all", dtype, *to_others, "row counts"),
            group.row_stage("ids", "fwd/ids", collective, group.address_dtype(), *sent, what),
            *self.row_stages(group, most, rows, others),
        )


def _vectors(group: GroupPlan, per_rank: int, total: int) -> Stage:
    sizes, what = (per_rank, total), "rows requested by other ranks"
    return group.row_stage("vectors", "fwd/vectors", "all_to_all", group.comm_dtype, *sizes, what)


def _flags(group: GroupPlan, purpose: Purpose, name: str, others: int, total: int) -> Stage:
    """Return the stage that sends one bit per requested row. The other ranks together request at
    most ``others`` rows from a rank.
    """
    size, what = group.world.size, "one bit per row requested by other ranks"
    # The bits for each pair of ranks are padded to whole bytes.
    sizes = (others // 8 + size - 1, total // 8 + size * (size - 1))
    return group.row_stage(purpose, name, "all_to_all", torch.uint8, *sizes, what)


def _early(group: GroupPlan, others: int, total: int) -> Stages:
    """Return the stages of early rows."""
    dim, what = group.stacks[0].dim, "rows that the previous batch does not use"
    rows, dtype = (others * dim, total * dim), group.comm_dtype
    return (
        _flags(group, "flags", "fwd/flags", others, total),
        group.row_stage("early vectors", "fwd/early", "all_to_all", dtype, *rows, what),
    )


def _gradients(group: GroupPlan, collective: str, per_rank: int, total: int) -> Stage:
    sizes, what = (per_rank, total), "unique rows' gradients"
    dtype = group.grad_comm_dtype
    return group.row_stage("gradients", "bwd/vectors", collective, dtype, *sizes, what)


def _late(group: GroupPlan, per_rank: int, total: int, others: int) -> Stages:
    """Return the stages of late gradients. One rank requests at most ``per_rank`` rows."""
    dim, what = group.stacks[0].dim, "gradients of rows that the next batch does not use"
    rows, dtype = (per_rank * dim, total * dim), group.grad_comm_dtype
    return (
        _flags(group, "late flags", "bwd/late flags", others, total),
        group.row_stage("late gradients", "bwd/late", "all_to_all", dtype, *rows, what),
    )


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

    def cuts(self, num_rows: int, dim: int, world_size: int) -> Cuts:
        return [("B", (1, 1))]

    def row_stages(self, group: GroupPlan, most: int, rows: int, others: int) -> Stages:
        to_others = group.stacks[0].dim * (group.world.size - 1)
        return (_gradients(group, "all_gather", most * to_others, rows * to_others),)

    def home(self, facts: Facts, cut: Cut) -> Counts:
        size, dim, wanted = facts.world_size, facts.dim, facts.wanted
        sums = facts.sums_bytes(facts.touched, dim, facts.samples * dim * facts.vectors)
        own, gathered = wanted * dim, wanted * dim * size
        return {
            "memory_bytes": facts.stored(facts.num_rows, dim),
            **facts.steps(facts.touched, dim),
            **_expanded(facts),
            "read_rows": wanted,
            "read_elements": wanted * dim,
            "repeat_elements": wanted * dim * size,
            "copied_bytes": wanted * dim * size * facts.gradient_item,
            "counted_bytes": 4.0 * wanted * (size - 1),
            "gradient_bytes": wanted * dim * (size - 1) * facts.gradient_item,
            "update_ids": wanted * size,
            "update_elements": wanted * size * dim,
            "buffer_bytes": facts.window * facts.index_item * facts.local_lookups
            + wanted * size * facts.index_item
            # The rank's own gradients are freed before the update sums the gathered ones.
            + max(
                (own + gathered) * facts.gradient_item,
                gathered * facts.item * facts.collected + sums,
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

    def cuts(self, num_rows: int, dim: int, world_size: int) -> Cuts:
        rows = [cut for cut in powers(world_size) if cut <= num_rows]
        return [("S(0)", (cut, 1)) for cut in (1, *rows)]

    def row_stages(self, group: GroupPlan, most: int, rows: int, others: int) -> Stages:
        dim = group.stacks[0].dim
        # the maximum, which is reached if one rank owns all rows
        per_rank, total = others * dim, rows * dim
        return (
            _vectors(group, per_rank, total),
            *(_early(group, others, rows) if group.early_rows else ()),
            _gradients(group, "all_to_all", most * dim, total),
            *(_late(group, most, rows, others) if group.late_gradients else ()),
        )

    def home(self, facts: Facts, cut: Cut) -> Counts:
        return {**_expanded(facts), **_received(facts), "counted_bytes": 4.0 * facts.wanted}

    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts:
        size, wanted, touched = facts.world_size, facts.wanted, facts.touched / cut[0]
        # Number of rows that all ranks together request from one owner.
        requested = size * wanted / cut[0]
        sent = (size - 1) / size * requested * width
        local = -wanted / cut[0]
        return {
            **_served(facts, requested, touched, rows, width),
            "vector_bytes": sent * facts.vector_item,
            "counted_bytes": 4.0 * local,
            "gradient_bytes": local * width * facts.gradient_item,
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

    def cuts(self, num_rows: int, dim: int, world_size: int) -> Cuts:
        return [("S(1)", (1, world_size))] if dim // world_size >= LEAST_COLUMNS else []

    def row_stages(self, group: GroupPlan, most: int, rows: int, others: int) -> Stages:
        dim, widths = group.stacks[0].dim, [group.stacks[0].width(r) for r in group.world.ranks]
        # Number of columns of a row that other ranks send if the requester stores the fewest
        # columns.
        leaving = dim - min(widths)
        return (
            _vectors(group, others * max(widths), rows * leaving),
            _gradients(group, "all_to_all", most * leaving, rows * leaving),
        )

    def home(self, facts: Facts, cut: Cut) -> Counts:
        # Number of elements copied to join the columns from all ranks into rows.
        sides = facts.wanted * facts.dim
        received = _received(facts)
        return {
            **_expanded(facts),
            **received,
            # The gradients exist as sums, as columns for each rank, and as received; or, after they
            # have been sent, as received and in the dtype of the arithmetic, which ``part`` counts.
            "buffer_bytes": received["buffer_bytes"]
            + sides * max(2 * facts.gradient_item - facts.item, 0.0),
            "home_elements": sides,
            "copied_bytes": 2 * sides * facts.both_ways,
            "counted_bytes": 4.0 * facts.wanted * (facts.world_size - 1),
        }

    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts:
        size, wanted = facts.world_size, facts.wanted
        return {
            **_served(facts, size * wanted, facts.touched, rows, width),
            "vector_bytes": (size - 1) * wanted * width * facts.vector_item,
            # A rank keeps its own columns of the rows that it requests itself.
            "gradient_bytes": -wanted * width * facts.gradient_item,
            **facts.squares(facts.touched, cut),
        }


def _expanded(facts: Facts) -> dict[str, float]:
    """Return the work of deduplicating a rank's ids and expanding rows to the vectors of its
    samples.
    """
    return {
        "home_sort": facts.local_lookups,
        "home_unique": facts.wanted,
        "expand_rows": facts.local_lookups,
        "expand_elements": facts.local_lookups * facts.dim,
    }


def _received(facts: Facts) -> dict[str, float]:
    """Return the work of receiving requested rows and sending their gradients."""
    elements = facts.wanted * facts.dim
    return {
        "gradient_bytes": elements * facts.gradient_item,
        "copied_bytes": elements * facts.both_ways,
        "buffer_bytes": facts.window * facts.index_item * facts.local_lookups
        + elements * facts.gradient_item,
    }


def _served(
    facts: Facts, requested: float, touched: float, rows: float, width: float
) -> dict[str, float]:
    """Return the work of reading and updating ``requested`` rows, of which ``touched`` are
    distinct."""
    return {
        "memory_bytes": facts.stored(rows, width),
        "buffer_bytes": requested * (facts.index_item + width * facts.item * facts.collected),
        "read_rows": requested,
        "read_elements": requested * width,
        "update_ids": requested,
        "update_elements": requested * width,
        **facts.steps(touched, width),
    }

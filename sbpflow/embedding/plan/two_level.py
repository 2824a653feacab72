"""Defines the exchange of row-split tables in two hops: within hosts, then between hosts.

In the first hop, a rank sends each id to the rank of its own host whose position within the host
equals the position of the owner within the owner's host. The receiver removes duplicates, so each
host sends an id over the network only once. Rows return the same way, and gradients are summed
within the host before they are sent to other hosts. ``exchange/two_level.py`` runs the exchange.
"""

from collections.abc import Hashable

import torch

from sbpflow.costs.counts import Counts, Cut, Facts, expanded, looked_up
from sbpflow.embedding.plan.group_plan import (
    Cuts,
    Exchange,
    ExchangeStep,
    GroupPlan,
    Member,
    Purpose,
    Stage,
)
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement

SBP = "(S(0), S(0))"
HOST, NETWORK = 0, 1  # the rounds of ids: within hosts, between hosts


def is_two_level(layout: Layout) -> bool:
    """Return True if the layout splits rows over hosts, and then over the ranks of each host."""
    return layout.split_dims == (0, 0)


def groups_of(grid: Placement) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the groups of ranks on the same host, and of ranks with the same position on their
    host.
    """
    positions = tuple(tuple(sorted(ranks)) for ranks in grid.axis_groups(0))
    return grid.axis_groups(1), positions


class UniqueTwoLevel(Exchange):
    """The exchange for ``(S(0), S(0))`` tables on a grid of all ranks that has one row per host."""

    name = "unique"
    runs = "sbpflow.embedding.exchange.two_level:TwoLevelGroup"
    calls = ("num_row_transfers", "num_row_transfers")
    even = True

    def accepts(self, layout: Layout, world_size: int) -> bool:
        return is_two_level(layout) and layout.placement.size == world_size

    def refusal(self, table: TableConfig, layout: Layout, world: Placement) -> str:
        hosts = layout.placement.axis_groups(1)
        if all(list(ranks) == sorted(ranks) for ranks in hosts):
            return ""
        ordered = [sorted(ranks) for ranks in hosts]
        return f"lists the ranks of a host out of order; list them in ascending order: {ordered}"

    def cuts(self, num_rows: int, dim: int, world_size: int, num_hosts: int) -> Cuts:
        has_hosts = 1 < num_hosts < world_size
        return [(SBP, (num_hosts, world_size // num_hosts))] if has_hosts else []

    def group_key(self, member: Member) -> tuple[Hashable, ...]:
        return (member.ranks, member.grid, *member.stack_key)

    def stages(self, group: GroupPlan, batch_size: int) -> tuple[Stage, ...]:
        dim, lookups = group.stacks[0].dim, group.stacks[0].lookups()
        hosts, width = group.stacks[0].layouts[0].placement.shape
        own, rows = -(-batch_size // group.world.size) * lookups, batch_size * lookups
        host = min(rows, own * width)  # rows that all ranks of a host together request
        ids, item, sent = group.address_dtype(), group.dtype, group.comm_dtype

        def stage(
            purpose: Purpose, level: int, dtype: torch.dtype, most: int, total: int, what: str
        ) -> Stage:
            direction = "bwd" if purpose == "gradients" else "fwd"
            id = f"{group.name}/{direction}/{purpose}.{('host', 'network')[level]}"
            groups = groups_of(group.stacks[0].layouts[0].placement)[level]
            step = ExchangeStep(groups, id, "all_to_all", dtype, most, total, what)
            return Stage(purpose=purpose, steps=(step,), round=level)

        count, size = torch.int64, group.world.size
        asked, back = "each host's unique rows", "rows requested by other ranks"
        return (
            stage("counts", HOST, count, width - 1, size * (width - 1), "row counts"),
            stage("ids", HOST, ids, own, rows, "each rank's unique rows"),
            stage("counts", NETWORK, count, hosts - 1, size * (hosts - 1), "row counts"),
            stage("ids", NETWORK, ids, host, rows, asked),
            stage("vectors", NETWORK, sent, rows * dim, rows * dim, back),
            stage("vectors", HOST, sent, host * dim, rows * dim, back),
            # Within a host, gradients are sent in the compute dtype, so that they are rounded only
            # once.
            stage("gradients", HOST, item, own * dim, rows * dim, "unique rows' gradients"),
            stage(
                "gradients",
                NETWORK,
                group.grad_comm_dtype,
                host * dim,
                rows * dim,
                "sums of each host's gradients",
            ),
        )

    def home(self, facts: Facts, cut: Cut) -> Counts:
        """Return the total work of a rank. Every rank stores an equal part of the table, so
        ``part`` is not needed.

        A rank requests ``wanted`` rows within its host. A rank receives requests for ``merged``
        distinct rows from its host; these rows cross the network unless the host itself owns them.
        """
        hosts, width = cut
        wanted, dim = facts.wanted, facts.dim
        merged, touched = facts.host_wanted / width, facts.touched / facts.world_size
        near, far = wanted * (width - 1) / width, merged * (hosts - 1) / hosts
        summed = facts.local_lookups + wanted  # number of rows to expand, and of gradients to sum
        return {
            "memory_bytes": facts.stored(facts.num_rows / facts.world_size, dim),
            # The sums of this rank's samples and those received from its host exist together with
            # the merged sums.
            "buffer_bytes": facts.window * facts.index_item * (facts.local_lookups + wanted)
            + facts.request_bytes(merged)
            + dim * 2 * wanted * facts.item
            + facts.collected_bytes(
                dim * merged, merged, facts.sums_bytes(touched, dim, dim * merged)
            ),
            **expanded(summed, wanted + merged, dim),
            **looked_up(merged, dim),
            **facts.steps(touched, dim),
            "copied_bytes": dim * (wanted * (facts.sent_item + facts.item))
            + 2 * dim * merged * facts.sent_item,
            "host_bytes": near * (4.0 + dim * (facts.sent_item + facts.item)),
            "network_bytes": far * (4.0 + 2 * dim * facts.sent_item),
        }

"""Defines the exchanges whose transfer sizes are known in advance: they send dense vectors, or
all-reduce dense gradients.

``exchange/boxed.py`` runs them.
"""

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace

from sbpflow.costs.counts import Counts, Cut, Facts, looked_up
from sbpflow.embedding.plan.group_plan import ALONE, Cuts, Exchange, GroupPlan, Member, Stage
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split

# minimum number of columns per shard: 16 bytes of float32, a quarter of a cache line
LEAST_COLUMNS = 4


class Alone(Exchange):
    """The exchange for all tables in a world of one rank, which needs no transfers."""

    name = ALONE
    runs = "sbpflow.embedding.exchange.boxed:LocalGroup"
    calls = ("num_dense_groups",)
    pools = copies = True

    def accepts(self, layout: Layout, world_size: int) -> bool:
        return world_size == 1

    def stages(self, group: GroupPlan, batch_size: int) -> tuple[Stage, ...]:
        return ()

    def home(self, facts: Facts, cut: Cut) -> Counts:
        out = facts.batch_size * facts.dim * facts.vectors
        return {
            "memory_bytes": facts.stored(facts.num_rows, facts.dim),
            "buffer_bytes": facts.address_bytes(facts.lookups, facts.bags)
            + facts.collected_bytes(
                out,
                facts.lookups,
                facts.sums_bytes(facts.touched, facts.dim, out),
                facts.update_index(facts.lookups),
            ),
            **looked_up(facts.lookups, facts.dim),
            "out_elements": out,
            "home_elements": out,
            **facts.steps(facts.touched, facts.dim),
        }


class DenseAllreduce(Exchange):
    """The exchange for small B tables, for which an all-reduce of dense gradients is cheapest."""

    name = "local"
    runs = "sbpflow.embedding.exchange.boxed:LocalGroup"
    calls = ("num_whole_groups",)
    pools = copies = shares_lookups = dense_allreduce = True

    def accepts(self, layout: Layout, world_size: int) -> bool:
        return is_copied(layout, world_size)

    def suits(self, table: TableConfig, lookups: int, world_size: int) -> bool:
        """Return True if an all-reduce sends no more rows than a gather of the touched rows can.

        With P ranks and a table of R rows, an all-reduce sends 2 (P-1) R rows. In a gather, each
        rank sends its touched rows, at most min(R, lookups / P), to all other ranks, so all ranks
        together send at most P (P-1) min(R, lookups / P) rows.
        """
        return 2 * table.num_rows <= min(world_size * table.num_rows, lookups)

    def stages(self, group: GroupPlan, batch_size: int) -> tuple[Stage, ...]:
        terms, whole = Layout(group.world, (Partial(),)), Layout(group.world, (Broadcast(),))
        # the elements of the dense gradients, and one count per row
        shape = (sum(table.num_rows * (table.dim + 1) for table in group.tables),)
        steps = group.boxing(terms, whole, shape, "bwd/gradients", group.grad_comm_dtype)
        return (Stage(purpose="gradients", steps=steps),)

    def home(self, facts: Facts, cut: Cut) -> Counts:
        size, local = facts.world_size, facts.local_lookups
        out = facts.samples * facts.dim * facts.vectors
        numbers = facts.num_rows * (facts.dim + 1.0)
        sent = 2 * (size - 1) / size * numbers * facts.sent_item
        updated = facts.sums_bytes(facts.touched, facts.dim, out)
        if facts.batches > 1:
            updated = facts.collected_bytes(facts.touched * facts.dim, facts.touched, updated)
        return {
            "memory_bytes": facts.stored(facts.num_rows, facts.dim),
            **facts.steps(facts.touched, facts.dim),
            **looked_up(local, facts.dim),
            "out_elements": out,
            "home_elements": out,
            "whole_elements": numbers,
            # Zeroing, all-reducing, and searching for touched rows pass over all rows. With a
            # factor of 15, ``scheme: auto`` would choose copies for 510 small tables on loopback,
            # where unique rows are 2.9% faster.
            "copied_bytes": 25 * numbers * facts.sent_item,
            "reduced_bytes": sent,
            # The largest part is either the sent gradients with those of the rank's own rows and
            # their index, or the gradients with the terms of other ranks (in all-reduces through
            # shared memory), or the received gradients with those of all touched rows.
            "buffer_bytes": facts.address_bytes(local, facts.bags / size)
            + max(
                numbers * facts.sent_item
                + facts.wanted * facts.dim * facts.item
                + facts.update_index(local),
                numbers * facts.sent_item * (2 - 1 / size) - 2 * out * facts.item,
                numbers * facts.item + updated,
            ),
        }


class _Boxed(Exchange):
    """Base class of exchanges in which owners look up ids for the global batch.

    Boxing sends the vectors and returns the gradients.
    """

    runs = "sbpflow.embedding.exchange.boxed:BoxedGroup"
    looks_up_all = True

    @abstractmethod
    def vector_layouts(self, group: GroupPlan) -> tuple[Layout, Layout]: ...

    def stages(self, group: GroupPlan, batch_size: int) -> tuple[Stage, ...]:
        src, dst = self.vector_layouts(group)
        shape = (batch_size, group.width)
        there = group.boxing(src, dst, shape, "fwd/vectors", group.comm_dtype)
        back = group.boxing(dst.dual(), src.dual(), shape, "bwd/vectors", group.grad_comm_dtype)
        order = group.column_order()
        if order != tuple(range(len(order))):
            # Boxing's columns are in rank order, but those of samples are in the group's order.
            there = (*there[:-1], replace(there[-1], dst_columns=order))
            back = (replace(back[0], src_columns=order), *back[1:])
        return Stage(purpose="vectors", steps=there), Stage(purpose="gradients", steps=back)

    def home(self, facts: Facts, cut: Cut) -> Counts:
        out = facts.samples * facts.dim * facts.vectors
        received = out * cut[0]
        # If every rank stores rows with all columns, all ranks need all gradients, which are
        # all-gathered in a ring. ``part`` subtracts a rank's own gradients from the other ones.
        gathers = self.adds_terms and cut == (facts.world_size, 1)
        in_ring = received - out if gathers else 0.0
        return {
            "home_elements": received,
            "copied_bytes": 2 * facts.sent_item * (1 + cut[0]) * out,
            # the receive buffer of partial sums, which is kept for the next batch
            "buffer_bytes": received * facts.sent_item * self.adds_terms,
            "gradient_bytes": (received - in_ring) * facts.sent_item,
            "reduced_bytes": in_ring * facts.sent_item,
            "ids_bytes": 4.0 * facts.sent_ids / facts.world_size * (cut[0] * cut[1]),
        }

    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts:
        size, reads, touched = facts.world_size, facts.lookups / cut[0], facts.touched / cut[0]
        others, out = (size - 1) / size, facts.batch_size * width * facts.vectors
        # Unless all ranks share the same rows, the sums of squares are padded to the largest batch
        # (``GroupPlan.squares_sent``).
        alike = cut[1] == size and not self.adds_terms
        squares = facts.step_share * touched if alike else facts.most_lookups
        return {
            "memory_bytes": facts.stored(rows, width),
            "buffer_bytes": self._part_bytes(facts, cut, width, squares),
            "seen_ids": facts.lookups,
            **looked_up(reads, width),
            "out_elements": out,
            "copied_bytes": 4 * facts.sent_item * out,
            "vector_bytes": others * out * facts.sent_item,
            # ``home`` includes what a rank would send to itself; the negative counts subtract it.
            "gradient_bytes": -facts.samples * width * facts.vectors * facts.sent_item,
            "ids_bytes": -4.0 * facts.sent_ids / size,
            **facts.steps(touched, width),
            **facts.squares(squares, cut),
        }

    def _part_bytes(self, facts: Facts, cut: Cut, width: float, squares: float) -> float:
        """Return the bytes that a shard needs in transfers and updates. The ranks that share its
        rows sum this number of ``squares`` in each batch.
        """
        item, reads = facts.item, facts.lookups / cut[0]
        out = facts.batch_size * width * facts.vectors
        own = out / cut[0]  # elements of the vectors of this rank's samples, for its shards
        filters, shares = cut[0] > 1 and not facts.sorts_ahead, facts.shares_state and cut[1] > 1
        bags = facts.batch_size * facts.vectors if filters else facts.bags
        held = facts.window * 4.0 * facts.sent_ids
        held += facts.address_bytes(reads if filters else facts.lookups, bags)
        if self.adds_terms and cut[0] > 1 and cut[1] == 1:
            # ``home`` includes the rank's own term, which is not sent.
            held -= facts.samples * width * facts.vectors * facts.sent_item
        padded = facts.batches * squares if shares else 0.0
        sums = facts.sums_bytes(facts.touched / cut[0], width, own, padded)
        phases = [facts.collected_bytes(out, reads, sums, facts.update_index(reads))]
        if facts.sent_item != item:  # received gradients are converted
            phases.append(out * (facts.sent_item + item) - 2 * own * item)
        if filters and facts.sent_ids == facts.lookups:
            # While a rank selects its own ids in a matrix, each id has a flag and two copies of an
            # offset. The next batch is sent later.
            arriving = (1 + 2 * 8 - 4) * facts.lookups
            phases.append(arriving - 2 * own * item)
        return held + max(phases)


class Columns(_Boxed):
    """The exchange for tables on one rank and S(1) tables. The vectors have an uneven S(1) layout,
    with columns in rank order.
    """

    name = "columns"
    calls = ("num_dense_groups",)

    def accepts(self, layout: Layout, world_size: int) -> bool:
        kind = layout.nd_sbp[0]
        if len(layout.nd_sbp) > 1 or isinstance(kind, Partial):
            return False
        return layout.placement.size == 1 or layout.split_dims == (1,)

    def cuts(self, num_rows: int, dim: int, world_size: int, num_hosts: int) -> Cuts:
        columns = [cut for cut in powers(world_size) if dim // cut >= LEAST_COLUMNS]
        return [("B", (1, 1)), *(("S(1)", (1, cut)) for cut in columns)]

    def vector_layouts(self, group: GroupPlan) -> tuple[Layout, Layout]:
        sizes = tuple(group.rank_width(rank) for rank in group.world.ranks)
        return Layout(group.world, (Split(1, sizes),)), Layout(group.world, (Split(0),))


class Reduce(_Boxed):
    """The exchange for S(0) and (S(0), S(1)) tables. Owners compute partial sums of vectors, with
    layout P or, on a grid, (P, S(1)).
    """

    name = "reduce"
    calls = ("num_summed_groups",)
    pools = adds_terms = shares_lookups = is_default = True

    def accepts(self, layout: Layout, world_size: int) -> bool:
        return layout.split_dims in ((0,), (0, 1))

    def cuts(self, num_rows: int, dim: int, world_size: int, num_hosts: int) -> Cuts:
        columns = [cut for cut in powers(world_size) if dim // cut >= LEAST_COLUMNS]
        rows = [cut for cut in powers(world_size) if cut <= num_rows]
        grids = [(r, c) for r in rows for c in columns if r * c <= world_size]
        return [
            *(("S(0)", (cut, 1)) for cut in (1, *rows)),
            *(("(S(0), S(1))", grid) for grid in grids),
        ]

    def part(self, facts: Facts, cut: Cut, rows: float, width: float) -> Counts:
        return {**super().part(facts, cut, rows, width), "searched_ids": facts.lookups}

    def group_key(self, member: Member) -> tuple[Hashable, ...]:
        return member.ranks, member.grid, member.columns if member.sums else None

    def vector_layouts(self, group: GroupPlan) -> tuple[Layout, Layout]:
        home = Layout(group.world, (Split(0),))
        if group.grid is None:
            return Layout(Placement.of(group.world.device_type, group.owners), (Partial(),)), home
        first_row = group.grid.ranks[: group.grid.shape[1]]
        sizes = tuple(group.rank_width(rank) for rank in first_row)
        return Layout(group.grid, (Partial(), Split(1, sizes))), home


def is_copied(layout: Layout, world_size: int) -> bool:
    """Return True for B on all ranks."""
    return layout.nd_sbp == (Broadcast(),) and layout.placement.size == world_size


def powers(size: int) -> list[int]:
    """Return 2, 4, 8, ... below ``size``, followed by ``size``."""
    return [*(2**n for n in range(1, size.bit_length()) if 2**n < size), size]

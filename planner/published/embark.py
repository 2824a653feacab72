"""Implements EMBark's greedy planner: it repeatedly halves the most expensive shard (table, row
part, column part).

Source: RecSys'24 paper; NVIDIA-Merlin/HugeCTR 2f2016f, ``hugectr/sharding/planner.py`` and
``generate_plan.py``. A rank's cost is a weighted sum of its shards' lookups and traffic. Shards are
placed in order of descending cost on the cheapest rank with enough memory, but two shards of one
table are never placed on the same rank. Then the table of the most expensive shard is cut in two by
rows or by columns, depending on which cut leads to the lower maximum, and all shards are placed
again, at most 20 times. The planner compares these plans with a plan that cuts all tables by rows
over all ranks, and returns the best. Each group of tables is copied to all ranks, exchanges partial
sums, or exchanges distinct rows.

Differences: Two branches of the source choose the wrong cut if only one cut is possible; here they
are fixed. The weights, which are chosen by hand in the source, come from this machine's prices. The
two thresholds that select the tables to copy and the tables that exchange distinct rows are also
chosen by hand in the source. Here they are chosen by price from a grid of nine points, which leads
to better plans than the defaults. Tables with both row and column parts are placed on a grid of
ranks.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

from sbpflow.planner.published.greedy import size_greedy
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.problem import BYTES, Assignment, Floats, Move, price_of
from sbpflow.planner.shapes import COPIED, WHOLE, option_number
from sbpflow.planner.task import Shape

ITERATIONS = 20
LEAST_COLUMNS = 32  # only column parts wider than this are halved, as in EMBark
# Shares of tables to try: for the smallest tables, which are copied, and for the tables with the
# fewest lookups, which exchange distinct rows.
SHARES = (0.0, 0.25, 0.5)


def embark(setting: Setting) -> Assignment:
    """Return the cheapest plan over ``SHARES`` of copied tables and of tables with ``unique``."""
    count = len(setting.tables)
    small, cool = (np.argsort(a, kind="stable") for a in (setting.held_bytes, setting.pooling))
    plans: list[Assignment] = []
    for copied_share, unique_share in product(SHARES, SHARES):
        copied = set(small[: int(copied_share * count)].tolist())
        unique = set(cool[: int(unique_share * count)].tolist())
        plan = _Search(setting, copied, unique).run()
        if plan is not None:
            plans.append(plan)
    if not plans:  # no plan fits, so return a greedy plan of whole tables
        return size_greedy(setting)
    return min(plans, key=lambda plan: price_of(setting.problem, plan).rank)


Cuts = dict[int, tuple[int, int]]  # (row parts, column parts) of each table that is not copied


class _Placed(NamedTuple):
    """A plan with its cost and the table of its costliest shard (-1 if all tables are copied).
    ``plan`` is None if ``table`` does not fit, or cannot be split as it should be.
    """

    cost: float
    plan: Assignment | None
    table: int


class _Search:
    """Searches for plans with given tables that are copied, and that exchange distinct rows."""

    def __init__(self, setting: Setting, copied: set[int], unique: set[int]) -> None:
        """Derive the weights from the prices of whole tables."""
        self.setting, self.copied, self.unique = setting, copied, unique
        batch = setting.task.batch_size
        looked_up = float((batch * setting.dims * setting.pooling).sum())
        sent = float((batch * setting.dims).sum())
        self.ms_per_lookup = float(setting.rows[:, 0].sum()) / looked_up  # per element
        self.ms_per_output = setting.transfer_ms / sent

    def run(self) -> Assignment | None:
        """Return the best of at most 22 plans by the source's own cost, or None if none fits."""
        cuts = {t: (1, 1) for t in range(len(self.setting.tables)) if t not in self.copied}
        placed = [self._place(cuts)]
        for _ in range(ITERATIONS):
            halved = self._halved(placed[-1].table, cuts)
            if halved is None:
                break
            cuts = halved
            placed.append(self._place(cuts))
        placed.append(self._place(dict.fromkeys(cuts, (self.setting.num_ranks, 1))))
        return min(placed, key=lambda each: each.cost).plan

    def _shape(self, table: int, cut: tuple[int, int]) -> Shape:
        rows, columns = cut
        if table in self.unique and columns == 1:
            return Shape("S(0)", "unique", (rows, 1))
        if rows == columns == 1:
            return WHOLE
        if columns == 1:
            return Shape("S(0)", "reduce", cut)
        return Shape("S(1)", "columns", cut) if rows == 1 else Shape("(S(0), S(1))", "reduce", cut)

    def _shard_cost(self, table: int, cut: tuple[int, int]) -> float:
        rows, columns = cut
        batch, dim = self.setting.task.batch_size, self.setting.dims[table]
        looked_up = batch * self.setting.pooling[table] * dim / rows / columns
        return float(self.ms_per_lookup * looked_up + self.ms_per_output * batch * dim / columns)

    def _place(self, cuts: Cuts) -> _Placed:
        problem = self.setting.problem
        loads, moves = np.zeros(self.setting.num_ranks), dict[int, Move]()
        held = problem.base[:, BYTES]
        for table in self.copied:
            number = option_number(problem.options[table], COPIED)
            if number is None:
                return _Placed(np.inf, None, table)
            moves[table] = Move(number, ())
            held = held + problem.options[table][number].home[BYTES]
        costs = {table: self._shard_cost(table, cut) for table, cut in cuts.items()}
        for table in sorted(cuts, key=lambda t: (-costs[t], t)):
            number = option_number(problem.options[table], self._shape(table, cuts[table]))
            if number is None:
                return _Placed(np.inf, None, table)
            option = problem.options[table][number]
            each = float(option.shards[:, BYTES].max())
            held = held + option.home[BYTES]
            ranks = self._cheapest(loads, held + each, option.num_shards)
            if ranks is None:
                return _Placed(np.inf, None, table)
            loads[list(ranks)] += costs[table]
            held[list(ranks)] += each
            moves[table] = Move(number, ranks)
        plan = tuple(moves[table] for table in range(len(self.setting.tables)))
        return _Placed(float(loads.max()), plan, max(costs, key=lambda t: costs[t], default=-1))

    def _cheapest(self, loads: Floats, held: Floats, count: int) -> tuple[int, ...] | None:
        fits = np.flatnonzero(held <= self.setting.problem.limit_bytes)
        if len(fits) < count:
            return None
        chosen = fits[np.argsort(loads[fits], kind="stable")[:count]]
        return tuple(sorted(int(rank) for rank in chosen))

    def _halved(self, table: int, cuts: Cuts) -> Cuts | None:
        """Halve the table by rows or by columns, whichever leads to the lower maximum cost of any
        rank. Returns the cuts, or None if the table cannot be halved.
        """
        if table not in cuts:
            return None
        rows, columns = cuts[table]
        ways = [(2 * rows, columns)]
        width = self.setting.tables[table].dim // columns
        if width % 2 == 0 and width > LEAST_COLUMNS and table not in self.unique:
            ways.append((rows, 2 * columns))
        tried = [
            {**cuts, table: way}
            for way in ways
            if self.setting.option(table, self._shape(table, way)) is not None
        ]
        return min(tried, key=lambda cut: self._place(cut).cost, default=None)

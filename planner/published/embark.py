"""EMBark's greedy planner: shards (table, row part, column part), the most expensive one halved.

Source: RecSys'24 paper; NVIDIA-Merlin/HugeCTR 2f2016f, ``hugectr/sharding/planner.py`` and
``generate_plan.py``. A rank's cost is a weighted sum of what its shards look up and send; shards
go largest first to the cheapest rank with room, never two of one table to one rank. Then the
dearest shard's table is cut in two, by rows or by columns, whichever gives the lower maximum, and
all is placed again, at most 20 times; the best of these plans, and of all tables cut by rows over
all ranks, is taken. Clusters of tables are copied, or compressed by reduction or uniquely.
Differences: the two branches that take the other cut when one alone is possible are put right; the
weights, given by hand there, are read from this machine's prices; the two thresholds that say
which tables are copied and which are unique, given by hand there, are tried on a grid of nine, and
the plan kept that costs least as measured, which is kinder to it than its defaults; tables with
both row and column parts lie on a grid of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sbpflow.planner.published.greedy import size_greedy
from sbpflow.planner.published.setting import EXCHANGE, Setting
from sbpflow.planner.search.problem import Assignment, Floats, Move, price_of
from sbpflow.planner.shapes import COPIED, WHOLE, option_number
from sbpflow.planner.task import Shape

ITERATIONS = 20
LEAST_COLUMNS = 32  # a column part is halved only while wider than this, as in the source
SHARES = (0.0, 0.25, 0.5)  # of the tables: the smallest copied, the least hot unique


@dataclass(frozen=True, slots=True)
class _Weights:
    per_lookup: float  # milliseconds per element looked up
    per_output: float  # and per element sent


def embark(setting: Setting) -> Assignment:
    """The plan that costs least, of those with different shares of copied and unique tables."""
    plans = [
        plan for copied in SHARES for unique in SHARES for plan in _planned(setting, copied, unique)
    ]
    if not plans:  # none has room: as the greedy by size would have it, and the plan says so
        return size_greedy(setting)
    return min(plans, key=lambda plan: price_of(setting.problem, plan).rank)


def _planned(setting: Setting, copied: float, unique: float) -> Iterator[Assignment]:
    search = _Search(setting, _weights(setting))
    count = len(setting.tables)
    small = {int(t) for t in np.argsort(setting.held_bytes, kind="stable")[: int(copied * count)]}
    cool = {int(t) for t in np.argsort(setting.pooling, kind="stable")[: int(unique * count)]}
    found = search.run(small, cool - small)
    if found is not None:
        yield found


def _weights(setting: Setting) -> _Weights:
    """From one whole table's prices: the source takes memory and link bandwidths by hand."""
    pricing, base = setting.problem.pricing, setting.problem.base[0]
    phases = pricing.rank_ms(base + setting.rows) - pricing.rank_ms(base)
    batch = setting.task.batch_size
    work = [n for n in range(phases.shape[1]) if n not in EXCHANGE]
    looked_up = float((batch * setting.dims * setting.pooling).sum())
    sent = float((batch * setting.dims).sum())
    return _Weights(
        per_lookup=float(phases[:, work].sum()) / looked_up,
        per_output=float(phases[:, EXCHANGE].sum()) / sent,
    )


class _Search:
    def __init__(self, setting: Setting, weights: _Weights) -> None:
        self.setting, self.weights = setting, weights

    def run(self, copied: set[int], unique: set[int]) -> Assignment | None:
        """The best of at most 21 plans by the source's own cost; None if none has room."""
        cuts = {t: (1, 1) for t in range(len(self.setting.tables)) if t not in copied}
        best: tuple[float, Assignment] | None = None
        for _ in range(ITERATIONS + 1):
            placed = self._place(cuts, copied, unique)
            if isinstance(placed, int):  # no room for a shard of this table
                table = placed
            else:
                cost, plan, table = placed
                if best is None or cost < best[0]:
                    best = (cost, plan)
            if table < 0:
                break
            halved = self._halved(table, cuts, copied, unique)
            if halved is None:
                break
            cuts = halved
        everywhere = {t: (self.setting.num_ranks, 1) for t in cuts}
        placed = self._place(everywhere, copied, unique)
        if not isinstance(placed, int) and (best is None or placed[0] < best[0]):
            best = (placed[0], placed[1])
        return None if best is None else best[1]

    def _shape(self, table: int, cut: tuple[int, int], unique: set[int]) -> Shape:
        rows, columns = cut
        if table in unique and columns == 1:
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
        return float(
            self.weights.per_lookup * looked_up + self.weights.per_output * batch * dim / columns
        )

    def _place(
        self, cuts: dict[int, tuple[int, int]], copied: set[int], unique: set[int]
    ) -> tuple[float, Assignment, int] | int:
        """(cost, plan, table of the dearest shard), or the table that has no room."""
        problem, size = self.setting.problem, self.setting.num_ranks
        loads, moves = np.zeros(size), dict[int, Move]()
        held = problem.pricing.memory(problem.base)
        for table in copied:
            number = option_number(problem.options[table], COPIED)
            if number is None:
                return table
            moves[table] = Move(number, ())
            held = held + float(problem.pricing.memory(problem.options[table][number].home))
        costs = {table: self._shard_cost(table, cut) for table, cut in cuts.items()}
        for table in sorted(cuts, key=lambda t: (-costs[t], t)):
            number = option_number(problem.options[table], self._shape(table, cuts[table], unique))
            if number is None:
                return table
            option = problem.options[table][number]
            each = float(problem.pricing.memory(option.shards).max())
            held = held + float(problem.pricing.memory(option.home))
            ranks = self._cheapest(loads, held + each, option.num_shards)
            if ranks is None:
                return table
            loads[list(ranks)] += costs[table]
            held[list(ranks)] += each
            moves[table] = Move(number, ranks)
        plan = tuple(moves[table] for table in range(len(self.setting.tables)))
        return float(loads.max()), plan, max(costs, key=lambda t: costs[t], default=-1)

    def _cheapest(self, loads: Floats, held: Floats, count: int) -> tuple[int, ...] | None:
        fits = np.flatnonzero(held <= self.setting.problem.limit_bytes)
        if len(fits) < count:
            return None
        chosen = fits[np.argsort(loads[fits], kind="stable")[:count]]
        return tuple(sorted(int(rank) for rank in chosen))

    def _halved(
        self,
        table: int,
        cuts: dict[int, tuple[int, int]],
        copied: set[int],
        unique: set[int],
    ) -> dict[int, tuple[int, int]] | None:
        """The table cut once more, the way that gives the lower maximum; None if it cannot be."""
        if table not in cuts:
            return None
        rows, columns = cuts[table]
        ways = [(2 * rows, columns)]
        width = self.setting.tables[table].dim // columns
        if width % 2 == 0 and width > LEAST_COLUMNS and table not in unique:
            ways.append((rows, 2 * columns))
        tried: list[tuple[float, dict[int, tuple[int, int]]]] = []
        for way in ways:
            shape = self._shape(table, way, unique)
            if way[0] * way[1] > self.setting.num_ranks or not self.setting.option(table, shape):
                continue
            cut = {**cuts, table: way}
            placed = self._place(cut, copied, unique)
            tried.append((np.inf if isinstance(placed, int) else placed[0], cut))
        return min(tried, key=lambda one: one[0])[1] if tried else None

"""Implements local search: remove some tables, reinsert each optimally, repeat.

The method is ruin and recreate [Schrimpf et al., J. Computational Physics 2000]. A ruin removes a
whole group of tables, random tables, or tables from the slowest rank and a random rank. After
reinsertion, a few moves and swaps of whole tables even out the ranks. A worse plan is accepted if
the difference is below a threshold that decreases to 0. From a plan that fits, the search may pass
through plans that slightly exceed the memory limits. The same seed and number of insertions lead to
the same plan. A final descent moves single tables until no move helps.
"""

from collections.abc import Callable, Sequence

import numpy as np

from sbpflow.planner.search.balance import balance
from sbpflow.planner.search.insertion import Inserter, goal
from sbpflow.planner.search.problem import BYTES, Assignment, Key, State

START_THRESHOLD = 0.02  # initially, a plan may exceed the current goal by this fraction
# A fraction ``GROUP_RUIN`` of the ruins moves a whole group to other ranks; every other ruin
# removes at most ``LARGEST_RUIN`` tables.
LARGEST_RUIN = 12
GROUP_RUIN = 0.02
# Between ranks of different speeds, the best place for one table often blocks a better place for
# another, so an insertion is skipped with this probability.
SKIP = 0.3
STEPS = 4  # number of steps of ``balance`` after each ruin
# penalty for an excess that equals the limit of a rank, relative to the time of a plan that fits
PENALTY = 20.0
LEAST_GAIN = 1e-6  # relative; smaller differences between two plans are rounding errors


def build(inserter: Inserter, order: Sequence[int]) -> Assignment:
    """Build a plan by inserting tables in ``order``, each at the place that is best then."""
    state = State(inserter.problem)
    for table in order:
        state.add(table, inserter.best(state, table).move)
    return state.assignment()


def descend(inserter: Inserter, start: Assignment) -> Assignment:
    """Move single tables as long as a move makes the plan faster or reduces its excess. In the
    result, every table is at its best place, given the others.
    """
    state = State(inserter.problem, start)
    queue, waiting = list(range(len(start))), 0
    while waiting < len(queue):
        table = queue.pop(0)
        queue.append(table)
        waiting = 0 if _moved(state, inserter, table) else waiting + 1
    return state.assignment()


def _moved(state: State, inserter: Inserter, table: int) -> bool:
    """Move the table to a better place, if there is one."""
    price, before = state.price(), state.remove(table)
    for insertion in inserter.ranked(state, table):
        if price.excess_bytes or insertion.ms < price.ms * (1 - LEAST_GAIN):
            state.add(table, insertion.move)
            after = state.price()
            less = after.excess_bytes < price.excess_bytes * (1 - LEAST_GAIN)
            same = after.excess_bytes <= price.excess_bytes
            if less or (same and after.ms < price.ms * (1 - LEAST_GAIN)):
                return True
            state.remove(table)
    state.add(table, before)
    return False


class LocalSearch:
    """Improves plans of one problem until a plan takes at most ``enough_ms``.

    Every random choice depends on ``seed``.
    """

    def __init__(self, inserter: Inserter, seed: int, enough_ms: float = 0.0) -> None:
        self.problem, self.inserter, self.enough_ms = inserter.problem, inserter, enough_ms
        self.random = np.random.default_rng(seed)
        self.insertions = 0

    def improve(
        self, start: Assignment, insertions: int, progress: Callable[[int], object] = int
    ) -> Assignment:
        """Return the best plan found within this many insertions, never worse than ``start``.

        ``progress`` is called with the number of insertions since the last call.
        """
        state = State(self.problem, start)
        price = state.price()
        best, best_rank = start, price.rank
        inserter = self.inserter
        if price.feasible:
            inserter = inserter.with_penalty(PENALTY * price.ms / self.problem.limit_bytes)
        balance(state, 10 * self.problem.num_tables)
        current = float(goal(self.problem, state.loads, inserter.penalty))
        if state.price().rank < best_rank:
            best, best_rank = state.assignment(), state.price().rank
        used, first = 0, self.insertions
        while used < insertions and best_rank > (0.0, self.enough_ms):
            threshold = START_THRESHOLD * current * (1.0 - used / insertions) ** 2
            reached = self._ruin(state, inserter, current + threshold)
            if reached is not None:
                current = reached
                rank = state.price().rank
                if rank < best_rank:
                    best, best_rank = state.assignment(), rank
            progress(self.insertions - first - used)
            used = self.insertions - first
        return best

    def _ruin(self, state: State, inserter: Inserter, limit: float) -> float | None:
        """Ruin and recreate once. Returns the new goal, or None if the plan is unchanged."""
        before = list(state.moves)
        avoid: Key | None = None
        if self.random.random() < GROUP_RUIN and len(state.present) > 1:
            first_join = self.problem.first_join
            keys = sorted((key for key in state.present if key[0] < first_join), key=repr)
            avoid = keys[int(self.random.integers(len(keys)))]
            tables = [
                table
                for table, move in enumerate(before)
                if move and avoid in self.problem.options[table][move.option].keys(move.ranks)
            ]
        else:
            tables = self._chosen(state)
        for table in tables:
            state.remove(table)
        noise = self.random.uniform(0.8, 1.25, len(tables))
        order = np.argsort(-self.problem.weights[tables] * noise, kind="stable")
        for place in order:
            ranked = inserter.ranked(state, tables[place], avoid)
            state.add(tables[place], ranked[self._place(len(ranked))].move)
        balance(state, STEPS)
        self.insertions += len(tables)
        reached = float(goal(self.problem, state.loads, inserter.penalty))
        if reached < limit:
            return reached
        changed = [(t, move) for t, move in enumerate(before) if move != state.moves[t]]
        for table, _ in changed:
            state.remove(table)
        for table, move in changed:
            if move is not None:
                state.add(table, move)
        return None

    def _place(self, count: int) -> int:
        """Choose one of ``count`` ranked insertions."""
        if self.problem.has_equal_ranks:
            return 0
        return min(int(self.random.geometric(1.0 - SKIP)) - 1, count - 1)

    def _chosen(self, state: State) -> list[int]:
        """Choose the tables to remove: from a slowest rank and a random rank, or from all ranks."""
        most = min(LARGEST_RUIN, max(4, self.problem.num_tables // 3))
        count = min(int(self.random.integers(1, most + 1)), self.problem.num_tables)
        # Rounding errors of removed tables can make loads of 0 slightly negative.
        heavy = np.maximum(state.loads[:, :BYTES].max(axis=0), 0.0)
        if self.random.random() < 0.3 or not heavy.any():
            return self._drawn(range(self.problem.num_tables), count)
        slowest = int(state.loads[:, self.random.choice(BYTES, p=heavy / heavy.sum())].argmax())
        other = int(self.random.integers(self.problem.num_ranks))
        near = [
            table
            for table, move in enumerate(state.moves)
            if move is not None and (slowest in move.ranks or other in move.ranks)
        ]
        return self._drawn(near or range(self.problem.num_tables), count)

    def _drawn(self, tables: Sequence[int], count: int) -> list[int]:
        chosen = self.random.choice(len(tables), min(count, len(tables)), replace=False)
        return [tables[int(place)] for place in chosen]

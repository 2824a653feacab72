"""Implements local search on the full model: remove some tables, reinsert each optimally, repeat.

The method is ruin and recreate [Schrimpf et al., J. Computational Physics 2000]. A ruin removes
tables of the slowest rank and another rank, a whole group, or random tables; a swap exchanges two
tables between ranks. A worse plan is accepted within a threshold that decreases to 0. The same seed
and number of insertions give the same plan.
"""

from collections.abc import Sequence

import numpy as np

from sbpflow.planner.search.insertion import Inserter, goal, goal_of
from sbpflow.planner.search.problem import Assignment, Floats, Key, Move, Problem, State

START_THRESHOLD = 0.02  # a worse plan is accepted up to this initial excess of the goal
# A ruin removes at most ``LARGEST_RUIN`` tables; a share ``GROUP_RUIN`` of the ruins moves a whole
# group to other ranks.
LARGEST_RUIN = 12
GROUP_RUIN = 0.02
SWAP_SHARE = 0.3


def build(
    problem: Problem, inserter: Inserter, order: Sequence[int], start: Sequence[Move] = ()
) -> State:
    """Build a whole plan by inserting tables in ``order``, each in its currently best place."""
    state = State(problem, start)
    for table in order:
        state.add(table, inserter.best(state, table).move)
    return state


def lay_out(problem: Problem, inserter: Inserter, order: Sequence[int]) -> State:
    """Build a plan from scores only, for inserters in which only the ranks are open."""
    state = State(problem)
    for table in order:
        state.add(table, inserter.quick(state, table))
    return state


def weights_of(problem: Problem, inserter: Inserter) -> Floats:
    """Return [tables] ms of each table alone, in its best option; heavy tables are placed first.

    The result is summed over ranks and phases, so splitting a table does not make it light.
    """
    empty = State(problem)
    before = problem.pricing.rank_ms(empty.totals).sum()
    weights = np.zeros(problem.num_tables)
    for table in range(problem.num_tables):
        empty.add(table, inserter.best(empty, table).move)
        weights[table] = problem.pricing.rank_ms(empty.totals).sum() - before
        empty.remove(table)
    return weights


class LocalSearch:
    """Improves plans of one problem; every random choice depends on ``seed``."""

    def __init__(self, problem: Problem, inserter: Inserter, weights: Floats, seed: int) -> None:
        self.problem, self.inserter, self.weights = problem, inserter, weights
        self.random = np.random.default_rng(seed)
        self.insertions = 0

    def improve(self, start: Assignment, insertions: int) -> Assignment:
        """Return the best plan after this many insertions, never worse than ``start``."""
        state = State(self.problem, start)
        current = goal(state)
        best, best_rank = start, state.price().rank
        used, first = 0, self.insertions
        while used < insertions:
            threshold = START_THRESHOLD * current * (1.0 - used / insertions) ** 2
            if self.random.random() < SWAP_SHARE:
                reached = self._swap(state, current + threshold)
                self.insertions += 2
            else:
                reached = self._ruin(state, current + threshold)
            if reached is not None:
                current = reached
                rank = state.price().rank
                if rank < best_rank:
                    best, best_rank = state.assignment(), rank
            used = self.insertions - first
        return best

    def _ruin(self, state: State, limit: float) -> float | None:
        """Ruin and recreate once; return the new goal, or None with the plan unchanged."""
        before = list(state.moves)
        avoid: frozenset[object] = frozenset()
        if self.random.random() < GROUP_RUIN and len(state.present) > 1:
            key = self._any_key(state)
            tables = [t for t, move in enumerate(before) if move and key in self._keys(t, move)]
            avoid = frozenset((key,))
        else:
            tables = self._chosen(state)
        for table in tables:
            state.remove(table)
        noise = self.random.uniform(0.8, 1.25, len(tables))
        order = np.argsort(-self.weights[tables] * noise, kind="stable")
        reached = 0.0
        for place in order:
            insertion = self.inserter.best(state, tables[place], avoid)
            state.add(tables[place], insertion.move)
            reached = insertion.goal
        self.insertions += len(tables)
        if reached < limit:
            return reached
        for table in tables:
            state.remove(table)
        for table in tables:
            move = before[table]
            if move is not None:
                state.add(table, move)
        return None

    def _keys(self, table: int, move: Move) -> tuple[Key, ...]:
        return self.problem.options[table][move.option].keys(move.ranks)

    def _any_key(self, state: State) -> Key:
        keys = sorted(state.present, key=repr)
        return keys[int(self.random.integers(len(keys)))]

    def _chosen(self, state: State) -> list[int]:
        """Choose the tables to remove: from a phase's slowest rank and another rank, or any
        tables.
        """
        most = max(2, min(LARGEST_RUIN, self.problem.num_tables // 3))
        count = min(int(self.random.integers(1, most + 1)), self.problem.num_tables)
        if self.random.random() < 0.3:
            return self._drawn(range(self.problem.num_tables), count)
        phases = self.problem.pricing.rank_ms(state.totals)
        heavy = phases.max(axis=0)
        phase = int(self.random.choice(len(heavy), p=heavy / heavy.sum()))
        slowest = int(phases[:, phase].argmax())
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

    def _swap(self, state: State, limit: float) -> float | None:
        """Exchange a whole table of a slowest rank with the best table elsewhere, if that helps."""
        options = self.problem.options
        whole = {
            table: move.ranks[0]
            for table, move in enumerate(state.moves)
            if move is not None and options[table][move.option].whole
        }
        phases = self.problem.pricing.rank_ms(state.totals)
        slowest = int(phases[:, int(self.random.integers(phases.shape[1]))].argmax())
        candidates = [table for table, rank in whole.items() if rank == slowest]
        others = [table for table, rank in whole.items() if rank != slowest]
        if not candidates or not others:
            return None
        table = candidates[int(self.random.integers(len(candidates)))]
        others = self._drawn(others, 64)
        goals = self._swap_goals(state, table, others, whole, phases)
        place = int(np.argmin(goals))
        if goals[place] >= limit:
            return None
        return self._exchange(state, table, others[place], limit)

    def _swap_goals(
        self,
        state: State,
        table: int,
        others: list[int],
        whole: dict[int, int],
        phases: Floats,
    ) -> Floats:
        def row(table: int) -> Floats:
            move = state.moves[table]
            return self.problem.options[table][move.option].shards[0] if move else phases[0] * 0

        # A swap changes only two ranks, so only these ranks are priced; others keep their phases.
        rank, places = whole[table], np.arange(len(others))
        change = np.stack([row(other) for other in others]) - row(table)
        other_ranks = np.array([whole[other] for other in others])
        totals = np.repeat(state.totals[None], len(others), axis=0)
        totals[:, rank] += change
        totals[places, other_ranks] -= change
        rows = np.stack([totals[:, rank], totals[places, other_ranks]], axis=1)
        changed = self.problem.pricing.rank_ms(rows)
        after = np.repeat(phases[None], len(others), axis=0)
        after[:, rank] = changed[:, 0]
        after[places, other_ranks] = changed[:, 1]
        return goal_of(self.problem, totals, after, self.problem.pricing.combine(after))

    def _exchange(self, state: State, table: int, other: int, limit: float) -> float | None:
        """Swap two whole tables; undo the swap if keys that depend on ranks make it too
        expensive.
        """
        first, second = state.remove(table), state.remove(other)
        state.add(table, Move(first.option, second.ranks))
        state.add(other, Move(second.option, first.ranks))
        reached = goal(state)
        if reached < limit:
            return reached
        state.remove(table)
        state.remove(other)
        state.add(table, first)
        state.add(other, second)
        return None

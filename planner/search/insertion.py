"""Finds the best way to add one table to a plan, over all options and suitable ranks.

Greedy construction, re-insertion and the runner-ups of a report use this module. A cheap score per
rank selects ranks for the shards; the full model prices the selected moves.
"""

from dataclasses import dataclass

import numpy as np

from sbpflow.planner.search.problem import Floats, Ints, Key, Move, Option, Problem, State

# This is the mean load's share in the search goal, in addition to the step's time. The step is a
# maximum over ranks, so most moves do not change it; the mean rewards less work and balanced work.
EVENNESS = 0.05
RANKS_TRIED = 3  # number of best-scored ranks for which the full model prices a whole table
NO_ROOM = 1e6  # penalty in ms for exceeding a rank's memory by its whole limit


@dataclass(frozen=True, slots=True)
class Insertion:
    """Contains a move, the search ``goal`` that it reaches, and the step's time, in ms."""

    goal: float
    ms: float
    move: Move


def goal_of(problem: Problem, totals: Floats, phases: Floats, ms: Floats) -> Floats:
    """Compute the goal [N] from totals [N, ranks, F], phases [N, ranks, P] and ms [N]."""
    even = np.sqrt(np.mean(np.square(phases), axis=1)).sum(axis=-1)
    excess = problem.excess(totals)
    return ms + EVENNESS * even + NO_ROOM * excess / problem.limit_bytes.mean()


def goal(state: State) -> float:
    """Return the value that the search minimizes for a whole plan."""
    phases = state.problem.pricing.rank_ms(state.totals)[None]
    ms = state.problem.pricing.combine(phases)
    return float(goal_of(state.problem, state.totals[None], phases, ms)[0])


@dataclass(frozen=True, slots=True)
class _Tried:
    """Stores a table's options as arrays: ``rows`` [R, features], one per distinct shard, plus
    home.

    ``rows_of[k]`` contains the row of every shard of option ``numbers[k]``; empty for a copied
    table.
    """

    numbers: tuple[int, ...]
    rows: Floats
    owner: Ints
    rows_of: tuple[Ints, ...]
    keys: tuple[tuple[Key, ...], ...]


def _kinds(option: Option) -> tuple[Floats, Ints]:
    """Return (rows of the distinct shards, usually one or two; the row of each shard)."""
    if option.alike or option.num_shards < 2:
        return option.shards[:1], np.zeros(option.num_shards, dtype=np.int64)
    _, rows, of_shard = np.unique(
        np.round(option.shards, 3), axis=0, return_index=True, return_inverse=True
    )
    return option.shards[rows], of_shard.reshape(-1)


class Inserter:
    """Prices insertions into states of one problem.

    ``allowed`` [table] contains the numbers of the options to try, by default all. ``most_priced``
    limits the moves per table that the full model prices (the slow part on many ranks).
    """

    def __init__(
        self,
        problem: Problem,
        allowed: tuple[tuple[int, ...], ...] | None = None,
        most_priced: int = 24,
    ) -> None:
        self.problem = problem
        self.most_priced = most_priced
        fits = tuple(
            tuple(n for n, option in enumerate(options) if option.num_shards <= problem.num_ranks)
            for options in problem.options
        )
        if allowed is not None:
            fits = tuple(
                tuple(n for n in mine if n in chosen)
                for mine, chosen in zip(fits, allowed, strict=True)
            )
        self._tried = [self._of(table, numbers) for table, numbers in enumerate(fits)]

    @property
    def num_rows(self) -> int:
        """Return the number of shards scored on every rank: the cost of an insertion."""
        return sum(len(tried.rows) for tried in self._tried)

    def _of(self, table: int, numbers: tuple[int, ...]) -> _Tried:
        rows: list[Floats] = []
        owner: list[int] = []
        rows_of: list[Ints] = []
        for place, number in enumerate(numbers):
            option = self.problem.options[table][number]
            kinds, of_shard = _kinds(option)
            rows_of.append(len(rows) + of_shard)
            rows += [option.home + shard for shard in kinds]
            owner += [place] * len(kinds)
        options = self.problem.options[table]
        return _Tried(
            numbers=numbers,
            rows=np.array(rows).reshape(len(rows), self.problem.base.shape[1]),
            owner=np.array(owner, dtype=np.int64),
            rows_of=tuple(rows_of),
            keys=tuple(options[n].keys(tuple(range(options[n].num_shards))) for n in numbers),
        )

    def ranked(
        self, state: State, table: int, avoid: frozenset[object] = frozenset()
    ) -> list[Insertion]:
        """Return the insertions of ``table`` into ``state`` for options that score well, best
        first.

        Options with a key in ``avoid`` are omitted unless no other option remains.
        """
        options = self.problem.options[table]
        moves = self._moves(state, table)
        if avoid:
            free = [m for m in moves if avoid.isdisjoint(options[m.option].keys(m.ranks))]
            moves = free or moves
        return self._priced(state, table, moves)

    def best(self, state: State, table: int, avoid: frozenset[object] = frozenset()) -> Insertion:
        return self.ranked(state, table, avoid)[0]

    def quick(self, state: State, table: int) -> Move:
        """Return the best-scored move without its price, for tables with a single option."""
        move = self._moves(state, table)[0]
        return Move(move.option, tuple(sorted(move.ranks)))

    def _moves(self, state: State, table: int) -> list[Move]:
        """Return suitable ranks for every option, several for a whole table, in order of score."""
        tried = self._tried[table]
        scored: list[tuple[float, Move]] = []
        scores = self._scores(state, tried)
        for number, rows in zip(tried.numbers, tried.rows_of, strict=True):
            if not len(rows):  # a copied table has no score and is always priced
                scored.append((-1.0, Move(number, ())))
                continue
            option = self.problem.options[table][number]
            if option.alike:
                scored += self._alike(option, number, scores[rows[0]])
            else:
                scored += self._unlike(number, scores[rows])
        scored.sort(key=lambda pair: pair[0])
        return [move for _, move in scored[: self.most_priced]]

    def _scores(self, state: State, tried: _Tried) -> Floats:
        """Return [rows, ranks]: the growth of a rank's maxima, load, and lack of memory by each
        row.
        """
        if not len(tried.rows):
            return np.zeros((0, self.problem.num_ranks))
        problem = self.problem
        added = tried.rows.copy()
        for place, keys in enumerate(tried.keys):
            for key in keys:
                if key not in state.present:
                    added[tried.owner == place, key[0]] += 1.0
        totals = state.totals[None] + added[:, None]
        before, after = problem.pricing.rough_ms(state.totals), problem.pricing.rough_ms(totals)
        above = np.maximum(after - before.max(axis=0), 0.0).sum(axis=-1)
        held = problem.pricing.memory(totals)
        lacking = np.maximum(held - problem.limit_bytes, 0.0) / problem.limit_bytes.mean()
        return above + EVENNESS * after.sum(axis=-1) + NO_ROOM * lacking

    def _alike(self, option: Option, number: int, scores: Floats) -> list[tuple[float, Move]]:
        """Place equal shards on the best-scored ranks; try several ranks for a whole table."""
        count = option.num_shards
        order = np.argsort(scores, kind="stable")
        if option.whole:
            return [(float(scores[r]), Move(number, (int(r),))) for r in order[:RANKS_TRIED]]
        chosen = order[:count]
        ranks = tuple(sorted(int(rank) for rank in chosen))
        return [(float(scores[chosen].max()), Move(number, ranks))]

    def _unlike(self, number: int, scores: Floats) -> list[tuple[float, Move]]:
        """Place different shards, by scores [shards, ranks]: heaviest first, on its best free rank.

        The same ranks in ascending order are also tried: tables with the same order of ranks share
        the keys that depend on it.
        """
        taken: dict[int, int] = {}  # shard -> rank
        worst = 0.0
        count = len(scores)
        for shard in sorted(range(count), key=lambda s: -float(scores[s].min())):
            free = scores[shard].copy()
            free[list(taken.values())] = np.inf
            taken[shard] = int(np.argmin(free))
            worst = max(worst, float(free[taken[shard]]))
        ranks = tuple(taken[shard] for shard in range(count))
        ordered = tuple(sorted(ranks))
        moves = [(worst, Move(number, ranks))]
        if ordered != ranks:
            moves.append((float(scores[range(count), ordered].max()), Move(number, ordered)))
        return moves

    def _priced(self, state: State, table: int, moves: list[Move]) -> list[Insertion]:
        problem, options = self.problem, self.problem.options[table]
        totals = np.repeat(state.totals[None], len(moves), axis=0)
        for place, move in zip(totals, moves, strict=True):
            option = options[move.option]
            place += state.added(option, move.ranks)
            if move.ranks:
                place[list(move.ranks)] += option.shards
        phases = problem.pricing.rank_ms(totals)
        ms = problem.pricing.combine(phases)
        goals = goal_of(problem, totals, phases, ms)
        order = np.argsort(goals, kind="stable")
        return [Insertion(float(goals[n]), float(ms[n]), moves[n]) for n in order]

"""Evens out the loads of the ranks by moving and swapping whole tables.

A step looks at all whole tables of a slowest rank at once, and at the other ranks and their whole
tables (with many tables, only at the least loaded ranks). Its objective is the sum of a high power
of all ranks' loads, because the step time alone does not change as long as several ranks are
slowest.
"""

from typing import NamedTuple

import numpy as np

from sbpflow.planner.search.problem import BYTES, Floats, Ints, Move, State

PAIRS = 20_000  # approximate maximum number of swaps that a step considers
DOUBLINGS = 4  # loads are raised to the power 2 ** DOUBLINGS
LEAST_GAIN = 1e-9


def balance(state: State, steps: int) -> None:
    """Take up to ``steps`` steps, each of which makes the loads more even. No rank exceeds its
    memory limit unless it did so before.
    """
    tables = _Whole.of(state)
    top = np.maximum(state.loads[:, :BYTES].max(axis=0), 1e-12)
    kind, stuck = 0, 0
    while steps and stuck < BYTES:
        better = _best(state, tables, kind, top)
        kind, stuck = (kind + 1) % BYTES, stuck + 1
        if better is None:
            continue
        steps, stuck = steps - 1, 0
        for place, rank in better:
            table = int(tables.numbers[place])
            state.add(table, Move(state.remove(table).option, (rank,)))
            tables.ranks[place] = rank


class _Whole(NamedTuple):
    """The tables on a single rank whose keys do not depend on the rank, as arrays."""

    numbers: Ints
    ranks: Ints
    loads: Floats  # [n, 5]

    @staticmethod
    def of(state: State) -> "_Whole":
        rows: list[tuple[int, int, Floats]] = []
        for table, move in enumerate(state.moves):
            if move is not None and len(move.ranks) == 1:
                option = state.problem.options[table][move.option]
                if option.keys((0,)) == option.keys((1,)):
                    rows.append((table, move.ranks[0], option.shards[0]))
        numbers, ranks = (np.array([row[n] for row in rows], dtype=np.int64) for n in (0, 1))
        return _Whole(numbers, ranks, np.array([row[2] for row in rows]).reshape(-1, BYTES + 1))


def _best(state: State, tables: _Whole, kind: int, top: Floats) -> list[tuple[int, int]] | None:
    """Return the best step from the slowest rank, or None if no step makes the loads more even. A
    step is a list of one or two pairs: the index of a table in ``tables``, and its new rank.
    """
    loads, per_link = state.loads, state.problem.ranks_per_link
    order = np.argsort(loads[:, kind], kind="stable")
    slowest = int(order[-1])
    if kind and per_link > 1:  # all ranks of the link are slowest; choose the one with most to give
        first = slowest // per_link * per_link
        held = np.bincount(tables.ranks, tables.loads[:, kind], minlength=len(loads))
        slowest = first + int(held[first : first + per_link].argmax())
    mine = np.flatnonzero(tables.ranks == slowest)
    per_rank = 1 + len(tables.ranks) // len(loads)
    ranks = order[order != slowest][: max(PAIRS // max(len(mine) * per_rank, 1), 8)]
    others = np.flatnonzero(np.isin(tables.ranks, ranks))
    if not len(mine) or not len(ranks):
        return None
    # The first columns are tables to swap with; the others are ranks that give nothing in return.
    partner_ranks = np.concatenate([tables.ranks[others], ranks])
    given = np.concatenate([tables.loads[others], np.zeros((len(ranks), BYTES + 1))])
    change = given[None] - tables.loads[mine][:, None]  # [mine, partners, 5]
    factors = state.problem.slowness * state.problem.own_share
    if per_link > 1:
        change[:, partner_ranks // per_link == slowest // per_link, 1:BYTES] = 0.0
    here = loads[slowest] + change * factors[slowest]
    there = loads[partner_ranks][None] - change * factors[partner_ranks]
    gain = _uneven(loads[partner_ranks], top, per_link) + _uneven(loads[slowest], top, per_link)
    gain = gain - _uneven(here, top, per_link) - _uneven(there, top, per_link)
    limit = np.maximum(state.problem.limit_bytes, loads[:, BYTES])
    full = here[..., BYTES] > limit[slowest]
    full |= there[..., BYTES] > limit[partner_ranks]
    gain[full] = -np.inf
    first, second = np.unravel_index(int(gain.argmax()), gain.shape)
    if gain[first, second] <= LEAST_GAIN:
        return None
    moved = [(int(mine[first]), int(partner_ranks[second]))]
    return moved + ([(int(others[second]), slowest)] if second < len(others) else [])


def _uneven(loads: Floats, top: Floats, ranks_per_link: int) -> Floats:
    """Return the part of the objective of one rank and of those that share its link."""
    power = loads[..., :BYTES] / top
    for _ in range(DOUBLINGS):
        power = power * power
    return power[..., 0] + ranks_per_link * power[..., 1:].sum(axis=-1)

"""Computes a lower bound on the predicted time of any plan.

A step time is the sum of two maxima over ranks: the maximum work and the maximum transfer time.
Each maximum is at least the mean over ranks, and at least the value of any rank. Both bounds are
sums over tables:

* Each table adds to the mean at least as much as its cheapest option. A multiplier on bytes
  accounts for the memory that the ranks lack in total.
* The rank with a table's heaviest shard takes the time of that shard plus the work that every table
  adds to all ranks. An option that alone makes this rank slower than the given plan cannot be part
  of a better plan, so it is dropped. The bound is a weighted mean of these rank times and the mean
  over ranks.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sbpflow.planner.search.problem import BYTES, Floats, Key, Option, Problem

DUAL_ROUNDS = 60
# Multipliers on bytes to try, relative to (mean time) / (memory limit).
MULTIPLIERS = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 29)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A bound in ``ms``; ``gap`` is the fraction by which ``plan_ms``, the plan's time, exceeds the
    bound.

    ``options`` contains the options of each table that can occur in a faster plan, starting with
    the option that reaches the bound.
    """

    ms: float
    plan_ms: float
    options: tuple[tuple[int, ...], ...]

    @property
    def gap(self) -> float:
        return self.plan_ms / self.ms - 1.0 if self.ms > 0 else np.inf


def bound(problem: Problem, plan_ms: float) -> Bound:
    """Return a lower bound, at most ``plan_ms``, for all plans that use the problem's options.

    Three kinds of multipliers raise the bound. The first applies to bytes. The second kind
    distributes a key's cost over the tables that could have the key; together they pay at most this
    cost. The third kind weights the ranks with the heaviest shards against the mean over ranks; the
    weights add up to at most 1. The bound is valid for any multipliers, so dual ascent raises them
    as long as the bound improves.
    """
    before = problem.base[:, :BYTES]
    room = float(problem.limit_bytes.sum() - problem.base[:, BYTES].sum())
    dual = _Dual(problem, plan_ms - float(before.min(axis=0).sum()), np.ptp(before, axis=0))
    raised, above = dual.raised(room)
    ms = min(float(before.mean(axis=0).sum()) + raised, plan_ms)
    options = dual.options(above, plan_ms - ms)
    return Bound(ms=ms, plan_ms=plan_ms, options=options)


class _Dual:
    """All tables' options as arrays: ms, bytes, and the keys that each option needs.

    ``homes`` [n] is the ms that an option adds to every rank, ``spread`` [2, n] the ms of work and
    of transfers that its shards add to the mean rank, and ``heaviest`` [2, n] the most that they
    add to one rank. Options with which one rank would take ``most_ms`` or more are omitted, unless
    this is true of all options of a table. Before any table is placed, a rank may be up to
    ``uneven_ms`` below the mean.
    """

    def __init__(self, problem: Problem, most_ms: float, uneven_ms: Floats) -> None:
        self._uneven_ms = uneven_ms
        least_home = np.array(
            [
                min(float(option.home[:BYTES].sum()) for option in options)
                for options in problem.options
            ]
        )
        self.numbers: list[int] = []
        rows: list[Floats] = []
        first: list[int] = []
        needs: list[list[Key]] = []
        for table, options in enumerate(problem.options):
            first.append(len(rows))
            others = float(least_home.sum() - least_home[table])
            usable = [
                n for n, option in enumerate(options) if option.num_shards <= problem.num_ranks
            ]
            priced = [_row(problem, options[n]) for n in usable]
            fast = [others + row[0] + row[4] + row[5] < most_ms for row in priced]
            for number, is_fast, row in zip(usable, fast, priced, strict=True):
                if is_fast or not any(fast):
                    rows.append(row)
                    self.numbers.append(number)
                    needs.append(_shared(problem, options[number]))
        columns = np.array(rows).T
        self.homes, self.sizes = columns[0], columns[1]
        self.spread, self.heaviest = columns[2:4], columns[4:6]
        self.first = np.array(first)
        self.table = np.repeat(np.arange(len(first)), np.diff([*first, len(rows)]))
        known = list(dict.fromkeys(key for keys in needs for key in keys))
        self.key_ms = np.array([_key_ms(problem, key) for key in known])
        place = {key: n for n, key in enumerate(known)}
        pairs = [(row, place[key]) for row, keys in enumerate(needs) for key in keys]
        self.rows = np.array([row for row, _ in pairs], dtype=np.int64)
        self.keys = np.array([key for _, key in pairs], dtype=np.int64)
        # Weights, in the bounds of work and of transfers, of the ranks with the heaviest shards.
        self.shares = np.zeros((BYTES, len(first)))
        self._pair_up()

    def _pair_up(self) -> None:
        """Number the (table, key) pairs, because all options of a table share its payment for a
        key.
        """
        of_pair = self.table[self.rows] * max(len(self.key_ms), 1) + self.keys
        unique, self.pair = np.unique(of_pair, return_inverse=True)
        self.pair_key = unique % max(len(self.key_ms), 1)
        payers = np.bincount(self.pair_key, minlength=len(self.key_ms))
        self.paid = self.key_ms[self.pair_key] / np.maximum(payers[self.pair_key], 1)

    def _priced(self, multiplier: float) -> Floats:
        mean = 1.0 - self.shares.sum(axis=1)
        ms = self.homes + mean @ self.spread + multiplier * self.sizes
        ms += (self.shares[:, self.table] * self.heaviest).sum(axis=0)
        np.add.at(ms, self.rows, self.paid[self.pair])
        return ms

    def value(self, multiplier: float, room: float) -> float:
        """Return the bound for one multiplier on bytes and the current other multipliers."""
        return self._total(
            np.minimum.reduceat(self._priced(multiplier), self.first), multiplier, room
        )

    def _total(self, least: Floats, multiplier: float, room: float) -> float:
        uneven = float(self.shares.sum(axis=1) @ self._uneven_ms)
        return float(least.sum() - multiplier * room) - uneven

    def raised(self, room: float) -> tuple[float, Floats]:
        """Run dual ascent. Return the best bound and, for each option, by how much plans that use
        it exceed this bound.
        """
        unit = max(abs(self.value(0.0, 0.0)), 1e-9)
        bytes_ms = max(
            (float(factor) * unit / max(room, 1.0) for factor in MULTIPLIERS),
            key=lambda multiplier: self.value(multiplier, room),
        )
        best, above = -np.inf, np.zeros(len(self.table))
        for number in range(DUAL_ROUNDS):
            ms = self._priced(bytes_ms)
            least = np.minimum.reduceat(ms, self.first)
            value = self._total(least, bytes_ms, room)
            if value > best:
                best, above = value, ms - least[self.table]
            near = ms <= least[self.table] + 1e-12
            self._pay(near, 2.0 * unit / len(self.first) / (number + 1))
            self._share(near, 0.5 / (number + 1) / unit)
        return best, above

    def options(self, above: Floats, most: float) -> tuple[tuple[int, ...], ...]:
        """Return each table's options that exceed the bound by at most ``most``, in ascending
        order.
        """
        chosen: list[tuple[int, ...]] = []
        for start, end in pairwise([*self.first, len(self.table)]):
            order = start + np.argsort(above[start:end], kind="stable")
            chosen.append(tuple(self.numbers[place] for place in order if above[place] <= most))
        return tuple(chosen)

    def _first_of(self, near: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the first marked option of each table."""
        parts = np.split(near, self.first[1:])
        return self.first + np.array([int(part.argmax()) for part in parts])

    def _pay(self, near: NDArray[np.bool_], step_ms: float) -> None:
        """Raise what each table pays for the keys of its cheapest options; all tables together pay
        at most a key's cost.
        """
        wanted = np.zeros(len(self.paid))
        np.maximum.at(wanted, self.pair, near[self.rows].astype(np.float64))
        self.paid = self.paid + wanted * step_ms
        total = np.bincount(self.pair_key, self.paid, minlength=len(self.key_ms))
        over = np.maximum(total / np.maximum(self.key_ms, 1e-12), 1.0)
        self.paid = self.paid / over[self.pair_key]

    def _share(self, near: NDArray[np.bool_], step: float) -> None:
        """Raise the weights of ranks whose heaviest shard is above the mean; weights sum to at most
        1.
        """
        chosen = self._first_of(near)
        mean = self.spread[:, chosen].sum(axis=1) + self._uneven_ms
        shares = np.maximum(self.shares + step * (self.heaviest[:, chosen] - mean[:, None]), 0.0)
        self.shares = shares / np.maximum(shares.sum(axis=1, keepdims=True), 1.0)


def _row(problem: Problem, option: Option) -> Floats:
    """Return one option's array entries: the ms of ``home``, the bytes on all ranks, and, for work
    and transfers, the shards' ms on the mean rank and the ms of the heaviest shard.
    """
    size, shards = problem.num_ranks, option.shards
    held = size * option.home[BYTES] + shards[:, BYTES].sum()
    spread, heaviest = shards.sum(axis=0) / size, shards.max(axis=0, initial=0.0)
    return np.array([option.home[:BYTES].sum(), held, *spread[:BYTES], *heaviest[:BYTES]])


def _shared(problem: Problem, option: Option) -> list[Key]:
    """Return the option's keys that are not yet present, for any choice of ranks."""
    ranks = tuple(range(option.num_shards))
    return [
        _anywhere(key, ranks)
        for key in option.keys(ranks)
        if key not in problem.present and _key_ms(problem, key) > 0.0
    ]


def _key_ms(problem: Problem, key: Key) -> float:
    return float(problem.key_loads[key[0], :BYTES].sum())


def _anywhere(key: Key, ranks: tuple[int, ...]) -> Key:
    """Return the key without its ranks, so that it is equal for all choices of ranks."""
    return (key[0], key[1].replace(repr(ranks), "ranks")) if ranks else key

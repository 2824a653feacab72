"""Computes the Lagrangian dual of a planning problem: a lower bound that is a sum over tables.

A step time is the sum of several maxima over ranks (``TIMES``): the maximum work, and the maximum
transfer time of each phase. Each maximum is at least the mean over ranks, and at least the value of
any rank. A plan also pays the cost of each of its keys (resources that tables share). The bound is
valid for any non-negative multipliers:

* ``shares`` [times, tables + keys] weight some ranks against the mean over ranks: the rank with a
  table's heaviest shard, and the ranks of a key that depends on ranks, if a plan has a limited
  number of copies of it.
* ``paid`` distributes a key's cost over the tables that could need the key.
* ``crowding`` [2 * times, keys] is another way to distribute the cost of a key that depends on
  ranks. In a plan faster than the given one, the load of each rank is below a limit, and so is the
  total load of the tables that share one set of ranks. Many tables therefore need several sets, and
  a plan pays for the key once per set. A table that takes more than half of the limit does not
  share its set with another such table.
* The last column of ``shares`` weights the least value that a maximum may have.
* A single multiplier on bytes represents the total memory limit of all ranks.

If ranks differ in speed, a maximum over ranks is at least the mean weighted by speed, which is the
mean load times the harmonic mean of the ranks' factors. A load on an unknown rank counts with the
smallest factor.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from sbpflow.planner.search.problem import BYTES, Floats, Ints, Key, Option, Problem

# Multipliers on bytes to try, relative to (mean time) / (memory limit).
MULTIPLIERS = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 29)])
FIRST_STEP = 1.5  # relative to the step that would reach the plan's time if the bound were linear
PATIENCE = 10  # number of rounds without progress after which steps are halved
MOMENTUM = 0.8
# When a key is chosen for branching, the distance of its number of copies from the nearest whole
# number counts as at least this much.
LEAST_PART = 0.02
# When a maximum is chosen for branching, this part of its range counts, relative to a key's cost.
RANGE_PART = 0.25
KEY_SCALE = 30.0  # step length for keys' costs, relative to the step length for shares
MEMORY = 0.97  # weight of the earlier rounds in the moving average of a key's copies


@dataclass(frozen=True, slots=True)
class Limits:
    """The least and the largest number of copies of each key that a plan may have, [keys], and the
    least and the largest value of each of its maxima over ranks, [times]. These values do not
    include keys, ``home``, and the least base load, which all ranks have.
    """

    least: Floats
    most: Floats
    floor: Floats
    ceiling: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A bound in ``ms``, with its multipliers.

    ``above`` contains, for each option, the least amount by which plans that use the option exceed
    the bound. ``halves`` contains the limits of two cases, which together cover all plans within
    ``limits`` and probably have higher bounds; it is None if no split is promising.
    """

    ms: float
    limits: Limits
    multipliers: tuple[Floats, Floats, Floats]  # shares, paid, and crowding
    above: Floats
    halves: tuple[Limits, Limits] | None


class Dual:
    """All tables' options as arrays, for plans faster than ``plan_ms``.

    Each array [times, n] contains the ms of each time per option. An option adds ``home`` to every
    rank. Its shards add ``spread`` to the mean over all ranks, at most ``heaviest`` to any one
    rank, and ``mean`` to the mean over their own ranks.
    """

    def __init__(self, problem: Problem, plan_ms: float) -> None:
        base, factors = problem.base[:, :BYTES], problem.slowness[:, :BYTES]
        mean = 1.0 / (1.0 / factors).mean(axis=0)
        # [times, 1] each: the smallest, the harmonic mean, and the largest factor
        self._factors = tuple(each[:, None] for each in (factors.min(0), mean, factors.max(0)))
        self.plan_ms, self.base_ms = plan_ms, (base / factors).mean(axis=0) * mean
        self._least_base = base.min(axis=0)
        self.uneven_ms = self.base_ms - self._least_base
        self.room = float(problem.limit_bytes.sum() - problem.base[:, BYTES].sum())
        self._list(problem)
        self._list_keys(problem)
        self.bytes_ms = self._best_multiplier()
        self.always_ms += self.bytes_ms * self.sizes

    def _list(self, problem: Problem) -> None:
        counts = [len(options) for options in problem.options]
        self.first = np.cumsum([0, *counts[:-1]])
        self.table = np.repeat(np.arange(len(counts)), counts)
        self._options = [option for options in problem.options for option in options]
        size = problem.num_ranks
        home = np.array([option.home for option in self._options]).T
        loads = np.array([_shard_loads(option, size) for option in self._options])
        total, least, most, mean = loads.transpose(1, 2, 0)
        self.sizes = size * home[BYTES] + total[BYTES]
        # A shard's load can be negative, because its rank sends less to other ranks. The least load
        # of any rank counts as part of ``home``, so that none of the remaining loads is negative.
        least = least[:BYTES]
        home = home[:BYTES] + least
        smallest, harmonic, largest = self._factors
        # A bound from the rank with the most fixed work. It exceeds the bound of the multipliers if
        # one rank is much slower.
        added = problem.slowness[:, :BYTES] * np.minimum.reduceat(home, self.first, axis=1).sum(1)
        self.separable_ms = float((problem.base[:, :BYTES] + added).max(axis=0).sum())
        self.home = home * np.where(home < 0, largest, smallest)
        self.spread = (home + total[:BYTES] / size - least) * harmonic - self.home
        # Of a shard's transfers, only a part counts at its rank if the rank shares a link.
        own = smallest * problem.own_share[:BYTES, None]
        self.heaviest = (most[:BYTES] - least) * own
        self.mean = (mean[:BYTES] - least) * own
        self.always_ms = self.home.sum(axis=0)
        self._least_home = np.minimum.reduceat(self.home, self.first, axis=1).sum(axis=1)

    def _list_keys(self, problem: Problem) -> None:
        """List the keys that plans pay for; keys that the same options need count as one key."""
        needs: dict[Key, list[int]] = {}
        for row, option in enumerate(self._options):
            for key in _shared(problem, option):
                needs.setdefault(key, []).append(row)
        loads: dict[tuple[bool, tuple[int, ...]], Floats] = {}
        for key, rows in needs.items():
            alike = (_RANKS in key[1], tuple(rows))
            load = problem.key_loads[key[0], :BYTES] * self._factors[0][:, 0]
            loads[alike] = loads.get(alike, 0.0) + load
        self._key_loads = np.array(list(loads.values())).reshape(-1, BYTES)
        self.key_ms = self._key_loads.sum(axis=1)
        pairs = [(row, n) for n, (_, rows) in enumerate(loads) for row in rows]
        self.rows = np.array([row for row, _ in pairs], dtype=np.int64)
        self.keys = np.array([key for _, key in pairs], dtype=np.int64)
        # Number the pairs of table and key, because all options of a table pay for a key only once.
        of_pair = self.table[self.rows] * max(len(loads), 1) + self.keys
        unique, self.pair = np.unique(of_pair, return_inverse=True)
        self.pair_key = unique % max(len(loads), 1)
        self.local = np.array([local for local, _ in loads], dtype=np.float64)
        payers = np.bincount(self.pair_key, minlength=len(loads)) + 2 * BYTES * self.local
        self.payers = np.maximum(payers, 1.0)
        self.scale = KEY_SCALE * self.key_ms / np.sqrt(self.payers)

    def _best_multiplier(self) -> float:
        ms = self.always_ms + self.spread.sum(axis=0)
        unit = max(float(np.minimum.reduceat(ms, self.first).sum()), 1e-9)

        def value(multiplier: float) -> float:
            least = np.minimum.reduceat(ms + multiplier * self.sizes, self.first)
            return float(least.sum()) - multiplier * self.room

        return max((float(f) * unit / max(self.room, 1.0) for f in MULTIPLIERS), key=value)

    def free(self) -> Limits:
        """Return limits that all plans meet."""
        size = len(self.key_ms)
        bounds = np.zeros(size), np.full(size, np.inf), np.zeros(BYTES), np.full(BYTES, np.inf)
        return Limits(*bounds)

    def options(self, above: Floats, most: float) -> tuple[tuple[int, ...], ...]:
        """Return each table's options at most ``most`` above the bound, in ascending order."""
        chosen: list[tuple[int, ...]] = []
        for start, end in pairwise([*self.first, len(self.table)]):
            mine = above[start:end]
            order = np.argsort(mine, kind="stable").tolist()
            chosen.append(tuple(n for n in order if mine[n] <= most))
        return tuple(chosen)

    def rank_room(self, limits: Limits) -> Floats:
        """Return the most ms [times] that tables' shards can add to a rank of a faster plan."""
        keys = limits.least @ self._key_loads
        everywhere = self._least_base + self._least_home + keys
        mean = self.home + self.spread
        least = self.base_ms + keys + np.minimum.reduceat(mean, self.first, axis=1).sum(axis=1)
        shard = np.minimum.reduceat(self.heaviest, self.first, axis=1).max(axis=1)
        least = np.maximum(least, everywhere + np.maximum(shard, limits.floor))
        room = self.plan_ms - (least.sum() - least) - everywhere
        return np.minimum(room, limits.ceiling)


class Ascent:
    """Raises the bound for plans within ``limits``, from the multipliers of ``start``, by
    subgradient ascent with Polyak's steps, momentum, and restarts from the best multipliers.
    """

    def __init__(self, dual: Dual, limits: Limits, start: Solution | None) -> None:
        self.dual, self.limits = dual, limits
        self.required, self.unlimited = limits.least >= 1, np.isinf(limits.most)
        room = dual.rank_room(limits)
        self.impossible = bool((room <= 0).any())
        self.room = room = np.maximum(room, 1e-12)
        # relative load that a table adds to each set of ranks with this key
        use = dual.mean[:, dual.rows] / room[:, None] * dual.local[dual.keys]
        self.use = np.concatenate([use, use > 0.5 + 1e-9])
        # load that a table adds, on average, to each set of ranks with this key, if the number of
        # sets is limited
        sets = np.where(self.unlimited | (limits.most < 1), np.inf, limits.most)
        self.on_sets = dual.mean[:, dual.rows] * (dual.local / sets)[dual.keys]
        dead = np.any(dual.heaviest > room[:, None] * (1 + 1e-9), axis=0)
        dead |= np.isin(np.arange(len(dead)), dual.rows[limits.most[dual.keys] < 1])
        alone = np.logical_and.reduceat(dead, dual.first)
        if start is None:
            dead &= ~alone[dual.table]
        self.impossible |= start is not None and bool(alone.any())
        self.dead = dead
        if start is None:
            self.shares = np.zeros((BYTES, len(dual.first) + len(dual.key_ms) + 1))
            self.paid = dual.key_ms[dual.pair_key] / dual.payers[dual.pair_key]
            self.crowding = np.zeros((2 * BYTES, len(dual.key_ms)))
        else:
            self.shares, self.paid, self.crowding = start.multipliers
        self._project()

    def run(self, rounds: int) -> Solution:
        """Return the best bound that is found in this many rounds."""
        dual = self.dual
        best, theta, waited = -np.inf, FIRST_STEP, 0
        kept = (self.shares, self.paid, self.crowding)
        above = np.zeros(len(dual.table))
        number, weight = np.zeros(len(dual.pair_key)), 1e-9
        used = np.zeros_like(self.crowding)
        velocity = [np.zeros_like(values) for values in kept]
        for _ in range(0 if self.impossible else rounds):
            ms = self._priced()
            least = np.minimum.reduceat(ms, dual.first)
            value = self._value(least)
            if value > best * (1 + 1e-6):
                best, waited, above = value, 0, ms - least[dual.table]
                kept = (self.shares, self.paid, self.crowding)
            else:
                waited += 1
                if waited >= PATIENCE:
                    theta, waited = 0.5 * theta, 0
                    self.shares, self.paid, self.crowding = kept
            target = dual.plan_ms if np.isfinite(dual.plan_ms) else 1.2 * best
            if value >= target:
                break
            chosen = self._chosen(ms, least)
            need, load, on_sets = self._needs(chosen)
            number = MEMORY * number + (1 - MEMORY) * need
            used = MEMORY * used + (1 - MEMORY) * load
            weight = MEMORY * weight + (1 - MEMORY)
            for total, change in zip(
                velocity, self._gradient(chosen, need, load, on_sets), strict=True
            ):
                total += (1 - MOMENTUM) * (change - total)
            length = sum(float(np.square(total).sum()) for total in velocity)
            step = theta * (target - value) / max(length, 1e-12)
            self.shares = self.shares + step * velocity[0]
            self.paid = self.paid + step * velocity[1] * dual.scale[dual.pair_key]
            self.crowding = self.crowding + step * velocity[2] * dual.scale
            self._project()
        copies = np.zeros(len(dual.key_ms))
        np.maximum.at(copies, dual.pair_key, number / weight)
        copies = np.maximum(copies, (used / weight).max(axis=0, initial=0.0))
        # A plan may have more copies of a required key than the bound pays for, so the search may
        # branch on such a key.
        more = self.required & self.unlimited & (dual.local > 0)
        copies = np.maximum(copies, (self.limits.least + LEAST_PART) * more)
        return Solution(
            ms=np.inf if self.impossible else best,
            limits=self.limits,
            multipliers=kept,
            above=above,
            halves=self._halves(copies, kept[0]),
        )

    def _halves(self, copies: Floats, shares: Floats) -> tuple[Limits, Limits] | None:
        """Split the plans by the number of copies of a key, or halve the range of a maximum.

        A maximum is worth splitting if the bound depends on heavy shards or sets of ranks
        (``shares``). In a wide range, the bound may combine the advantages of large shards, which
        need few sets of ranks, with those of small shards.
        """
        limits = self.limits
        part = np.maximum(np.minimum(copies % 1.0, 1.0 - copies % 1.0), LEAST_PART)
        inside = (copies > limits.least + 1e-3) & (copies < limits.most)
        of_keys = np.where(inside, part, 0.0) * self.dual.key_ms
        of_times = RANGE_PART * shares[:, :-1].sum(axis=1) * (self.room - limits.floor)
        if max(of_keys.max(initial=0.0), of_times.max()) <= 1e-6:
            return None
        if of_times.max() > of_keys.max(initial=0.0):
            n = int(of_times.argmax())
            floor, ceiling = limits.floor.copy(), limits.ceiling.copy()
            floor[n] = ceiling[n] = 0.5 * (floor[n] + self.room[n])
            return replace(limits, ceiling=ceiling), replace(limits, floor=floor)
        n = int(of_keys.argmax())
        most, least = limits.most.copy(), limits.least.copy()
        most[n], least[n] = np.ceil(copies[n]) - 1.0, np.ceil(copies[n])
        return replace(limits, most=most), replace(limits, least=least)

    def _priced(self) -> Floats:
        dual = self.dual
        ms = dual.always_ms + (1.0 - self.shares.sum(axis=1)) @ dual.spread
        extra = self.paid[dual.pair]
        for shares, heaviest, on_sets in zip(self.shares, dual.heaviest, self.on_sets, strict=True):
            ms += shares[dual.table] * heaviest
            extra += shares[len(dual.first) :][dual.keys] * on_sets
        for crowding, use in zip(self.crowding, self.use, strict=True):
            extra += crowding[dual.keys] * use
        ms += np.bincount(dual.rows, extra, minlength=len(ms))
        ms[self.dead] = np.inf
        return ms

    def _left(self) -> Floats:
        """Return the part of each key's cost that tables do not pay, [keys]."""
        dual = self.dual
        paid = np.bincount(dual.pair_key, self.paid, minlength=len(dual.key_ms))
        return dual.key_ms - paid - self.crowding.sum(axis=0)

    def _copies(self) -> Floats:
        """Return the numbers of copies that minimize the sum of unpaid costs."""
        enough = self.unlimited | (self._left() >= 0)
        return np.where(enough, self.limits.least, self.limits.most)

    def _value(self, least: Floats) -> float:
        dual = self.dual
        unpaid = np.where(self.unlimited, np.maximum(self._left(), 0.0), self._left())
        fixed = float(dual.base_ms.sum() + unpaid @ self._copies())
        uneven = float(self.shares.sum(axis=1) @ dual.uneven_ms)
        fixed += float(self.shares[:, -1] @ self.limits.floor)
        return float(least.sum()) + fixed - dual.bytes_ms * dual.room - uneven

    def _chosen(self, ms: Floats, least: Floats) -> Ints:
        """Return the first of the cheapest options of each table."""
        near = np.flatnonzero(ms <= least[self.dual.table] + 1e-12)
        return near[np.searchsorted(self.dual.table[near], np.arange(len(least)))]

    def _needs(self, chosen: Ints) -> tuple[Floats, Floats, Floats]:
        """Return which (table, key) pairs the chosen options need, and the relative loads [2 *
        times, keys] and the ms [times, keys] that they add to the keys' sets of ranks.
        """
        dual = self.dual
        used = np.zeros(len(dual.table), dtype=bool)
        used[chosen] = True
        mine = np.flatnonzero(used[dual.rows])
        need = np.bincount(dual.pair[mine], minlength=len(dual.pair_key)).astype(np.float64)
        keys, size = dual.keys[mine], len(dual.key_ms)
        load = np.array([np.bincount(keys, use[mine], minlength=size) for use in self.use])
        on_sets = np.array([np.bincount(keys, ms[mine], minlength=size) for ms in self.on_sets])
        return need, load.astype(np.float64), on_sets.astype(np.float64)

    def _gradient(
        self, chosen: Ints, need: Floats, load: Floats, on_sets: Floats
    ) -> tuple[Floats, Floats, Floats]:
        dual = self.dual
        mean = dual.spread[:, chosen].sum(axis=1) + dual.uneven_ms
        floor = self.limits.floor[:, None]
        shares = np.concatenate([dual.heaviest[:, chosen], on_sets, floor], axis=1) - mean[:, None]
        shares = np.where((self.shares <= 0) & (shares < 0), 0.0, shares)
        total = np.bincount(dual.pair_key, need, minlength=len(dual.key_ms)) + load.sum(axis=0)
        free = self.unlimited & ~self.required
        copies = np.where(free, total / dual.payers, self._copies())
        paid = (need - copies[dual.pair_key]) * dual.scale[dual.pair_key]
        return shares, paid, (load - copies) * dual.scale * dual.local

    def _project(self) -> None:
        """Make all multipliers valid: non-negative, shares of at most 1 in total, and payments of
        at most a key's cost unless the number of copies is limited.
        """
        dual = self.dual
        shares = np.maximum(self.shares, 0.0)
        self.shares = np.array([_within_one(row) if row.sum() > 1 else row for row in shares])
        paid = np.where(self.required[dual.pair_key], 0.0, np.maximum(self.paid, 0.0))
        crowding = np.maximum(self.crowding, 0.0) * dual.local
        total = np.bincount(dual.pair_key, paid, minlength=len(dual.key_ms))
        ratio = dual.key_ms / np.maximum(total + crowding.sum(axis=0), 1e-12)
        ratio = np.where(self.required, np.minimum(ratio, 1.0), ratio)
        ratio = np.where(self.unlimited, ratio, 1.0)
        self.paid, self.crowding = paid * ratio[dual.pair_key], crowding * ratio


_RANKS = "<ranks>"


def _within_one(values: Floats) -> Floats:
    """Return the closest non-negative values with sum 1."""
    # The result does not depend on a common offset. Without one, rounding would hide the sum of 1
    # in values of 1e16 and more.
    values = values - values.max()
    falling = np.sort(values)[::-1]
    excess = (np.cumsum(falling) - 1.0) / np.arange(1, len(values) + 1)
    return np.maximum(values - excess[np.flatnonzero(falling > excess)[-1]], 0.0)


def _shard_loads(option: Option, size: int) -> Floats:
    """Return the sum of the loads of the shards, the least and the largest load that they add to
    any rank, and their mean load, [4, 5].
    """
    shards = option.shards
    total, mean = shards.sum(axis=0), shards.mean(axis=0) if len(shards) else np.zeros(BYTES + 1)
    added = shards if len(shards) == size else np.concatenate([shards, np.zeros((1, BYTES + 1))])
    return np.array([total, added.min(axis=0), added.max(axis=0), mean])


def _shared(problem: Problem, option: Option) -> list[Key]:
    """Return the option's keys that are not yet present, as keys that are equal for all ranks."""
    ranks = tuple(range(option.num_shards))
    return [
        (feature, text.replace(repr(ranks), _RANKS) if ranks else text)
        for feature, text in option.keys(ranks)
        if feature < problem.first_join
        and (feature, text) not in problem.present
        and problem.key_loads[feature, :BYTES].sum() > 0.0
    ]

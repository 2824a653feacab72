"""Lower bounds on the time of any plan, and of which model each is one.

A step is a convex, symmetric function of what the ranks take (maxima and sums), so no plan is
faster than one whose ranks all take its mean, nor than one whose ranks all take what any one rank
does. Both are sums over tables. Of the mean, each table adds at least what its cheapest option
does; a multiplier on bytes accounts for memory that all ranks together lack. Of a single rank, the
one with a table's heaviest shard takes that shard and what every table does on all ranks: an option
by which that is already slower than the plan at hand is in no better plan, and falls away; a share
of the bound is laid on such ranks. The weights of the phases are the slopes of the step at the
plan whose gap is asked for, which is where the bound is tightest.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sbpflow.planner.search.linear import Linear, linearised
from sbpflow.planner.search.problem import Assignment, Floats, Key, Option, Problem, price_of

DUAL_ROUNDS = 60
MULTIPLIERS = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 29)])  # of the mean time per limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """``ms``, and ``kind``: what it bounds. ``gap`` is what the plan is above it, as a share."""

    ms: float
    kind: str
    plan_ms: float

    @property
    def gap(self) -> float:
        return self.plan_ms / self.ms - 1.0 if self.ms > 0 else np.inf


def bound(problem: Problem, around: Assignment) -> Bound:
    """For all plans of the problem's options, in the model linearised at ``around``.

    The kind says so: where the model bends, a plan far from ``around`` can be below it.
    """
    plan_ms = price_of(problem, around).ms
    linear = linearised(problem, around)
    ms = least_ms(problem, _scaled(problem, linear, around), plan_ms)
    return Bound(ms=ms, plan_ms=plan_ms, kind="model linearised at the plan")


def certified(problem: Problem, around: Assignment, slopes: Floats, least: Floats) -> Bound:
    """For all plans in the model itself, given its ``slopes`` [F, P] without correction and the
    ``least`` [P] factors that the correction can take.
    """
    linear = linearised(problem, around)
    scaled = _scaled(problem, linear, around)
    plain = Linear(slopes * least, np.zeros(slopes.shape[1]), scaled.weights)
    plan_ms = price_of(problem, around).ms
    return Bound(
        ms=least_ms(problem, plain, plan_ms),
        plan_ms=plan_ms,
        kind="model with its correction at the least",
    )


def _scaled(problem: Problem, linear: Linear, around: Assignment) -> Linear:
    """With weights of phases of the mean rank, not above what a step of such ranks takes."""
    phases = price_of(problem, around).phases.mean(axis=0)
    even = np.repeat(phases[None], problem.num_ranks, axis=0)
    tried = np.repeat(even[None], len(phases) + 1, axis=0)
    step = 1e-6 * max(float(phases.sum()), 1e-9)
    for phase in range(len(phases)):
        tried[phase + 1, :, phase] += step
    times = problem.pricing.combine(tried)
    weights = np.maximum((times[1:] - times[0]) / step, 0.0)
    total = float(weights @ phases)
    if total > float(times[0]):
        weights *= float(times[0]) / total
    return Linear(linear.slopes, linear.offsets, weights)


def least_ms(problem: Problem, linear: Linear, plan_ms: float) -> float:
    """The least that a step can take in the linear model, or ``plan_ms`` if no plan is faster.

    Three kinds of multipliers lift it: one on bytes; shares of a key's cost that the tables which
    could have the key pay each, together no more than the key costs; and shares of the bound that
    are laid on the ranks with the heaviest shards, together no more than all of it. The bound
    holds for every choice of them; they are raised where they lift it (dual ascent).
    """
    price = linear.slopes @ linear.weights  # [F], ms per count of the mean rank
    before = (linear.offsets + problem.base @ linear.slopes) @ linear.weights  # [ranks]
    first = float(before.mean())
    room = float(problem.limit_bytes.sum() - problem.pricing.memory(problem.base).sum())
    dual = _Dual(problem, price, plan_ms - float(before.min()), float(np.ptp(before)))
    return min(first + dual.raised(room), plan_ms)


class _Dual:
    """Tables' options as one array: ms of the mean rank, bytes, and the keys each would need.

    ``homes`` is what an option adds to every rank, ``spread`` what its shards add to the mean rank,
    ``heaviest`` what they add to one rank. Options whose heaviest shard alone takes ``most_ms`` or
    longer are left out. A rank may have ``uneven_ms`` less than the mean before any table.
    """

    def __init__(self, problem: Problem, price: Floats, most_ms: float, uneven_ms: float) -> None:
        self._uneven_ms = uneven_ms
        least_home = np.array(
            [min(float(option.home @ price) for option in options) for options in problem.options]
        )
        rows: list[tuple[float, float, float, float]] = []
        first: list[int] = []
        needs: list[list[Key]] = []
        for table, options in enumerate(problem.options):
            first.append(len(rows))
            others = float(least_home.sum() - least_home[table])
            able = [option for option in options if option.num_shards <= problem.num_ranks]
            found = [_row(problem, option, price) for option in able]
            kept = [others + one[0] + one[2] < most_ms for one in found]
            for option, keep, one in zip(able, kept, found, strict=True):
                if keep or not any(kept):
                    rows.append(one)
                    needs.append(_shared(problem, option, price))
        self.homes, self.spread, self.heaviest, self.sizes = np.array(rows).T
        self.first = np.array(first)
        self.table = np.repeat(np.arange(len(first)), np.diff([*first, len(rows)]))
        known = list(dict.fromkeys(key for mine in needs for key in mine))
        self.key_ms = np.array([float(price[key[0]]) for key in known])
        place = {key: n for n, key in enumerate(known)}
        pairs = [(row, place[key]) for row, mine in enumerate(needs) for key in mine]
        self.rows = np.array([row for row, _ in pairs], dtype=np.int64)
        self.keys = np.array([key for _, key in pairs], dtype=np.int64)
        self.laid = np.zeros(len(first))  # shares of the bound, on the ranks of heaviest shards
        self._pair_up()

    def _pair_up(self) -> None:
        """(table, key) pairs: several options of a table share what it pays for a key."""
        of_pair = self.table[self.rows] * max(len(self.key_ms), 1) + self.keys
        unique, self.pair = np.unique(of_pair, return_inverse=True)
        self.pair_key = unique % max(len(self.key_ms), 1)
        payers = np.bincount(self.pair_key, minlength=len(self.key_ms))
        self.paid = self.key_ms[self.pair_key] / np.maximum(payers[self.pair_key], 1)
        self.multiplier = 0.0

    def _loaded(self, multiplier: float) -> Floats:
        loaded = self.homes + (1.0 - self.laid.sum()) * self.spread + multiplier * self.sizes
        loaded += self.laid[self.table] * self.heaviest
        np.add.at(loaded, self.rows, self.paid[self.pair])
        return loaded

    def value(self, multiplier: float, room: float) -> float:
        """The bound for one multiplier on bytes and the shares as they are."""
        chosen = np.minimum.reduceat(self._loaded(multiplier), self.first).sum()
        return float(chosen - multiplier * room - self.laid.sum() * self._uneven_ms)

    def raised(self, room: float) -> float:
        """The best bound in rounds of moving the shares to where they lift it."""
        unit = max(abs(self.value(0.0, 0.0)), 1e-9)
        bytes_ms = max(
            (float(one) * unit / max(room, 1.0) for one in MULTIPLIERS),
            key=lambda one: self.value(one, room),
        )
        best = self.value(bytes_ms, room)
        for number in range(DUAL_ROUNDS):
            loaded = self._loaded(bytes_ms)
            least = np.minimum.reduceat(loaded, self.first)
            near = loaded <= least[self.table] + 1e-12
            self._pay(near, 2.0 * unit / len(self.first) / (number + 1))
            self._lay(near, 0.5 / (number + 1) / unit)
            best = max(best, self.value(bytes_ms, room))
        return best

    def _pay(self, near: NDArray[np.bool_], step_ms: float) -> None:
        """Tables that choose a key pay more of it, within what it costs."""
        wanted = np.zeros(len(self.paid))
        np.maximum.at(wanted, self.pair, near[self.rows].astype(np.float64))
        self.paid = self.paid + wanted * step_ms
        total = np.bincount(self.pair_key, self.paid, minlength=len(self.key_ms))
        over = np.maximum(total / np.maximum(self.key_ms, 1e-12), 1.0)
        self.paid = self.paid / over[self.pair_key]

    def _lay(self, near: NDArray[np.bool_], step: float) -> None:
        """More of the bound on ranks that take more than the mean, within all of it."""
        chosen = np.array([np.flatnonzero(one)[0] for one in np.split(near, self.first[1:])])
        chosen = chosen + self.first
        above = self.heaviest[chosen] - self.spread[chosen].sum() - self._uneven_ms
        laid = np.maximum(self.laid + step * above, 0.0)
        self.laid = laid / max(float(laid.sum()), 1.0)


def _row(problem: Problem, option: Option, price: Floats) -> tuple[float, float, float, float]:
    """ms at home, of the shards on the mean rank, of the heaviest shard; bytes on all ranks."""
    memory = problem.pricing.memory
    shards = option.shards @ price
    held = float(problem.num_ranks * memory(option.home) + memory(option.shards).sum())
    spread = float(shards.sum()) / problem.num_ranks
    return float(option.home @ price), spread, float(shards.max(initial=0.0)), held


def _shared(problem: Problem, option: Option, price: Floats) -> list[Key]:
    """The option's keys that are not there already, whichever ranks it lies on taken for one."""
    ranks = tuple(range(option.num_shards))
    return [
        _anywhere(key, ranks)
        for key in option.keys(ranks)
        if key not in problem.present and price[key[0]] > 0.0
    ]


def _anywhere(key: Key, ranks: tuple[int, ...]) -> Key:
    """The key with the ranks it names left out, so that it is one key on all of them."""
    if len(ranks) == 0:
        return key
    return tuple(
        "ranks" if part == ranks else _anywhere(part, ranks) if isinstance(part, tuple) else part
        for part in key
    )

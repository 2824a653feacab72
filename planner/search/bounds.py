"""Computes lower bounds on the time of any plan, each for a stated model.

A step is a convex, symmetric function of the ranks' times (maxima and sums). A plan is therefore at
least as slow as a plan in which all ranks take its mean, and as a plan in which all ranks take the
time of any one rank. Both bounds are sums over tables:

* Each table adds to the mean at least as much as its cheapest option. A multiplier on bytes
  accounts for the memory that the ranks lack in total.
* The rank with a table's heaviest shard takes the time of that shard plus the work that every
  table adds to all ranks. An option that alone makes this rank slower than the given plan cannot
  be in a better plan and is dropped; shares of the bound apply to such ranks.

The weights of the phases are the slopes of the step at the given plan; there, the bound is
tightest.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sbpflow.planner.search.linear import Linear, linearized
from sbpflow.planner.search.problem import Assignment, Floats, Key, Option, Problem, price_of

DUAL_ROUNDS = 60
# These multipliers of bytes are relative to the mean time per memory limit.
MULTIPLIERS = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 29)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Stores a bound in ``ms`` for the model named by ``kind``; ``gap`` is the plan's excess."""

    ms: float
    kind: str
    plan_ms: float

    @property
    def gap(self) -> float:
        return self.plan_ms / self.ms - 1.0 if self.ms > 0 else np.inf


def bound(problem: Problem, around: Assignment) -> Bound:
    """Return a bound for all plans of the problem's options, in the model linearized at ``around``.

    The model is not linear, so a plan far from ``around`` can be faster than this bound.
    """
    plan_ms = price_of(problem, around).ms
    linear = linearized(problem, around)
    ms = least_ms(problem, _scaled(problem, linear, around), plan_ms)
    return Bound(ms=ms, plan_ms=plan_ms, kind="model linearized at the plan")


def certified(problem: Problem, around: Assignment, slopes: Floats, least: Floats) -> Bound:
    """Return a bound for all plans in the model itself.

    ``slopes`` [F, P] are the model's slopes without its correction, and ``least`` [P] are the
    smallest possible factors of the correction.
    """
    linear = linearized(problem, around)
    scaled = _scaled(problem, linear, around)
    plain = Linear(slopes * least, np.zeros(slopes.shape[1]), scaled.weights)
    plan_ms = price_of(problem, around).ms
    return Bound(
        ms=least_ms(problem, plain, plan_ms),
        plan_ms=plan_ms,
        kind="model with the smallest correction",
    )


def _scaled(problem: Problem, linear: Linear, around: Assignment) -> Linear:
    """Return the linear model with phase weights at the mean rank, scaled to at most its step."""
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
    """Return the least time of a step in the linear model, or ``plan_ms`` if no plan is faster.

    Three kinds of multipliers raise the bound. The first applies to bytes. The second consists of
    shares of a key's cost, paid by the tables that could have the key and in total at most that
    cost. The third consists of shares of the bound for the ranks with the heaviest shards, in total
    at most 1. The bound is valid for all their values, so they are raised as long as the bound
    improves (dual ascent).
    """
    price = linear.slopes @ linear.weights  # [F], ms per count of the mean rank
    before = (linear.offsets + problem.base @ linear.slopes) @ linear.weights  # [ranks]
    first = float(before.mean())
    room = float(problem.limit_bytes.sum() - problem.pricing.memory(problem.base).sum())
    dual = _Dual(problem, price, plan_ms - float(before.min()), float(np.ptp(before)))
    return min(first + dual.raised(room), plan_ms)


class _Dual:
    """Stores all tables' options as arrays: ms, bytes, and the keys that each option needs.

    ``homes`` is the work that an option adds to every rank, ``spread`` is the work that its shards
    add to the mean rank, and ``heaviest`` is the largest work that they add to one rank. Options
    whose heaviest shard alone takes ``most_ms`` or more are omitted. Without tables, a rank may
    have ``uneven_ms`` less than the mean.
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
            usable = [option for option in options if option.num_shards <= problem.num_ranks]
            priced = [_row(problem, option, price) for option in usable]
            fast = [others + row[0] + row[2] < most_ms for row in priced]
            for option, is_fast, row in zip(usable, fast, priced, strict=True):
                if is_fast or not any(fast):
                    rows.append(row)
                    needs.append(_shared(problem, option, price))
        self.homes, self.spread, self.heaviest, self.sizes = np.array(rows).T
        self.first = np.array(first)
        self.table = np.repeat(np.arange(len(first)), np.diff([*first, len(rows)]))
        known = list(dict.fromkeys(key for keys in needs for key in keys))
        self.key_ms = np.array([float(price[key[0]]) for key in known])
        place = {key: n for n, key in enumerate(known)}
        pairs = [(row, place[key]) for row, keys in enumerate(needs) for key in keys]
        self.rows = np.array([row for row, _ in pairs], dtype=np.int64)
        self.keys = np.array([key for _, key in pairs], dtype=np.int64)
        # These are shares of the bound for the ranks with the heaviest shards.
        self.shares = np.zeros(len(first))
        self._pair_up()

    def _pair_up(self) -> None:
        """Number the (table, key) pairs: a table's options share its payment for a key."""
        of_pair = self.table[self.rows] * max(len(self.key_ms), 1) + self.keys
        unique, self.pair = np.unique(of_pair, return_inverse=True)
        self.pair_key = unique % max(len(self.key_ms), 1)
        payers = np.bincount(self.pair_key, minlength=len(self.key_ms))
        self.paid = self.key_ms[self.pair_key] / np.maximum(payers[self.pair_key], 1)

    def _priced(self, multiplier: float) -> Floats:
        ms = self.homes + (1.0 - self.shares.sum()) * self.spread + multiplier * self.sizes
        ms += self.shares[self.table] * self.heaviest
        np.add.at(ms, self.rows, self.paid[self.pair])
        return ms

    def value(self, multiplier: float, room: float) -> float:
        """Return the bound for one multiplier on bytes and the current shares."""
        chosen = np.minimum.reduceat(self._priced(multiplier), self.first).sum()
        return float(chosen - multiplier * room - self.shares.sum() * self._uneven_ms)

    def raised(self, room: float) -> float:
        """Return the best bound over rounds that move the shares to raise it."""
        unit = max(abs(self.value(0.0, 0.0)), 1e-9)
        bytes_ms = max(
            (float(factor) * unit / max(room, 1.0) for factor in MULTIPLIERS),
            key=lambda multiplier: self.value(multiplier, room),
        )
        best = self.value(bytes_ms, room)
        for number in range(DUAL_ROUNDS):
            ms = self._priced(bytes_ms)
            least = np.minimum.reduceat(ms, self.first)
            near = ms <= least[self.table] + 1e-12
            self._pay(near, 2.0 * unit / len(self.first) / (number + 1))
            self._share(near, 0.5 / (number + 1) / unit)
            best = max(best, self.value(bytes_ms, room))
        return best

    def _pay(self, near: NDArray[np.bool_], step_ms: float) -> None:
        """Let tables that choose a key pay more of it, up to its cost."""
        wanted = np.zeros(len(self.paid))
        np.maximum.at(wanted, self.pair, near[self.rows].astype(np.float64))
        self.paid = self.paid + wanted * step_ms
        total = np.bincount(self.pair_key, self.paid, minlength=len(self.key_ms))
        over = np.maximum(total / np.maximum(self.key_ms, 1e-12), 1.0)
        self.paid = self.paid / over[self.pair_key]

    def _share(self, near: NDArray[np.bool_], step: float) -> None:
        """Raise the bound's shares for ranks above the mean, up to the whole bound."""
        chosen = np.array([np.flatnonzero(part)[0] for part in np.split(near, self.first[1:])])
        chosen = chosen + self.first
        above = self.heaviest[chosen] - self.spread[chosen].sum() - self._uneven_ms
        shares = np.maximum(self.shares + step * above, 0.0)
        self.shares = shares / max(float(shares.sum()), 1.0)


def _row(problem: Problem, option: Option, price: Floats) -> tuple[float, float, float, float]:
    """Return the ms of home, of the mean rank's shards and of the heaviest shard, and all bytes."""
    memory = problem.pricing.memory
    shards = option.shards @ price
    held = float(problem.num_ranks * memory(option.home) + memory(option.shards).sum())
    spread = float(shards.sum()) / problem.num_ranks
    return float(option.home @ price), spread, float(shards.max(initial=0.0)), held


def _shared(problem: Problem, option: Option, price: Floats) -> list[Key]:
    """Return the option's keys that are not present yet, as if all its possible ranks were the
    same.
    """
    ranks = tuple(range(option.num_shards))
    return [
        _anywhere(key, ranks)
        for key in option.keys(ranks)
        if key not in problem.present and price[key[0]] > 0.0
    ]


def _anywhere(key: Key, ranks: tuple[int, ...]) -> Key:
    """Return the key without its ranks, so that it is the same key on any ranks."""
    if len(ranks) == 0:
        return key
    return tuple(
        "ranks" if part == ranks else _anywhere(part, ranks) if isinstance(part, tuple) else part
        for part in key
    )

"""Lower bounds on the time of any plan, and of which model each is one.

A step is a convex, symmetric function of what the ranks take (maxima and sums), so no plan is
faster than one whose ranks all take its mean. That mean is a sum over tables, and each table adds
at least what its cheapest option does; a multiplier on bytes accounts for memory that all ranks
together lack. The weights of the phases are the slopes of the step at the plan whose gap is asked
for, which is where the bound is tightest.
"""

from dataclasses import dataclass

import numpy as np

from planner.search.linear import Linear, linearised
from planner.search.problem import Assignment, Floats, Key, Option, Problem, price_of

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
    ms = least_mean_ms(problem, _scaled(problem, linear, around))
    return Bound(ms=ms, plan_ms=plan_ms, kind="model linearised at the plan, mean of the ranks")


def certified(problem: Problem, around: Assignment, slopes: Floats, least: Floats) -> Bound:
    """For all plans in the model itself, given its ``slopes`` [F, P] without correction and the
    ``least`` [P] factors that the correction can take.
    """
    linear = linearised(problem, around)
    scaled = _scaled(problem, linear, around)
    plain = Linear(slopes * least, np.zeros(slopes.shape[1]), scaled.weights)
    return Bound(
        ms=least_mean_ms(problem, plain),
        plan_ms=price_of(problem, around).ms,
        kind="model with its correction at the least, mean of the ranks",
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


def least_mean_ms(problem: Problem, linear: Linear) -> float:
    """The least that the weighted phases of the mean rank can take, over all plans.

    Two multipliers lift it: one on bytes, and shares of a key's cost that the tables which could
    have the key pay each; together they pay no more than the key costs, so the bound holds for
    every choice of the shares. They are raised where tables choose the key (dual ascent).
    """
    price = linear.slopes @ linear.weights  # [F], ms per count of the mean rank
    first = float((linear.offsets + problem.base.mean(axis=0) @ linear.slopes) @ linear.weights)
    room = float(problem.limit_bytes.sum() - problem.pricing.memory(problem.base).sum())
    dual = _Dual(problem, price)
    unit = max(first, 1e-9) + dual.value(0.0, 0.0)
    best = -np.inf
    for multiplier in MULTIPLIERS * unit / max(room, 1.0):
        best = max(best, dual.value(multiplier, room))
    return first + dual.raised(best, room)


class _Dual:
    """Tables' options as one array: ms of the mean rank, bytes, and the keys each would need."""

    def __init__(self, problem: Problem, price: Floats) -> None:
        costs: list[float] = []
        sizes: list[float] = []
        first: list[int] = []
        needs: list[list[Key]] = []
        for options in problem.options:
            first.append(len(costs))
            for option in options:
                if option.num_shards > problem.num_ranks:
                    continue
                costs.append(float(_mean(problem, option) @ price))
                sizes.append(_bytes(problem, option))
                needs.append(_shared(problem, option, price))
        self.costs, self.sizes = np.array(costs), np.array(sizes)
        self.first = np.array(first)
        self.table = np.repeat(np.arange(len(first)), np.diff([*first, len(costs)]))
        known = list(dict.fromkeys(key for mine in needs for key in mine))
        self.key_ms = np.array([float(price[key[0]]) for key in known])
        place = {key: n for n, key in enumerate(known)}
        pairs = [(row, place[key]) for row, mine in enumerate(needs) for key in mine]
        self.rows = np.array([row for row, _ in pairs], dtype=np.int64)
        self.keys = np.array([key for _, key in pairs], dtype=np.int64)
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
        loaded = self.costs + multiplier * self.sizes
        np.add.at(loaded, self.rows, self.paid[self.pair])
        return loaded

    def value(self, multiplier: float, room: float) -> float:
        """The bound for one multiplier on bytes; the best one is remembered."""
        chosen = np.minimum.reduceat(self._loaded(multiplier), self.first).sum()
        return float(chosen - multiplier * room)

    def raised(self, best: float, room: float) -> float:
        """The best bound in rounds of moving what is paid to the tables that choose the key."""
        unit = max(abs(best), 1e-9) / max(len(self.first), 1)
        multiplier = max(
            MULTIPLIERS * max(abs(best), 1e-9) / max(room, 1.0),
            key=lambda one: self.value(float(one), room),
        )
        for number in range(DUAL_ROUNDS):
            loaded = self._loaded(float(multiplier))
            least = np.minimum.reduceat(loaded, self.first)
            near = loaded[self.rows] <= least[self.table[self.rows]] + 1e-12
            wanted = np.zeros(len(self.paid))
            np.maximum.at(wanted, self.pair, near.astype(np.float64))
            self.paid = self.paid + wanted * 2.0 * unit / (number + 1)
            total = np.bincount(self.pair_key, self.paid, minlength=len(self.key_ms))
            over = np.maximum(total / np.maximum(self.key_ms, 1e-12), 1.0)
            self.paid = self.paid / over[self.pair_key]
            best = max(best, self.value(float(multiplier), room))
        return best


def _mean(problem: Problem, option: Option) -> Floats:
    return option.home + option.shards.sum(axis=0) / problem.num_ranks


def _bytes(problem: Problem, option: Option) -> float:
    memory = problem.pricing.memory
    return float(problem.num_ranks * memory(option.home) + memory(option.shards).sum())


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

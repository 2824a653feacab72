"""Fits non-negative prices to measured steps and shrinks the prices toward the built-in constants.

A step time is modeled as the maximum work of any rank plus the maximum transfer time of any rank in
each phase. First, a few factors are fitted almost without a penalty: one each for all constants of
work, the dense part, the fixed time of a step, bytes, and calls. These factors adapt the constants
to the machine and its link. Then each price may deviate from its scaled constant, at a penalty. All
errors are measured on tasks that were not used in the fit.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbpflow.costs.counts import FEATURES, INDEX, NUM_FEATURES, vector_of
from sbpflow.costs.ids import Floats
from sbpflow.costs.prices import CALLS, PHASES, SENT, WORK_MS, by_phase, shared
from sbpflow.errors import DataError
from sbpflow.planner.costs.profile import (
    ERROR,
    WITHIN_HOST_GB_PER_S,
    Link,
    Profile,
    far_share,
    parameter_bytes,
    partners,
)

FOLDS = 4
LEAST_SAMPLES = 3
LEAST_PLANS = 3  # rank correlations need at least this many plans of a task
# weight of a price's squared relative change, relative to the squared relative error of one step
SHRINKAGE = 0.01
# The same weight for the factors of the first fit. This weight keeps every factor above 0: on a
# slow link, short calibrations hardly measure the work of the ranks, and if work had no price, the
# planner would not balance it.
FIRST_SHRINKAGE = 0.001
DENSE_MS = vector_of(
    {"dense_macs": 2e-7, "dense_elements": 1e-6, "dense_parameters": 5e-6}
)  # default until a calibration has measured the dense part
_CALLS = vector_of({**CALLS, "always": 1.0})
_ALWAYS = vector_of({"always": 1.0})
_NONE = np.zeros(NUM_FEATURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured plan: the counts ``totals`` [D, F], and the step time in each round. The ranks
    are on ``num_hosts`` hosts of equal size, and ``ranks_per_link`` of them share a link.
    """

    sample: int
    totals: Floats
    rounds_ms: tuple[float, ...]
    num_hosts: int = 1
    ranks_per_link: int = 1

    @property
    def step_ms(self) -> float:
        return statistics.median(self.rounds_ms)


def fit(
    records: Sequence[Record], *, backend: str, about: Mapping[str, str] | None = None
) -> Profile:
    """Fit a profile to tasks measured on one world; raise DataError if there are too few."""
    samples = {record.sample for record in records}
    if len(samples) < LEAST_SAMPLES:
        raise DataError(
            f"calibration: a fit needs at least {LEAST_SAMPLES} measured samples, got "
            f"{len(samples)}; raise --seconds"
        )
    world_size = len(records[0].totals)
    work, *phases = fitted_prices(records)
    transfers = sum(phases, start=_NONE)
    byte_ms, call_ms = transfers[INDEX["vector_bytes"]], transfers[INDEX["num_id_calls"]]
    errors: dict[str, float] = {}
    if len(samples) >= 2 * FOLDS:
        of_tasks = errors_of(records, held_out_steps(records))
        errors = {name: statistics.mean(values) for name, values in of_tasks.items()}
    link = Link()
    if world_size > 1:
        link = _link(float(byte_ms), float(call_ms) / partners(world_size), records[0])
    return Profile(
        work_ms={name: float(ms) for name, ms in zip(FEATURES, work, strict=True) if ms},
        link=link,
        world_size=world_size,
        backend=backend,
        errors=errors,
        sources={
            "work": "measured",
            "transfers": "measured"
            if not link.ranks_per_node
            else f"measured between hosts; {link.within_gb_per_s} GB/s assumed within a host",
        },
        about=dict(about or {}),
    )


def _link(byte_ms: float, call_ms: float, like: Record) -> Link:
    """Return the link on which calls, and bytes sent evenly to all ranks, have these prices, for
    the ranks and hosts of the record ``like``.
    """
    rate, world_size = 1e-6 / max(byte_ms, 1e-12), len(like.totals)  # GB/s
    if like.num_hosts == 1:
        return Link(within_gb_per_s=rate, within_call_ms=call_ms)
    per_node = world_size // like.num_hosts
    between = rate * far_share(world_size, per_node)
    return Link(
        ranks_per_node=per_node,
        within_gb_per_s=max(WITHIN_HOST_GB_PER_S, between * per_node),
        between_gb_per_s=between,
        within_call_ms=call_ms,
        between_call_ms=call_ms,
        ranks_per_link=like.ranks_per_link,
    )


def fitted_prices(records: Sequence[Record], shrinkage: float = SHRINKAGE) -> Floats:
    """Return the ms per count of a rank's work and of each phase of its transfers, [times, F].

    Which ranks are busiest depends on the prices, so the fit is repeated with the busiest ranks of
    the previous fit. An infinite ``shrinkage`` keeps the ratios of the constants.
    """
    totals = np.stack([record.totals for record in records])
    ms = np.array([record.step_ms for record in records])
    per_link = records[0].ranks_per_link

    def scaled(terms: Floats, weight: float) -> Floats:
        result = terms
        for _ in range(3):
            busiest = _busiest(totals, result.sum(axis=0), per_link)
            result = terms * _solve(busiest, terms, ms, weight)[:, None, None]
        return result

    factors = scaled(_factors(records[0]), FIRST_SHRINKAGE)
    terms = scaled(_terms(factors), shrinkage) if np.isfinite(shrinkage) else factors
    return terms.sum(axis=0)


def _factors(like: Record) -> Floats:
    """Return the ms per count of work and of transfers by phase, [5, times, F], that each factor of
    the first fit scales, for the ranks and hosts of the record ``like``.

    With several hosts, only the links between hosts are priced as transfers. A byte that a two-hop
    exchange sends to another host then costs more than a byte that is sent evenly to all ranks,
    because a part of all evenly sent bytes stays within the host. In an all-reduce, a host sends as
    much to another host as a single rank (``Link.reduced_byte_ms``).
    """
    sent, world_size = SENT.copy(), len(like.totals)
    sent[INDEX["dense_parameters"]] = parameter_bytes(world_size)
    if 1 < like.num_hosts < world_size:
        per_node = world_size // like.num_hosts
        far = far_share(world_size, per_node)
        sent[INDEX["host_bytes"]] = 0.0
        sent[INDEX["network_bytes"]] = 1.0 / far
        for name in ("dense_parameters", "reduced_bytes"):
            sent[INDEX[name]] /= far * per_node
    # A single rank makes no calls, so all of a step's fixed time is work.
    calls = _CALLS if world_size > 1 else _NONE
    no_transfers = np.zeros((len(PHASES), NUM_FEATURES))
    return np.array(
        [
            *([work, *no_transfers] for work in (WORK_MS, DENSE_MS, _ALWAYS)),
            *([_NONE, *by_phase(transfers)] for transfers in (1e-6 * sent, calls)),
        ]
    )


def predicted_ms(prices: Floats, records: Sequence[Record]) -> Floats:
    """Return the predicted step time of each record."""
    totals = np.stack([record.totals for record in records])
    loads = shared(totals @ prices.T, records[0].ranks_per_link)
    return loads.max(axis=1).sum(axis=1)


def _busiest(totals: Floats, prices: Floats, ranks_per_link: int) -> Floats:
    """Return, for each of n plans, the counts [n, times, F] of the ranks with the most work, and of
    the ranks, or the means of the ranks on one link, with the longest transfers of each phase.
    """
    busiest = shared(totals @ prices.T, ranks_per_link).argmax(axis=1)  # [n, times]
    own = np.take_along_axis(totals, busiest[:, :1, None], axis=1)
    links = totals.reshape(len(totals), -1, ranks_per_link, NUM_FEATURES).mean(axis=2)
    slowest = np.take_along_axis(links, busiest[:, 1:, None] // ranks_per_link, axis=1)
    return np.concatenate([own, slowest], axis=1)


def _terms(scaled: Floats) -> Floats:
    """Return the terms [T, times, F] to scale: each count's work, the bytes, and the calls."""
    work = scaled[:, 0].sum(axis=0)
    priced = np.flatnonzero(work)
    rows = np.zeros((len(priced), *scaled.shape[1:]))
    rows[np.arange(len(priced)), 0, priced] = work[priced]
    return np.concatenate([rows, scaled[3:]])


def _solve(counts: Floats, terms: Floats, ms: Floats, shrinkage: float) -> Floats:
    """Return non-negative factors [T] of ``terms`` that minimize the squared relative errors.

    ``shrinkage`` is the weight of the squared distances of the factors from 1. The fit is repeated
    with lower weights for large errors, so that single slow measurements do not dominate.
    """
    x = np.einsum("nkf,tkf->nt", counts, terms) / ms[:, None]
    robust, factors = np.ones(len(ms)), np.ones(len(terms))
    for _ in range(3):
        weighted = x * robust[:, None]
        gram = weighted.T @ weighted + shrinkage * np.eye(len(terms))
        right = weighted.T @ robust + shrinkage
        factors = _nonnegative(gram, right)
        residual = np.abs(x @ factors - 1.0)
        usual = max(float(np.median(residual)), 1e-3)
        robust = np.sqrt(1.0 / np.maximum(1.0, residual / (3.0 * usual)))
    return factors


def _nonnegative(gram: Floats, right: Floats, rounds: int = 2000) -> Floats:
    """Return the w >= 0 that minimizes w.gram.w / 2 - right.w, found by coordinate descent."""
    diagonal = np.maximum(np.diag(gram), 1e-12)
    weights = np.zeros(len(right))
    for _ in range(rounds):
        before = weights.copy()
        for place in range(len(weights)):
            step = (right[place] - gram[place] @ weights) / diagonal[place]
            weights[place] = max(0.0, weights[place] + step)
        if np.abs(weights - before).max() <= 1e-9 * max(float(weights.max()), 1e-9):
            break
    return weights


def held_out_steps(
    records: Sequence[Record], prices_of: Callable[[Sequence[Record]], Floats] = fitted_prices
) -> Floats:
    """Predict the step times of each of ``FOLDS`` folds of tasks with a fit to the others."""
    samples = sorted({record.sample for record in records})
    predicted = np.zeros(len(records))
    for fold in range(FOLDS):
        held = set(samples[fold::FOLDS])
        mine = [n for n, record in enumerate(records) if record.sample in held]
        prices = prices_of([record for record in records if record.sample not in held])
        predicted[mine] = predicted_ms(prices, [records[n] for n in mine])
    return predicted


def errors_of(records: Sequence[Record], predicted: Floats) -> dict[str, list[float]]:
    """Return error measures of predicted step times: two over all steps, and the others for each
    task. A model can predict step times well and still choose bad plans. The regret is how much
    slower the plan with the shortest predicted time is than the task's fastest plan. For
    comparison, the result includes the regret of a random plan, and of choosing by the first round
    of measurements (the noise).
    """
    residual = np.abs(np.log(predicted / [record.step_ms for record in records]))
    errors: dict[str, list[float]] = {
        "step relative": [float(np.expm1(np.median(residual)))],
        ERROR: [float(np.expm1(np.quantile(residual, 0.9)))],
    }
    for sample in sorted({record.sample for record in records}):
        mine = [n for n, record in enumerate(records) if record.sample == sample]
        if len(mine) < LEAST_PLANS:
            continue
        real = np.array([records[n].step_ms for n in mine])
        regret = real / real.min() - 1.0
        errors.setdefault("regret", []).append(float(regret[predicted[mine].argmin()]))
        errors.setdefault("regret of a random plan", []).append(float(regret.mean()))
        errors.setdefault("rank correlation", []).append(spearman(real, predicted[mine]))
        rounds = [records[n].rounds_ms for n in mine]
        if min(map(len, rounds)) >= 2:
            later = np.array([np.mean(times[1:]) for times in rounds])
            first = int(np.argmin([times[0] for times in rounds]))
            errors.setdefault("regret of one round", []).append(later[first] / later.min() - 1.0)
    return errors


def spearman(a: Floats, b: Floats) -> float:
    """Return the rank correlation of two lists without ties."""
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

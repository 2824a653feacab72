"""Fits a profile to measurements: weights by least squares, then corrections and overlap.

Weights are non-negative and minimize relative errors, so short and long phases are equally
important. ``planner/calibration/corrections.py`` learns the corrections. Errors are reported for
held-out tasks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbpflow.costs.counts import INDEX, NUM_FEATURES
from sbpflow.costs.ids import Floats
from sbpflow.errors import DataError
from sbpflow.planner.calibration.corrections import examples_of, learn_corrections
from sbpflow.planner.calibration.cross_validation import (
    FLOOR_MS,
    cross_validation,
    predicted_phases,
    predicted_steps,
)
from sbpflow.planner.calibration.least_squares import nonnegative_least_squares
from sbpflow.planner.calibration.records import Record, on_one_clock
from sbpflow.planner.calibration.time_dense import DenseTime, dense_examples
from sbpflow.planner.costs.profile import KernelPrices, Profile
from sbpflow.planner.costs.simulate import NUM_PHASES, PHASE, PHASES, REST, TRANSFERS, step_ms
from sbpflow.planner.costs.transfers import Transfer, examples, ms_per_byte
from sbpflow.training.step_schedule import (
    COUNTED_IDS,
    COUNTS,
    DENSE_GRADIENTS,
    IDS,
    ROW_GRADIENTS,
    VECTORS,
)

_GROUPS = (
    "num_dense_groups",
    "num_summed_groups",
    "num_row_transfers",
    "num_row_gathers",
    "num_whole_groups",
)
_EXPANDED = ("expand_rows", "expand_elements")
# A phase's time can depend only on these features; the weights of all other features are 0.
TERMS: Mapping[str, tuple[str, ...]] = {
    "start_id_exchange": (
        "always",
        "batch_ids",
        "home_sort",
        "home_unique",
        "num_row_transfers",
        "num_row_gathers",
    ),
    "exchange_ids": ("always", "home_unique", "num_row_transfers", "num_row_gathers"),
    "lookup": (
        *("always", "seen_ids", "read_rows", "read_elements", "read_touched", "out_elements"),
        *(*_GROUPS, "num_stacks"),
    ),
    "gather_outputs": ("always", "home_elements", *_EXPANDED, *_GROUPS),
    "forward": ("always", "dense_macs", "dense_elements"),
    "backward": ("always", "dense_macs", "dense_elements"),
    "send_grads": (
        "always",
        "home_elements",
        *_EXPANDED,
        "repeat_elements",
        "whole_elements",
        *_GROUPS,
    ),
    "receive_grads": ("always", "gradient_in_bytes", "whole_elements", *_GROUPS),
    "send_dense": ("always", "dense_parameters"),
    "receive_dense": ("always", "dense_parameters"),
    "update": (
        *("always", "update_ids", "update_elements", "step_rows", "step_elements"),
        *("whole_elements", "square_bytes", "num_stacks", "num_squares"),
    ),
    "update_dense": ("always", "dense_parameters"),
    IDS: ("ids_bytes", "num_id_calls", "num_row_transfers", "num_row_gathers"),
    COUNTS: (),  # the wait for the counts is part of the wait for the ids
    COUNTED_IDS: ("counted_bytes", "num_row_transfers", "num_row_gathers"),
    VECTORS: (
        "vector_bytes",
        "vector_in_bytes",
        "num_dense_groups",
        "num_summed_groups",
        "num_row_transfers",
    ),
    ROW_GRADIENTS: ("gradient_bytes", "gradient_in_bytes", *_GROUPS),
    DENSE_GRADIENTS: ("always", "dense_parameters"),
    REST: (),  # the rest of a step's time; see ``_overlap``
}
REST_TERMS = ("always", "num_stacks", "vector_bytes")  # ``vector_bytes`` includes gradients here
FOLDS = 4
# weight of the squared errors of transfers and dense parts measured alone, relative to plans
ALONE_WEIGHT = 8.0
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def fit(
    records: Sequence[Record],
    *,
    backend: str,
    transfers: Sequence[Transfer] = (),
    dense: Sequence[DenseTime] = (),
    seed: int = 0,
    about: Mapping[str, str] | None = None,
    step_factors: Mapping[str, float] | None = None,
    kernels: Mapping[str, KernelPrices] | None = None,
    judged: bool = True,
) -> Profile:
    """Fit a profile to measurements of several tasks on one world; raise DataError for too few.

    ``judged`` also fits subsets of the tasks, to report the errors on the other tasks.
    """
    samples = sorted({record.sample for record in records})
    if len(samples) < 3:
        raise DataError(
            f"calibration: {len(samples)} measured samples; use 3 or more: calibrate longer"
        )
    errors: dict[str, float] = {}
    if judged and len(samples) >= 2 * FOLDS:
        errors = held_out_errors(records, backend, seed, transfers, dense)
    return replace(
        _fit(on_one_clock(records), backend, seed, transfers, dense),
        transfers=tuple(transfers),
        step_factors=dict(step_factors or {}),
        kernels=dict(kernels or {}),
        errors=errors,
        sources={"work": "measured", "transfers": "measured", "fusion": "learned from measured"},
        about=dict(about or {}),
    )


def held_out_errors(
    records: Sequence[Record],
    backend: str,
    seed: int,
    transfers: Sequence[Transfer],
    dense: Sequence[DenseTime],
) -> dict[str, float]:
    """Return the errors on every task of a fit to the other tasks; each fold has a ``FOLDS``-th of
    them.
    """
    samples = sorted({record.sample for record in records})
    phases: dict[int, Floats] = {}
    steps: dict[int, float] = {}
    for fold in range(FOLDS):
        held = set(samples[fold::FOLDS])
        mine = [n for n, record in enumerate(records) if record.sample in held]
        train = [record for record in records if record.sample not in held]
        profile = _fit(on_one_clock(train), backend, seed, transfers, dense)
        tested = [records[n] for n in mine]
        phases |= dict(zip(mine, predicted_phases(profile, tested), strict=True))
        steps |= dict(zip(mine, predicted_steps(profile, tested).tolist(), strict=True))
    order = range(len(records))
    return cross_validation(
        records, [phases[n] for n in order], np.array([steps[n] for n in order])
    )


def _fit(
    records: Sequence[Record],
    backend: str,
    seed: int,
    transfers: Sequence[Transfer],
    dense: Sequence[DenseTime],
) -> Profile:
    world_size = records[0].totals.shape[0]
    matrix = np.zeros((NUM_FEATURES, NUM_PHASES))
    for name in PHASES:
        x, y = examples_of(records, name)
        timed = (examples(transfers, name, world_size), dense_examples(dense, name))
        alone, alone_ms = (np.concatenate(parts) for parts in zip(*timed, strict=True))
        both, importance = np.concatenate([y, alone_ms]), np.ones(len(y) + len(alone_ms))
        importance[len(y) :] = math.sqrt(ALONE_WEIGHT)
        matrix[:, PHASE[name]] = _weights(
            np.concatenate([x, alone]), both, TERMS[name], importance / (both + FLOOR_MS)
        )
    members = learn_corrections(records, matrix, TERMS, seed)
    profile = Profile(
        weights=tuple(tuple(row) for row in matrix.tolist()),
        world_size=world_size,
        backend=backend,
        members=tuple(members) if members[0] else (),
    )
    hidden, rest = _overlap(profile, records, transfers)
    matrix[:, PHASE[REST]] = rest
    return replace(profile, weights=tuple(tuple(row) for row in matrix.tolist()), hidden=hidden)


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Stores the shares of transfers hidden by overlap, the rest of the steps [F], and the
    error.
    """

    hidden: dict[str, float]
    rest: Floats
    error: float


def _overlap(
    profile: Profile, records: Sequence[Record], transfers: Sequence[Transfer]
) -> tuple[dict[str, float], Floats]:
    """Fit the overlap and the rest to the measured steps.

    Both are fitted together: a whole step takes longer than its phases suggest, and overlap shares
    fitted alone would absorb the difference. First, all transfers get one share, then each transfer
    gets its own. The rest may depend on bytes, because consecutive steps fill a link more than
    single steps do. A byte must not cost more than in a transfer measured alone, or the rest fitted
    to small plans would dominate large plans. Bytes of vectors and of gradients share one weight,
    because two separate weights absorbed each other's errors.
    """
    vectors, gradients = INDEX["vector_bytes"], INDEX["gradient_bytes"]
    most = np.full(NUM_FEATURES, np.inf)
    most[vectors] = ms_per_byte(transfers)
    phases = np.stack(predicted_phases(profile, records))
    actual = np.array([record.step_ms for record in records])
    x = np.stack([record.totals.max(0) for record in records])
    x[:, vectors] += x[:, gradients]
    x[:, gradients] = 0.0

    def tried(shares: dict[str, float]) -> _Overlap:
        predicted = step_ms(phases, shares)
        rest = _weights(x, actual - predicted, REST_TERMS, importance=1.0 / actual, most=most)
        residual = np.log(np.maximum(predicted + x @ rest, 1e-3) / actual)
        return _Overlap(shares, rest, float(np.mean(np.minimum(residual**2, 0.25))))

    def least(candidates: Sequence[_Overlap]) -> _Overlap:
        return min(candidates, key=lambda candidate: candidate.error)

    best = least([tried(dict.fromkeys(TRANSFERS, share)) for share in _SHARES])
    for kind in TRANSFERS:
        best = least([best, *(tried({**best.hidden, kind: share}) for share in _SHARES)])
    best.rest[gradients] = best.rest[vectors]
    return best.hidden, best.rest


def _weights(
    x: Floats,
    y: Floats,
    terms: Sequence[str],
    importance: Floats,
    most: Floats | None = None,
) -> Floats:
    """Fit [F] non-negative weights, reweighted twice so that single slow measurements do not
    dominate.

    ``importance`` [n] multiplies the errors. ``most`` [F] is the upper bound of the weights.
    """
    weights = np.zeros(NUM_FEATURES)
    columns = [INDEX[name] for name in terms]
    if not columns or not y.any():
        return weights
    size = np.maximum(x[:, columns].max(0), 1e-12)
    scaled = x[:, columns] / size
    limit = None if most is None else most[columns] * size
    robust = np.ones_like(y)
    solution = np.zeros(len(columns))
    for _ in range(3):
        factor = importance * robust
        solution = nonnegative_least_squares(scaled * factor[:, None], y * factor, most=limit)
        residual = np.abs(scaled @ solution - y) * importance
        usual = max(float(np.median(residual)), 1e-3)
        robust = np.sqrt(1.0 / np.maximum(1.0, residual / (3.0 * usual)))
    weights[columns] = solution / size
    return weights

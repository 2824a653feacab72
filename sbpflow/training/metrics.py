"""Metrics of predictions: exact, and the same for any order and number of ranks.

Knows no ranks: whoever calls has gathered the scores. All accept numpy arrays or torch tensors.
Definitions and their sources: docs/metrics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.errors import MetricError

Values = NDArray[np.generic] | Tensor


NUM_CALIBRATION_BINS = 20


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Rows of similar predictions: how many, the mean chance p given to label 1, its real share."""

    num_rows: int
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics over one part of the data; ``auc`` is None where ``no_auc`` says why.

    ``gauc`` is there where rows have groups, ``no_auc`` does not say anything, and some group has
    both classes. ``predicted`` is the sum of the chances p of label 1, ``positives`` the rows that
    have it. ``auc_error`` bounds the error of an AUC by histogram; an exact one has none. Sample
    weights have no part in any of them.
    """

    num_rows: int
    logloss: float
    auc: float | None
    no_auc: str | None = None
    gauc: float | None = None
    normalised_entropy: float | None = None
    predicted: float | None = None
    positives: int | None = None
    auc_error: float | None = None
    calibration: tuple[CalibrationBin, ...] = ()
    slices: "tuple[Slice, ...]" = ()

    @property
    def calibration_ratio(self) -> float | None:
        """sum of p / rows of label 1, or ``None`` where there are none: above 1 promises more."""
        if self.predicted is None or not self.positives:
            return None
        return self.predicted / self.positives


@dataclass(frozen=True, slots=True)
class Slice:
    """Metrics of the rows that have ``value`` in a column of ids.

    Without ``value`` they are of the column: ``num_rows`` those of values with both classes, and
    ``auc`` the mean of the AUCs within these values, each times its rows (``gauc`` by value).
    """

    column: str
    num_rows: int
    auc: float | None
    value: int | None = None
    logloss: float | None = None
    calibration_ratio: float | None = None


def evaluate(logits: Values, labels: Values, groups: Values | None = None) -> Evaluation:
    """All metrics; a part with one class only has a logloss and no AUC."""
    loss = logloss(logits, labels)
    is_positive = _labels(labels)
    rows, positives = len(is_positive), int(is_positive.sum())
    chances = _chances(_scores(logits, labels))
    reason = one_class(positives, rows)
    grouped = None
    if reason is None and groups is not None:
        grouped = _gauc(logits, labels, groups)
    return Evaluation(
        rows,
        loss,
        auc(logits, labels) if reason is None else None,
        reason,
        gauc=grouped,
        normalised_entropy=normalised_entropy(loss, positives, rows),
        predicted=math.fsum(chances.tolist()),
        positives=positives,
        calibration=_calibration(chances, is_positive),
    )


def normalised_entropy(logloss: float, positives: int, rows: int) -> float | None:
    """logloss over that of always predicting the share of positives; ``None`` for one class.

    X. He et al., Practical lessons from predicting clicks on ads at Facebook, ADKDD 2014, equation
    1, with the rate of the rows that are evaluated. The base of the logarithm cancels.
    """
    share = positives / rows
    if not 0.0 < share < 1.0:
        return None
    return logloss / -(share * math.log(share) + (1.0 - share) * math.log1p(-share))


def slice_by(
    logits: Values, labels: Values, values: Values, column: str, *, most: int = 10
) -> tuple[Slice, ...]:
    """The column as a whole, then its ``most`` frequent values; of equal ones the smaller ids."""
    ids, predictions, classes = _flat(values), _flat(logits), _flat(labels)
    found, counts = np.unique(ids, return_counts=True)
    slices: list[Slice] = []
    for place in np.argsort(-counts, kind="stable")[:most]:
        rows = ids == found[place]
        one = evaluate(predictions[rows], classes[rows])
        slices.append(
            Slice(
                column,
                one.num_rows,
                one.auc,
                int(found[place]),
                one.logloss,
                one.calibration_ratio,
            )
        )
    is_positive, at = _labels(classes), np.searchsorted(found, ids)
    positives = np.bincount(at, weights=is_positive, minlength=len(found))
    both = int(counts[(positives > 0) & (positives < counts)].sum())
    whole = Slice(column, both, _gauc(predictions, classes, ids))
    return (whole, *slices)


def calibration_groups(
    rows: Sequence[int], chances: Sequence[float], positives: Sequence[int]
) -> tuple[CalibrationBin, ...]:
    """Neighbouring bins of ascending p joined to about ``NUM_CALIBRATION_BINS`` of equal rows."""
    total, want = sum(rows), 1
    groups: list[CalibrationBin] = []
    count, chance, positive, seen = 0, 0.0, 0, 0
    for n, c, p in zip(rows, chances, positives, strict=True):
        count, chance, positive, seen = count + n, chance + c, positive + p, seen + n
        if n and seen * NUM_CALIBRATION_BINS >= want * total:
            groups.append(CalibrationBin(count, chance / count, positive / count))
            count, chance, positive = 0, 0.0, 0
            want = seen * NUM_CALIBRATION_BINS // total + 1
    return tuple(groups)


def _calibration(
    chances: NDArray[np.float64], is_positive: NDArray[np.bool_]
) -> tuple[CalibrationBin, ...]:
    """Rows by ascending p in ``NUM_CALIBRATION_BINS`` of equal size; equal p are not told apart."""
    order = np.argsort(chances, kind="stable")
    chances, is_positive = chances[order], is_positive[order]
    parts = np.array_split(np.arange(len(chances)), NUM_CALIBRATION_BINS)
    return tuple(
        CalibrationBin(len(part), float(chances[part].mean()), float(is_positive[part].mean()))
        for part in parts
        if len(part)
    )


def _chances(logits: NDArray[np.generic]) -> NDArray[np.float64]:
    """sigmoid in float64, which neither overflows nor loses small ones."""
    return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))


def auc(scores: Values, labels: Values) -> float:
    """Share of (positive, negative) pairs that ``scores`` orders rightly; a tie counts half.

    ``scores [n]`` any monotone score (logits will do), ``labels [n]`` 0 or 1. Counts pairs in
    integers, so the only rounding is one division. MetricError for NaN, or one class only.
    """
    values, is_positive = _scores(scores, labels), _labels(labels)
    reason = one_class(int(is_positive.sum()), len(is_positive))
    if reason is not None:
        raise MetricError(f"AUC: {reason}")
    positives, negatives = np.sort(values[is_positive]), np.sort(values[~is_positive])
    below = int(np.searchsorted(negatives, positives, side="left").sum(dtype=np.int64))
    below_or_tied = int(np.searchsorted(negatives, positives, side="right").sum(dtype=np.int64))
    return (below + below_or_tied) / (2 * len(positives) * len(negatives))


def gauc(scores: Values, labels: Values, groups: Values) -> float:
    """Mean of the AUCs within groups, each times its rows: sum(n_g AUC_g) / sum(n_g).

    Over the groups that have both classes; n_g counts all rows of a group. Definition: G. Zhou et
    al., Deep interest network for click-through rate prediction, KDD 2018, section 6 (equation 8),
    with impressions as weights. ``groups [n]`` integers, any. MetricError where no group has both.
    """
    found = _gauc(scores, labels, groups)
    if found is None:
        raise MetricError("GAUC: no group has rows of both classes, there is no pair")
    return found


def _gauc(scores: Values, labels: Values, groups: Values) -> float | None:
    values, is_positive, group = _scores(scores, labels), _labels(labels), _flat(groups)
    if len(group) != len(values):
        raise MetricError(f"{len(values)} predictions for {len(group)} groups")
    order = np.lexsort((values, group))
    values, is_positive, group = values[order], is_positive[order], group[order]
    new_group = np.concatenate([[True], group[1:] != group[:-1]])
    tied = np.flatnonzero(new_group | np.concatenate([[True], values[1:] != values[:-1]]))
    first = np.flatnonzero(new_group)
    group_of_tied = np.cumsum(new_group)[tied] - 1
    positives = np.add.reduceat(is_positive, tied, dtype=np.int64)
    negatives = np.diff(tied, append=len(values)) - positives
    below = np.cumsum(negatives) - negatives
    below -= below[np.searchsorted(tied, first)][group_of_tied]
    # Twice the pairs in order, a tie counting one: integers, so that nothing is rounded.
    in_order = np.add.reduceat(positives * (2 * below + negatives), np.searchsorted(tied, first))
    rows = np.diff(first, append=len(values))
    of_class_1 = np.add.reduceat(is_positive, first, dtype=np.int64)
    pairs = of_class_1 * (rows - of_class_1)
    both = pairs > 0
    if not both.any():
        return None
    terms = rows[both] * (in_order[both] / (2 * pairs[both]))
    return math.fsum(terms.tolist()) / int(rows[both].sum())


def logloss(logits: Values, labels: Values) -> float:
    """Mean of -log p(label) in float64, ``logits [n]``, ``labels [n]`` 0 or 1; never overflows.

    The sum is correctly rounded (fsum), hence independent of order. MetricError for NaN.
    """
    values, is_positive = _scores(logits, labels), _labels(labels)
    margins = np.where(is_positive, -values.astype(np.float64), values.astype(np.float64))
    return math.fsum(np.logaddexp(0.0, margins).tolist()) / len(margins)


def _scores(scores: Values, labels: Values) -> NDArray[np.generic]:
    values = _flat(scores)
    if len(values) != len(_flat(labels)):
        raise MetricError(f"{len(values)} predictions for {len(_flat(labels))} labels")
    if len(values) == 0:
        raise MetricError("no predictions; a metric needs at least one row")
    nans = int(np.isnan(values).sum())
    if nans:
        row = int(np.isnan(values).argmax())
        raise MetricError(f"{nans} of {len(values)} predictions are NaN, the first in row {row}")
    return values


def _labels(labels: Values) -> NDArray[np.bool_]:
    flat = _flat(labels)
    is_positive = flat == 1
    if not bool(np.all(is_positive | (flat == 0))):
        wrong = flat[~(is_positive | (flat == 0))][0]
        raise MetricError(f"label {wrong} is not 0 or 1")
    return is_positive


def one_class(positives: int, rows: int) -> str | None:
    """Why there is no AUC, if there is none."""
    if 0 < positives < rows:
        return None
    only = "positive" if positives else "negative"
    return f"all {rows} rows are {only}, there is no pair"


def _flat(values: Values) -> NDArray[np.generic]:
    """One dim, on the host; half types widen to float32 (exactly), numpy having no bfloat16."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        half = tensor.is_floating_point() and tensor.itemsize < 4
        values = (tensor.float() if half else tensor).numpy()
    return values.reshape(-1)

"""Computes exact metrics that do not depend on the order of rows or the number of ranks.

Callers must first gather the scores of all ranks. Scores and labels can be numpy arrays or torch
tensors. docs/metrics.md lists the definitions and their sources.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.config.metrics import Metric
from sbpflow.errors import MetricError

Values = NDArray[np.generic] | Tensor
GroupTerms = Callable[[Values, Values, Values], tuple[NDArray[np.float64], int]]

NUM_CALIBRATION_BINS = 20
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """A group of rows with similar predictions: number of rows, mean prediction p, share of label
    1.
    """

    num_rows: int
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics of one split. If ``auc`` is None, ``no_auc`` gives the reason.

    * ``gauc``: the mean AUC within groups of rows, or None without groups that have both classes.
    * ``predicted``, ``positives``: the sum of the predictions p, and the number of rows with label
      1.
    * ``auc_error``: an upper bound on the error of an AUC from a histogram, or None for an exact
      AUC.

    The metrics do not use sample weights.
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
        """Return sum(p) / positives, or None without positives; a value above 1 means that p is too
        high."""
        if self.predicted is None or not self.positives:
            return None
        return self.predicted / self.positives


@dataclass(frozen=True, slots=True)
class Slice:
    """The metrics of the rows with one ``value`` in an id column.

    If ``value`` is None, the slice summarizes the column: ``auc`` is the GAUC with the column's
    values as groups, and ``num_rows`` counts the rows of groups with both classes.
    """

    column: str
    num_rows: int
    auc: float | None
    value: int | None = None
    logloss: float | None = None
    calibration_ratio: float | None = None


def evaluate(logits: Values, labels: Values, groups: Values | None = None) -> Evaluation:
    """Compute all metrics. The AUC is None if all rows have the same label."""
    loss = logloss(logits, labels)
    is_positive = _labels(labels)
    rows, positives = len(is_positive), int(is_positive.sum())
    # This form of the float64 sigmoid neither overflows nor rounds small probabilities to 0.
    p = np.exp(-np.logaddexp(0.0, -_scores(logits, labels).astype(np.float64)))
    reason = one_class(positives, rows)
    evaluation = Evaluation(
        rows,
        loss,
        auc(logits, labels) if reason is None else None,
        reason,
        normalised_entropy=normalised_entropy(loss, positives, rows),
        predicted=_exact_sum(p),
        positives=positives,
        calibration=_calibration(p, is_positive),
    )
    if groups is None:
        return evaluation
    parts = {name: terms(logits, labels, groups) for name, terms in GROUPED.items()}
    return replace(evaluation, **{name: _mean(*part) for name, part in parts.items()})


def normalised_entropy(logloss: float, positives: int, rows: int) -> float | None:
    """Return the logloss divided by the logloss of a model that always predicts the share of
    positives.

    Returns ``None`` if there is only one class. The definition is from He et al., Practical lessons
    from predicting clicks on ads at Facebook, ADKDD 2014, equation 1, with the click rate of the
    evaluated rows. The base of the logarithm cancels.
    """
    share = positives / rows
    if not 0.0 < share < 1.0:
        return None
    return logloss / -(share * math.log(share) + (1.0 - share) * math.log1p(-share))


def slice_by(
    logits: Values, labels: Values, values: Values, column: str, *, most: int = 10
) -> tuple[Slice, ...]:
    """Return the column's summary, followed by the slices of its most frequent values, at most
    ``most`` of them.

    Among equally frequent values, the smaller id comes first.
    """
    ids, predictions, classes = _flat(values), _flat(logits), _flat(labels)
    unique, counts = np.unique(ids, return_counts=True)
    slices: list[Slice] = []
    for place in np.argsort(-counts, kind="stable")[:most]:
        rows = ids == unique[place]
        slices.append(slice_of(column, int(unique[place]), predictions[rows], classes[rows]))
    terms, num_rows = group_terms(predictions, classes, ids)
    return (Slice(column, num_rows, _mean(terms, num_rows)), *slices)


def slice_of(column: str, value: int, logits: Values, labels: Values) -> Slice:
    """Return the metrics of the rows with one ``value`` of a column."""
    scored = evaluate(logits, labels)
    return Slice(
        column, scored.num_rows, scored.auc, value, scored.logloss, scored.calibration_ratio
    )


def calibration_groups(
    rows: Sequence[int], predicted: Sequence[float], positives: Sequence[int]
) -> tuple[CalibrationBin, ...]:
    """Merge adjacent bins of ascending p into at most ``NUM_CALIBRATION_BINS`` bins of about equal
    size.

    For each bin, ``rows`` is the number of rows, ``predicted`` the sum of p, and ``positives`` the
    number of rows with label 1.
    """
    total, want = sum(rows), 1
    groups: list[CalibrationBin] = []
    count, p_sum, positive, seen = 0, 0.0, 0, 0
    for bin_rows, bin_p, bin_positives in zip(rows, predicted, positives, strict=True):
        count, seen = count + bin_rows, seen + bin_rows
        p_sum, positive = p_sum + bin_p, positive + bin_positives
        if bin_rows and seen * NUM_CALIBRATION_BINS >= want * total:
            groups.append(CalibrationBin(count, p_sum / count, positive / count))
            count, p_sum, positive = 0, 0.0, 0
            want = seen * NUM_CALIBRATION_BINS // total + 1
    return tuple(groups)


def _calibration(
    p: NDArray[np.float64], is_positive: NDArray[np.bool_]
) -> tuple[CalibrationBin, ...]:
    """Sort rows by p into ``NUM_CALIBRATION_BINS`` bins of about equal size.

    Rows with equal p may end up in different bins.
    """
    order = np.argsort(p, kind="stable")
    parts = np.array_split(order, NUM_CALIBRATION_BINS)
    return tuple(
        CalibrationBin(len(part), float(p[part].mean()), float(is_positive[part].mean()))
        for part in parts
        if len(part)
    )


def auc(scores: Values, labels: Values) -> float:
    """Return the share of (positive, negative) pairs that ``scores`` orders correctly.

    A tie counts half. ``scores [n]`` are an increasing function of the logits; ``labels [n]`` are 0
    or 1. Pairs are counted in integers, so only the final division is rounded. Raises MetricError
    for NaN, or if there is only one class.
    """
    values, is_positive = _scores(scores, labels), _labels(labels)
    reason = one_class(int(is_positive.sum()), len(is_positive))
    if reason is not None:
        raise MetricError(f"AUC: {reason}")
    positives, negatives = np.sort(values[is_positive]), np.sort(values[~is_positive])
    below = int(np.searchsorted(negatives, positives, side="left").sum(dtype=np.int64))
    below_or_tied = int(np.searchsorted(negatives, positives, side="right").sum(dtype=np.int64))
    return (below + below_or_tied) / (2 * len(positives) * len(negatives))


def gauc(scores: Values, labels: Values, groups: Values) -> float | None:
    """Return the mean of the groups' AUCs, weighted by rows: sum(n_g AUC_g) / sum(n_g), where n_g
    is the number of rows of group g. The sums include only groups with both classes; without such a
    group, the result is None. The definition is from Zhou et al., Deep interest network for
    click-through rate prediction, KDD 2018, section 6 (equation 8), with impressions as weights.
    ``groups [n]`` can be any integers.
    """
    return _mean(*group_terms(scores, labels, groups))


def _mean(terms: NDArray[np.float64], num_rows: int) -> float | None:
    return math.fsum(terms.tolist()) / num_rows if num_rows else None


def group_terms(scores: Values, labels: Values, groups: Values) -> tuple[NDArray[np.float64], int]:
    """Return n_g AUC_g (see ``gauc``) of each group with both classes, and the sum of n_g over
    these groups.
    """
    if not len(_flat(groups)) and not len(_flat(labels)):
        return np.empty(0), 0
    values, is_positive, group = _scores(scores, labels), _labels(labels), _flat(groups)
    if len(group) != len(values):
        raise MetricError(
            f"there are {len(values)} predictions, but {len(group)} group IDs; pass one group ID "
            "per prediction"
        )
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
    # Compute twice the number of correctly ordered pairs, plus the number of ties. This number is
    # an integer, so nothing is rounded; counting each tie as 1/2 would need fractions.
    in_order = np.add.reduceat(positives * (2 * below + negatives), np.searchsorted(tied, first))
    rows = np.diff(first, append=len(values))
    of_class_1 = np.add.reduceat(is_positive, first, dtype=np.int64)
    pairs = of_class_1 * (rows - of_class_1)
    both = pairs > 0
    return rows[both] * (in_order[both] / (2 * pairs[both])), int(rows[both].sum())


# The metrics that need groups of rows. Each function takes scores, labels, and groups ([n], where n
# may be 0), and returns a term per group and a number of rows; the metric is the sum of the terms
# divided by this number. A term is 0, or its absolute value is at least 2^-81 and below 2^79, so
# that ranks can add up the terms exactly.
GROUPED: dict[Metric, GroupTerms] = {"gauc": group_terms}


def logloss(logits: Values, labels: Values) -> float:
    """Return the mean of -log p(label) in float64, without overflow.

    ``logits [n]`` and ``labels [n]`` (0 or 1) contain one value per row. The sum is correctly
    rounded (fsum), so the order of the rows does not matter. Raises MetricError for NaN.
    """
    values, is_positive = _scores(logits, labels), _labels(labels)
    margins = values.astype(np.float64)
    np.negative(margins, out=margins, where=is_positive)
    return _exact_sum(np.logaddexp(0.0, margins)) / len(margins)


def _exact_sum(values: NDArray[np.float64]) -> float:
    """Return the correctly rounded sum. A list of all values would take 32 bytes per value."""
    starts = range(0, len(values), _BLOCK)
    blocks = (values[start : start + _BLOCK].tolist() for start in starts)
    return math.fsum(chain.from_iterable(blocks))


def _scores(scores: Values, labels: Values) -> NDArray[np.generic]:
    values = _flat(scores)
    if len(values) != len(_flat(labels)):
        raise MetricError(
            f"there are {len(values)} predictions, but {len(_flat(labels))} labels; pass one "
            "label per prediction"
        )
    if len(values) == 0:
        raise MetricError("a metric needs at least one row, got no predictions")
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
        raise MetricError(f"labels must be 0 or 1, got {wrong}")
    return is_positive


def one_class(positives: int, rows: int) -> str | None:
    """Return the reason why the AUC is undefined, or ``None`` if it is defined."""
    if 0 < positives < rows:
        return None
    only = "positive" if positives else "negative"
    return f"all {rows} rows are {only}, so there are no pairs to compare"


def _flat(values: Values) -> NDArray[np.generic]:
    """Return the values as a flat array on the host. float16 and bfloat16 (which numpy does not
    support) become float32, which is exact.
    """
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        half = tensor.is_floating_point() and tensor.itemsize < 4
        values = (tensor.float() if half else tensor).numpy()
    return values.reshape(-1)

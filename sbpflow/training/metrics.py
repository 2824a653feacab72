"""AUC, GAUC and logloss of predictions: exact, and the same for any order and number of ranks.

Knows no ranks: whoever calls has gathered the scores. All accept numpy arrays or torch tensors.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.errors import MetricError

Values = NDArray[np.generic] | Tensor


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics over one part of the data; ``auc`` is None where ``no_auc`` says why.

    ``gauc`` is there where rows have groups, ``no_auc`` does not say anything, and some group has
    both classes. Sample weights have no part in any of them.
    """

    num_rows: int
    logloss: float
    auc: float | None
    no_auc: str | None = None
    gauc: float | None = None


def evaluate(logits: Values, labels: Values, groups: Values | None = None) -> Evaluation:
    """All metrics; a part with one class only has a logloss and no AUC."""
    loss = logloss(logits, labels)
    rows = len(_flat(labels))
    reason = _one_class(_labels(labels))
    if reason is not None:
        return Evaluation(rows, loss, None, reason)
    grouped = None if groups is None else _gauc(logits, labels, groups)
    return Evaluation(rows, loss, auc(logits, labels), gauc=grouped)


def auc(scores: Values, labels: Values) -> float:
    """Share of (positive, negative) pairs that ``scores`` orders rightly; a tie counts half.

    ``scores [n]`` any monotone score (logits will do), ``labels [n]`` 0 or 1. Counts pairs in
    integers, so the only rounding is one division. MetricError for NaN, or one class only.
    """
    values, is_positive = _scores(scores, labels), _labels(labels)
    reason = _one_class(is_positive)
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


def _one_class(is_positive: NDArray[np.bool_]) -> str | None:
    num_positive = int(is_positive.sum())
    if 0 < num_positive < len(is_positive):
        return None
    only = "positive" if num_positive else "negative"
    return f"all {len(is_positive)} rows are {only}, there is no pair"


def _flat(values: Values) -> NDArray[np.generic]:
    """One dim, on the host; half types widen to float32 (exactly), numpy having no bfloat16."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        half = tensor.is_floating_point() and tensor.itemsize < 4
        values = (tensor.float() if half else tensor).numpy()
    return values.reshape(-1)

"""Computes metrics from a histogram and from sums, if there are too many predictions to gather.

Each rank counts its rows in bins of equal width over the predicted probability p. The counts are
integers and add up exactly, so the AUC and its error bound do not depend on the order of rows or
the number of ranks. By contrast, the last bits of the float64 sums of logloss and p depend on both.
"""

import math

import torch
from torch import Tensor

from sbpflow.boxing.agreement import combine_parts
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import MetricError
from sbpflow.sbp.sbp import Partial
from sbpflow.training.metrics import Evaluation, calibration_groups, normalised_entropy, one_class

NUM_BINS = 10_000


class ScoreHistogram:
    """Counts this rank's rows by bin and label, and sums logloss and p."""

    def __init__(self, device: torch.device) -> None:
        # Counts of negatives by bin, positives by bin, NaN predictions, and invalid labels.
        self.counts = torch.zeros(2 * NUM_BINS + 2, dtype=torch.int64, device=device)
        # The sum of the logloss, followed by the sums of p by bin.
        self.sums = torch.zeros(NUM_BINS + 1, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count rows with ``logits`` and ``labels`` [n].

        NaN and invalid labels are counted here; ``evaluation`` raises the error.
        """
        is_nan = logits.isnan()
        self.counts[-2] += is_nan.sum()
        self.counts[-1] += ((labels != 0) & (labels != 1)).sum()
        logits = torch.where(is_nan, 0.0, logits.to(torch.float64))
        positive = (labels == 1).to(torch.int64)
        p = logits.sigmoid()
        bins = (p * NUM_BINS).to(torch.int64).clamp(max=NUM_BINS - 1)
        self.counts[:-2] += torch.bincount(bins + NUM_BINS * positive, minlength=2 * NUM_BINS)
        self.sums[1:] += torch.bincount(bins, weights=p, minlength=NUM_BINS)
        margins = torch.where(positive == 1, -logits, logits)
        self.sums[0] += torch.logaddexp(margins, torch.zeros_like(margins)).sum()

    def over_ranks(self, boxing: Boxing) -> None:
        """Replace counts and sums with their totals over all ranks, using two all-reduces."""
        self.counts = combine_parts(boxing, self.counts, Partial(), "evaluate/fwd/counts")
        self.sums = combine_parts(boxing, self.sums, Partial(), "evaluate/fwd/sums")

    @property
    def is_valid(self) -> bool:
        """Return False if a prediction is NaN or a label is not 0 or 1."""
        return not bool(self.counts[-2:].any())

    def evaluation(self) -> Evaluation:
        """Return the metrics; raise MetricError for NaN, for labels other than 0 and 1, or if there
        are no rows.
        """
        counts, (nans, wrong) = self.counts[:-2].cpu().view(2, -1), self.counts[-2:].tolist()
        if nans or wrong:
            raise MetricError(
                f"{nans} predictions are NaN" if nans else f"{wrong} labels are neither 0 nor 1"
            )
        negatives, positives = (row.tolist() for row in counts)
        num_negative, num_positive = sum(negatives), sum(positives)
        rows = num_negative + num_positive
        if not rows:
            raise MetricError("a metric needs at least one row, got no predictions")
        sums = self.sums.tolist()
        logloss, reason = sums[0] / rows, one_class(num_positive, rows)
        area, bound = None, None
        if reason is None:
            area, bound = auc_of_counts(positives, negatives)
        return Evaluation(
            rows,
            logloss,
            area,
            reason,
            normalised_entropy=normalised_entropy(logloss, num_positive, rows),
            predicted=math.fsum(sums[1:]),
            positives=num_positive,
            auc_error=bound,
            calibration=calibration_groups(counts.sum(0).tolist(), sums[1:], positives),
        )


def auc_of_counts(positives: list[int], negatives: list[int]) -> tuple[float, float]:
    """Return (AUC, its error bound) from the number of rows per label and bin, by ascending score.

    A positive and a negative in the same bin count as half a correct pair. The error bound assumes
    that either all or none of these pairs are ordered correctly: sum(positives * negatives) / (2 P
    N).
    """
    below, in_order, within_bins = 0, 0, 0
    for positive, negative in zip(positives, negatives, strict=True):
        in_order += positive * (2 * below + negative)
        within_bins += positive * negative
        below += negative
    pairs = sum(positives) * sum(negatives)
    return in_order / (2 * pairs), within_bins / (2 * pairs)

"""Metrics of predictions that are too many to gather: counts by chance given, and sums.

A rank counts its rows into bins of equal width over the chance p of label 1; counts of all ranks
add up exactly, so AUC and its bound of error depend on neither order nor number of ranks. The sums
(logloss, p) are float64, whose last bits do depend on it.
"""

import math

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import MetricError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial
from sbpflow.training.metrics import (
    CalibrationBin,
    Evaluation,
    calibration_groups,
    normalised_entropy,
    one_class,
)

NUM_BINS = 10_000
CHANNEL = "control"


class ScoreHistogram:
    """Rows of this rank by bin and label, [2, bins] int64, with sums of logloss and of p."""

    def __init__(self, device: torch.device, num_bins: int = NUM_BINS) -> None:
        self._bins = num_bins
        self.counts = torch.zeros(2 * num_bins + 2, dtype=torch.int64, device=device)
        self.sums = torch.zeros(num_bins + 1, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count rows in: ``logits``, ``labels`` [n]; what is no number or label is told later."""
        wrong = logits.isnan()
        other = (labels != 0) & (labels != 1)
        self.counts[-2] += wrong.sum()
        self.counts[-1] += other.sum()
        logits = torch.where(wrong, 0.0, logits.to(torch.float64))
        positive = (labels == 1).to(torch.int64)
        chance = logits.sigmoid()
        bins = (chance * self._bins).to(torch.int64).clamp(max=self._bins - 1)
        self.counts[:-2] += torch.bincount(bins + self._bins * positive, minlength=2 * self._bins)
        self.sums[1:] += torch.bincount(bins, weights=chance, minlength=self._bins)
        margins = torch.where(positive == 1, -logits, logits)
        self.sums[0] += torch.logaddexp(margins, torch.zeros_like(margins)).sum()

    def over_ranks(self, boxing: Boxing) -> None:
        """Add up the ranks' counts and sums, on all of them; two all-reduces."""
        self.counts = _added(self.counts, "evaluate/fwd/counts", boxing)
        self.sums = _added(self.sums, "evaluate/fwd/sums", boxing)

    def evaluation(self) -> Evaluation:
        """The metrics; MetricError for NaN, for other labels than 0 and 1, and for no rows."""
        counts, (nans, others) = self.counts[:-2].cpu().view(2, -1), self.counts[-2:].tolist()
        if nans or others:
            raise MetricError(
                f"{nans} predictions are NaN" if nans else f"{others} labels are not 0 or 1"
            )
        negatives, positives = (row.tolist() for row in counts)
        num_negative, num_positive = sum(negatives), sum(positives)
        rows = num_negative + num_positive
        if not rows:
            raise MetricError("no predictions; a metric needs at least one row")
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
            calibration=_bins(positives, negatives, sums[1:]),
        )


def auc_of_counts(positives: list[int], negatives: list[int]) -> tuple[float, float]:
    """(AUC, its bound of error) from the rows of each label in bins of ascending score.

    Pairs within a bin count one half: |error| <= sum(pos_b neg_b) / (2 P N), all of them wrong.
    """
    below, in_order, together = 0, 0, 0
    for positive, negative in zip(positives, negatives, strict=True):
        in_order += positive * (2 * below + negative)
        together += positive * negative
        below += negative
    pairs = sum(positives) * sum(negatives)
    return in_order / (2 * pairs), together / (2 * pairs)


def _bins(
    positives: list[int], negatives: list[int], chances: list[float]
) -> tuple[CalibrationBin, ...]:
    rows = [p + n for p, n in zip(positives, negatives, strict=True)]
    return calibration_groups(rows, chances, positives)


def _added(part: Tensor, id: str, boxing: Boxing) -> Tensor:
    world = boxing.world
    line = Placement.line(world.device.type, world.size)
    src, dst = Layout(line, (Partial(),)), Layout(line, (Broadcast(),))
    steps = plan_boxing(src, dst, tuple(part.shape), part.dtype, id=id, backend=world.backend)
    out = boxing.run(steps, part, CHANNEL)
    if out is None:
        raise RuntimeError(f"{id}: the sum over all ranks did not come back")
    return out

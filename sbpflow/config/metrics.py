"""Describes the metrics of an evaluation, for early stopping, logs, and reports.

A new metric needs an entry here, a field in ``training.metrics.Evaluation``, and code in
``training.metrics.evaluate`` or, if it needs groups of rows, a function in
``training.metrics.GROUPED``. For evaluations of more than ``train.exact_auc_rows`` rows, a metric
without groups also needs code in ``training.histogram_auc``.
"""

from dataclasses import dataclass
from typing import Literal

Metric = Literal["auc", "gauc", "logloss", "normalised_entropy"]
ONE_CLASS = "all rows of val have the same class"


@dataclass(frozen=True, slots=True)
class MetricKind:
    """A metric; ``absent`` is the reason why an evaluation of val may lack the metric. Some metrics
    need groups of rows.
    """

    label: str
    higher_is_better: bool
    absent: str
    needs_groups: bool = False

    def is_better(self, value: float, best: float, min_delta: float) -> bool:
        """Return whether ``value`` is better than ``best`` by more than ``min_delta``."""
        return value > best + min_delta if self.higher_is_better else value < best - min_delta


METRICS: dict[Metric, MetricKind] = {
    "auc": MetricKind("AUC", True, ONE_CLASS),
    "gauc": MetricKind(
        "GAUC by rows", True, "no group has rows of both classes", needs_groups=True
    ),
    "logloss": MetricKind("logloss", False, ONE_CLASS),
    "normalised_entropy": MetricKind("normalized entropy", False, ONE_CLASS),
}
"""All metrics, in the order in which logs and reports list them."""

"""The metrics of an evaluation: what stopping, logs, and reports need to know about each.

A new metric is an entry here, a field of ``training.metrics.Evaluation``, and its computation in
``training.metrics.evaluate`` (and in ``histogram_auc`` if a histogram suffices for it).
"""

from dataclasses import dataclass
from typing import Literal

Metric = Literal["auc", "gauc", "logloss", "normalised_entropy"]
ONE_CLASS = "val has rows of one class only"


@dataclass(frozen=True, slots=True)
class MetricKind:
    """``absent`` is why an evaluation of val may not have the metric."""

    label: str
    higher_is_better: bool
    absent: str

    def is_better(self, value: float, best: float, min_delta: float) -> bool:
        """Whether ``value`` is more than ``min_delta`` better than ``best``."""
        return value > best + min_delta if self.higher_is_better else value < best - min_delta


METRICS: dict[Metric, MetricKind] = {
    "auc": MetricKind("AUC", True, ONE_CLASS),
    "gauc": MetricKind("GAUC by rows", True, "no group has rows of both classes"),
    "logloss": MetricKind("logloss", False, ONE_CLASS),
    "normalised_entropy": MetricKind("normalized entropy", False, ONE_CLASS),
}
"""In the order of logs and reports."""

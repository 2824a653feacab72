"""Training options: early stopping, plateaus, the loss, clipping, and schedules of the rates.

Values with their own checks; ``schema`` has the groups that they belong to.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from sbpflow.config.parse import Example
from sbpflow.errors import ConfigError, unknown_value
from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.fields.ranges import Count, NonNegative, Range, Rate

Metric = Literal["auc", "gauc", "logloss", "normalised_entropy"]
DecayShape = Literal["polynomial", "cosine"]
Watched = Annotated[Metric, Key("results", "Metric of val that is watched.")]
Patience = Annotated[Count, Key("results", "Evaluations without a better value before it acts.")]
MinDelta = Annotated[NonNegative, Key("results", "How much better a value must be to count.")]


def is_better(metric: Metric, value: float, best: float, min_delta: float) -> bool:
    """Whether ``value`` is more than ``min_delta`` better than ``best``."""
    if metric in ("auc", "gauc"):
        return value > best + min_delta
    if metric in ("logloss", "normalised_entropy"):
        return value < best - min_delta
    raise unknown_value("metric", metric, Metric)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """Early stopping."""

    metric: Watched = "auc"
    patience: Patience = 2
    min_delta: MinDelta = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlateauConfig:
    """Lower learning rates, on top of the schedule, when val stops getting better."""

    metric: Watched = "auc"
    patience: Patience = 1
    min_delta: MinDelta = 0.0
    factor: Annotated[
        float, Range(above=0, below=1), Key("results", "What learning rates are multiplied by.")
    ] = 0.1
    min_factor: Annotated[
        float, Range(above=0, high=1), Key("results", "Rates never fall below this share.")
    ] = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Changes to the loss of each row; evaluations show the plain logloss.

    The focal loss is that of T.-Y. Lin et al., Focal loss for dense object detection, 2017.
    """

    positive_weight: Annotated[Rate, Key("results", "Weight of rows of label 1.")] = 1.0
    label_smoothing: Annotated[
        float,
        Range(low=0, below=1),
        Key("results", "s trains on labels s / 2 and 1 - s / 2 in place of 0 and 1."),
    ] = 0.0
    focal_gamma: Annotated[
        NonNegative,
        Key("results", "g multiplies a row's loss by (1 - p) ** g; p: probability of its label."),
    ] = 0.0

    def __post_init__(self) -> None:
        if self.focal_gamma and self.label_smoothing:
            raise ConfigError(
                f"train.loss.focal_gamma: {self.focal_gamma} beside label_smoothing "
                f"{self.label_smoothing}: the focal loss is of labels 0 and 1; remove one of them, "
                "for example label_smoothing: 0.0"
            )

    @property
    def is_plain(self) -> bool:
        """Whether nothing is changed."""
        return self.positive_weight == 1.0 and not (self.label_smoothing or self.focal_gamma)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """Gradients scaled so that their common norm is at most ``norm``.

    The norm is over all dense parameters and, with ``rows``, over the embedding rows of the batch,
    each with its summed gradient. What is left out of the norm is not scaled.
    """

    norm: Annotated[Rate, Key("results", "Largest norm that gradients keep.")] = 10.0
    rows: Annotated[
        bool, Key("results", "Include the embedding rows of the batch, not only dense gradients.")
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """A factor of every ``lr`` by the step of the optimizer: a linear rise, then a fall.

    Without ``decay_steps`` there is no fall.
    """

    key: ClassVar[str] = "optimizer.schedule"

    warmup_steps: Annotated[int, Range(low=0), Key("results", "Steps of the linear rise.")] = 0
    decay_start: Annotated[
        int,
        Range(low=0),
        Key("results", "Step at which the fall starts; not before the rise ends."),
    ] = 0
    decay_steps: Annotated[
        Count | None, Example(10000), Key("results", "Steps that the fall takes.")
    ] = None
    shape: Annotated[
        DecayShape,
        Key("results", "The fall as (1 - progress) ** power, or as half a cosine wave."),
    ] = "polynomial"
    power: Annotated[Rate, Key("results", "Exponent of the shape polynomial.")] = 1.0
    end_factor: Annotated[
        float, Range(low=0, high=1), Key("results", "Factor at the end of the fall.")
    ] = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.end_factor <= 1.0:
            raise ConfigError(
                f"{self.key}.end_factor: {self.end_factor} is no end of a fall from 1; use "
                "0 to 1, for example end_factor: 0.1"
            )
        fall = {"decay_start": 0, "power": 1.0, "end_factor": 0.0, "shape": "polynomial"}
        for key, default in fall.items():
            if self.decay_steps is None and getattr(self, key) != default:
                raise ConfigError(
                    f"{self.key}.{key}: {getattr(self, key)} without decay_steps changes "
                    "nothing; for example decay_steps: 10000"
                )
        if self.shape == "cosine" and self.power != 1.0:
            raise ConfigError(
                f"{self.key}.power: {self.power} is of shape polynomial; remove it, or "
                "shape: cosine"
            )
        if self.decay_steps is not None and self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"{self.key}.decay_start: {self.decay_start} is before the end of the "
                f"warm-up; use {self.warmup_steps} or more"
            )

    @property
    def changes(self) -> bool:
        """Whether any step has another rate than the configured one."""
        return bool(self.warmup_steps) or self.decay_steps is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseScheduleConfig(ScheduleConfig):
    """Of the dense part alone, in place of the common one."""

    key: ClassVar[str] = "optimizer.dense_schedule"


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseScheduleConfig(ScheduleConfig):
    """Of the tables alone, in place of the common one."""

    key: ClassVar[str] = "optimizer.sparse_schedule"

"""Defines the options for early stopping, plateaus, the loss, clipping, and learning rates.

Each class checks its own values; ``schema`` defines the groups that use these classes.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from sbpflow.config.metrics import Metric
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import Count, NonNegative, Range, Rate

DecayShape = Literal["polynomial", "cosine"]
TrackerName = Literal["tensorboard", "mlflow", "wandb"]
Watched = Annotated[Metric, Key("results", "Metric on val that must improve.")]
Patience = Annotated[Count, Key("results", "Number of evaluations to wait for an improvement.")]
MinDelta = Annotated[NonNegative, Key("results", "Minimum change that counts as an improvement.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """Ends the run early when val stops improving."""

    metric: Watched = "auc"
    patience: Patience = 2
    min_delta: MinDelta = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlateauConfig:
    """Reduces learning rates below the schedule when val stops improving."""

    metric: Watched = "auc"
    patience: Patience = 1
    min_delta: MinDelta = 0.0
    factor: Annotated[
        float,
        Range(above=0, below=1),
        Key("results", "Factor by which each reduction multiplies the learning rates."),
    ] = 0.1
    min_factor: Annotated[
        float,
        Range(above=0, below=1),
        Key("results", "Lower bound of the product of all reductions."),
    ] = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class PrometheusConfig:
    """Serves the current values of a run to Prometheus, at http://HOST:PORT/metrics on rank 0's
    machine.

    The endpoint has no authentication.
    """

    port: Annotated[
        int,
        Range(low=0, high=65535),
        Key("execution", "Port of the endpoint. 0 chooses a free port."),
    ] = 9464
    host: Annotated[
        str,
        Key("execution", "Address to listen on. 0.0.0.0 accepts connections from every machine."),
    ] = "127.0.0.1"

    def __post_init__(self) -> None:
        if not self.host:  # the system would listen on all addresses
            raise ConfigError(
                "train.prometheus.host is empty; use, for example, host: 127.0.0.1, or 0.0.0.0 for "
                "all addresses"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Modifies each row's loss in training; evaluations report the plain logloss.

    The focal loss follows Lin et al., Focal loss for dense object detection, 2017.
    """

    positive_weight: Annotated[Rate, Key("results", "Weight of rows with label 1.")] = 1.0
    label_smoothing: Annotated[
        float,
        Range(low=0, below=1),
        Key("results", "With the value s, the labels 0 and 1 become s / 2 and 1 - s / 2."),
    ] = 0.0
    focal_gamma: Annotated[
        NonNegative,
        Key(
            "results",
            "With the value g, a row's loss is multiplied by (1 - p) ** g, where p is the "
            "predicted probability of the row's label.",
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        if self.focal_gamma and self.label_smoothing:
            raise ConfigError(
                f"train.loss.focal_gamma: {self.focal_gamma} cannot be combined with "
                f"label_smoothing: {self.label_smoothing}, because the focal loss needs labels "
                "of exactly 0 or 1; set one of the two to 0 (for example, label_smoothing: 0.0)"
            )

    @property
    def is_plain(self) -> bool:
        """Return whether the loss is unchanged."""
        return self.positive_weight == 1.0 and not (self.label_smoothing or self.focal_gamma)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """Scales gradients so that their joint norm is at most ``norm``.

    The norm includes the gradients of all dense parameters and, with ``rows``, the summed gradients
    of the batch's embedding rows. Other gradients are not scaled.
    """

    norm: Annotated[Rate, Key("results", "Maximum norm of all gradients together.")] = 10.0
    rows: Annotated[
        bool, Key("results", "Include the gradients of the batch's embedding rows.")
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Multiplies every ``lr`` by a factor that depends on the optimizer step: a linear warm-up,
    then a decay. Without ``decay_steps``, the rate does not decay.
    """

    key: ClassVar[str] = "optimizer.schedule"

    warmup_steps: Annotated[
        int, Range(low=0), Key("results", "Number of steps of linear warm-up.")
    ] = 0
    decay_start: Annotated[
        int,
        Range(low=0),
        Key("results", "Step at which the decay starts (at or after the end of the warm-up)."),
    ] = 0
    decay_steps: Annotated[
        Count | None, Example(10000), Key("results", "Length of the decay in steps.")
    ] = None
    shape: Annotated[
        DecayShape,
        Key("results", "Shape of the decay: (1 - progress) ** power, or half a cosine wave."),
    ] = "polynomial"
    power: Annotated[Rate, Key("results", "Exponent of the polynomial decay.")] = 1.0
    end_factor: Annotated[
        float, Range(low=0, high=1), Key("results", "Factor at the end of the decay.")
    ] = 0.0

    def __post_init__(self) -> None:
        decay = {"decay_start": 0, "power": 1.0, "end_factor": 0.0, "shape": "polynomial"}
        for key, default in decay.items():
            if self.decay_steps is None and getattr(self, key) != default:
                raise ConfigError(
                    f"{self.key}.{key}: {getattr(self, key)} has no effect without decay_steps; "
                    "use, for example, decay_steps: 10000"
                )
        if self.shape == "cosine" and self.power != 1.0:
            raise ConfigError(
                f"{self.key}.power: {self.power} applies only to shape: polynomial; use this "
                "shape, or remove power"
            )
        if self.decay_steps is not None and self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"{self.key}.decay_start: {self.decay_start} is before the end of the "
                f"warm-up; use {self.warmup_steps} or more"
            )

    @property
    def changes(self) -> bool:
        """Return whether the schedule changes the configured rate at any step."""
        return bool(self.warmup_steps) or self.decay_steps is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseScheduleConfig(ScheduleConfig):
    """Sets the schedule of the dense part, replacing ``optimizer.schedule``."""

    key: ClassVar[str] = "optimizer.dense_schedule"


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseScheduleConfig(ScheduleConfig):
    """Sets the schedule of the tables, replacing ``optimizer.schedule``."""

    key: ClassVar[str] = "optimizer.sparse_schedule"

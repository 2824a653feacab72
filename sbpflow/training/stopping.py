"""When a run stops early, and when its learning rates fall: from evaluations of val alone.

Every rank holds the same objects and is told the same figures, so all decide alike. ``state()`` and
``load()`` are for checkpoints: what has been seen, as JSON values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.config.schema import TrainConfig
from sbpflow.config.train_options import Metric, PlateauConfig, StopConfig, is_better
from sbpflow.errors import TrainingError, unknown_value
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast
from sbpflow.training.metrics import Evaluation

State = Mapping[str, float | int | None]
CHANNEL = "control"


@dataclass(slots=True)
class Best:
    """The best value of a metric so far and its step; ``waited`` evaluations were not better."""

    metric: Metric
    min_delta: float
    value: float | None = None
    step: int = 0
    waited: int = 0

    def push(self, step: int, value: float) -> bool:
        """Take the value at ``step``; whether it is better than all before."""
        if self.value is not None and not is_better(self.metric, value, self.value, self.min_delta):
            self.waited += 1
            return False
        self.value, self.step, self.waited = value, step, 0
        return True

    def state(self) -> dict[str, float | int | None]:
        """What ``load`` takes."""
        return {"value": self.value, "step": self.step, "waited": self.waited}

    def load(self, state: State) -> None:
        """Go on from there."""
        self.value = None if state["value"] is None else float(state["value"])
        self.step, self.waited = int(state["step"] or 0), int(state["waited"] or 0)

    def __str__(self) -> str:
        return "none" if self.value is None else f"{self.metric} {self.value:.6g} at {self.step}"


class Stopper:
    """Early stopping: ``stops`` after ``patience`` evaluations in a row without a better value."""

    def __init__(self, config: StopConfig) -> None:
        self.config = config
        self.best = Best(config.metric, config.min_delta)
        self.improved = False  # by the last evaluation: what a checkpoint of the best waits for

    @property
    def stops(self) -> bool:
        """Whether the run is over."""
        return self.best.waited >= self.config.patience

    def push(self, step: int, value: float) -> None:
        """Take the metric of val at ``step``."""
        self.improved = self.best.push(step, value)

    def state(self) -> dict[str, float | int | None]:
        """What ``load`` takes."""
        return self.best.state()

    def load(self, state: State) -> None:
        """Go on from there."""
        self.best.load(state)

    def why(self, step: int) -> str:
        """One line on the end of the run."""
        best, delta = self.best, ""
        if best.min_delta:
            delta = f" by more than {best.min_delta:g}"
        return (
            f"at step {step}, after {best.waited} evaluations of val in a row without a "
            f"better {best.metric} than {best.value:.6g} at step {best.step}{delta}"
        )


class Plateau:
    """Reduce on plateau: ``factor`` of all learning rates, smaller after each plateau."""

    def __init__(self, config: PlateauConfig) -> None:
        self.config = config
        self.best = Best(config.metric, config.min_delta)
        self.factor = 1.0

    def push(self, step: int, value: float) -> None:
        """Take the metric of val at ``step``."""
        self.best.push(step, value)
        if self.best.waited >= self.config.patience:
            self.factor = max(self.factor * self.config.factor, self.config.min_factor)
            self.best.waited = 0

    def state(self) -> dict[str, float | int | None]:
        """What ``load`` takes."""
        return {**self.best.state(), "factor": self.factor}

    def load(self, state: State) -> None:
        """Go on from there."""
        self.best.load(state)
        self.factor = float(state["factor"] or 1.0)


class Watchers:
    """What watches val during a run: a ``Stopper``, a ``Plateau``, both or neither."""

    def __init__(self, stop: Stopper | None = None, plateau: Plateau | None = None) -> None:
        self.stop, self.plateau = stop, plateau

    @staticmethod
    def of(config: TrainConfig) -> "Watchers":
        """As ``train.stop`` and ``train.plateau`` say."""
        return Watchers(
            None if config.stop is None else Stopper(config.stop),
            None if config.plateau is None else Plateau(config.plateau),
        )

    @property
    def _all(self) -> dict[str, Stopper | Plateau]:
        pairs = {"stop": self.stop, "plateau": self.plateau}
        return {name: watcher for name, watcher in pairs.items() if watcher is not None}

    @property
    def active(self) -> bool:
        """Whether there is any."""
        return bool(self._all)

    @property
    def stops(self) -> bool:
        """Whether the run is over."""
        return self.stop is not None and self.stop.stops

    @property
    def rate_scale(self) -> float:
        """Factor of all learning rates."""
        return 1.0 if self.plateau is None else self.plateau.factor

    def push(self, step: int, evaluation: Evaluation | None, boxing: Boxing) -> None:
        """Take what val came to, which rank 0 knows; every rank calls it.

        TrainingError on every rank where val does not have the metric.
        """
        watchers = self._all
        if not watchers:
            return
        values = _shared([_of(evaluation, one.config.metric) for one in watchers.values()], boxing)
        for (name, watcher), value in zip(watchers.items(), values, strict=True):
            if math.isnan(value):
                raise TrainingError(_no_metric(name, watcher.config.metric, step))
            watcher.push(step, value)

    def figures(self) -> dict[str, float]:
        """``lr_scale``, what a plateau has left of the learning rates."""
        return {} if self.plateau is None else {"lr_scale": self.rate_scale}

    def state(self) -> dict[str, dict[str, float | int | None]]:
        """What ``load`` takes."""
        return {name: watcher.state() for name, watcher in self._all.items()}

    def load(self, state: Mapping[str, State]) -> None:
        """Go on from there; a watcher that was not there before starts anew."""
        for name, watcher in self._all.items():
            if name in state:
                watcher.load(state[name])


def _of(evaluation: Evaluation | None, metric: Metric) -> float:
    """NaN where there is none."""
    value = None if evaluation is None else getattr(evaluation, metric)
    return math.nan if value is None else float(value)


def _no_metric(name: str, metric: Metric, step: int) -> str:
    if metric == "gauc":
        why = "no group has rows of both classes"
    elif metric in ("auc", "logloss", "normalised_entropy"):
        why = "val has rows of one class only"
    else:
        raise unknown_value("metric", metric, Metric)
    return (
        f"train.{name}.metric: {metric} of val at step {step} does not exist: {why}, or use "
        f"train.{name}.metric=logloss"
    )


def _shared(values: list[float], boxing: Boxing) -> list[float]:
    """Rank 0's values on every rank."""
    world = boxing.world
    if world.size == 1:
        return values
    kind = world.device.type
    steps = plan_boxing(
        Layout(Placement.of(kind, [0]), (Broadcast(),)),
        Layout(Placement.line(kind, world.size), (Broadcast(),)),
        (len(values),),
        torch.float64,
        id="evaluate/fwd/watched",
        backend=world.backend,
    )
    mine = torch.tensor(values, dtype=torch.float64, device=world.device)
    shared = boxing.run(steps, mine if world.rank == 0 else None, CHANNEL)
    if shared is None:
        raise RuntimeError("the metrics of val did not arrive")
    return shared.tolist()

"""Uses scores on val to stop runs early, lower learning rates on plateaus, and find the best step.

Every rank creates the same objects and gets the same metrics, so all ranks make the same decisions.
Checkpoints use ``state()`` and ``load()``; a state consists of JSON values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.config.metrics import METRICS, Metric
from sbpflow.config.schema import TrainConfig
from sbpflow.config.train_options import PlateauConfig, StopConfig
from sbpflow.errors import TrainingError
from sbpflow.training.metrics import Evaluation

State = Mapping[str, float | int | str | None]
_KEYS = {
    "stop": "train.stop.metric",
    "plateau": "train.plateau.metric",
    "best": "checkpoint.keep_best",
}


@dataclass
class Best:
    """Tracks a metric's best value, the step that reached it, and the number of evaluations since
    then (``waited``).
    """

    metric: Metric
    min_delta: float = 0.0
    value: float | None = None
    step: int = 0
    waited: int = 0

    def push(self, step: int, value: float) -> None:
        """Record the value of the metric at ``step``."""
        kind = METRICS[self.metric]
        if self.value is not None and not kind.is_better(value, self.value, self.min_delta):
            self.waited += 1
        else:
            self.value, self.step, self.waited = value, step, 0

    def state(self) -> dict[str, float | int | str | None]:
        """Return the state for ``load``."""
        facts = {"value": self.value, "step": self.step, "waited": self.waited}
        return {"metric": self.metric, **facts}

    def load(self, state: State) -> None:
        """Restore a saved state."""
        self.value = None if state["value"] is None else float(state["value"])
        self.step, self.waited = int(state["step"] or 0), int(state["waited"] or 0)

    def __str__(self) -> str:
        return "none" if self.value is None else f"{self.metric} {self.value:.6g} at {self.step}"


class Stopper(Best):
    """Stops a run after ``patience`` consecutive evaluations without a better value."""

    def __init__(self, config: StopConfig) -> None:
        super().__init__(config.metric, config.min_delta)
        self.config = config

    @property
    def stops(self) -> bool:
        """Return whether to stop the run."""
        return self.waited >= self.config.patience

    def why(self, step: int) -> str:
        """Return the reason for stopping as one line."""
        delta = f" by more than {self.min_delta:g}" if self.min_delta else ""
        plural = "s" * (self.waited > 1)
        return (
            f"at step {step}, after {self.waited} consecutive evaluation{plural} of val in which "
            f"{self.metric} did not improve on {self.value:.6g} (step {self.step}){delta}"
        )


class Plateau(Best):
    """Lowers the common ``factor`` of all learning rates after each plateau."""

    def __init__(self, config: PlateauConfig) -> None:
        super().__init__(config.metric, config.min_delta)
        self.config = config
        self.factor = 1.0

    def push(self, step: int, value: float) -> None:
        """Record the value of the metric at ``step``."""
        super().push(step, value)
        if self.waited >= self.config.patience:
            self.factor = max(self.factor * self.config.factor, self.config.min_factor)
            self.waited = 0

    def state(self) -> dict[str, float | int | str | None]:
        """Return the state for ``load``."""
        return {**super().state(), "factor": self.factor}

    def load(self, state: State) -> None:
        """Restore a saved state."""
        super().load(state)
        self.factor = float(state["factor"] or 1.0)


class Watchers:
    """The watchers of val in a run, each of which is optional; ``best`` tracks the best weights.
    ``eval_rows`` is ``train.eval_rows``.
    """

    def __init__(
        self,
        stop: Stopper | None,
        plateau: Plateau | None,
        best: Best | None = None,
        eval_rows: int | None = None,
    ) -> None:
        self.stop, self.plateau, self.best = stop, plateau, best
        self._eval_rows = eval_rows

    @staticmethod
    def of(config: TrainConfig, best: Metric | None = None) -> "Watchers":
        """Return the watchers that ``config``, the ``train`` section, enables. The metric ``best``
        selects the best weights.
        """
        return Watchers(
            None if config.stop is None else Stopper(config.stop),
            None if config.plateau is None else Plateau(config.plateau),
            None if best is None else Best(best),
            config.eval_rows,
        )

    @property
    def _all(self) -> dict[str, Best]:
        pairs = {"stop": self.stop, "plateau": self.plateau, "best": self.best}
        return {name: watcher for name, watcher in pairs.items() if watcher is not None}

    @property
    def active(self) -> bool:
        """Return whether there are any watchers."""
        return bool(self._all)

    @property
    def stops(self) -> bool:
        """Return whether to stop the run."""
        return self.stop is not None and self.stop.stops

    def improved(self, step: int) -> bool:
        """Return whether the weights after ``step`` are the best so far."""
        return self.best is not None and self.best.step == step

    @property
    def rate_scale(self) -> float:
        """Return the factor that multiplies all learning rates."""
        return 1.0 if self.plateau is None else self.plateau.factor

    def push(self, step: int, evaluation: Evaluation | None, boxing: Boxing) -> None:
        """Record an evaluation of val; every rank must call this method, but only rank 0 has an
        evaluation.

        Raises TrainingError on every rank if the evaluation does not contain a watched metric.
        """
        watchers = self._all
        if not watchers:
            return
        metrics: list[Metric] = [watcher.metric for watcher in watchers.values()]
        own = [_value(evaluation, metric) for metric in metrics] if boxing.world.rank == 0 else []
        values = gather_values(boxing, own)[0]
        for (name, watcher), value in zip(watchers.items(), values, strict=True):
            if math.isnan(value):
                raise TrainingError(_no_metric(_KEYS[name], watcher.metric, step))
            watcher.push(step, value)

    def figures(self) -> dict[str, float]:
        """Return ``lr_scale``, the factor of the learning rates, or an empty dict without a
        ``Plateau``.
        """
        return {} if self.plateau is None else {"lr_scale": self.rate_scale}

    def state(self) -> dict[str, dict[str, float | int | str | None]]:
        """Return the state for ``load``."""
        states = {name: watcher.state() for name, watcher in self._all.items()}
        if self.best is not None:
            states["best"]["eval_rows"] = self._eval_rows
        return states

    def load(self, state: Mapping[str, State]) -> None:
        """Restore a saved state. A watcher that the state lacks, or has with another metric, starts
        over. So does ``best`` if ``eval_rows`` has changed, because values on other rows cannot be
        compared.
        """
        for name, watcher in self._all.items():
            saved = state.get(name)
            wanted = {"metric": watcher.metric, "eval_rows": self._eval_rows}
            if saved and all(saved.get(key, value) == value for key, value in wanted.items()):
                watcher.load(saved)


def _value(evaluation: Evaluation | None, metric: Metric) -> float:
    """Return the metric, or NaN if the evaluation does not contain this metric."""
    value = None if evaluation is None else getattr(evaluation, metric)
    return math.nan if value is None else float(value)


def _no_metric(key: str, metric: Metric, step: int) -> str:
    return (
        f"{key}: val has no {metric} at step {step}, because {METRICS[metric].absent}; use "
        f"{key}=logloss"
    )

"""Defines how the training loop uses checkpoints: where a run starts and when it is saved."""

from collections.abc import Mapping
from typing import Any, Protocol

from sbpflow.config.metrics import Metric
from sbpflow.training.batch import Batch


class Position(Protocol):
    """The position at which a run starts."""

    @property
    def step(self) -> int:
        """Return the number of steps already trained."""
        ...

    @property
    def epoch(self) -> int:
        """Return the epoch in which reading resumes, counted from 0."""
        ...

    @property
    def batches_left(self) -> int | None:
        """Return the number of batches that are left in ``epoch``, or ``None`` for all."""
        ...

    @property
    def steps_of_before(self) -> int:
        """Return the number of steps trained on earlier data sets, which ``epoch`` does not
        count.
        """
        ...


class Checkpoints(Position, Protocol):
    """Decides where a run starts and when it is saved; every rank must make the same calls."""

    @property
    def loop(self) -> Mapping[str, Any]:
        """Return the training loop's state that was passed to ``save``, or an empty mapping at the
        start of a run.
        """
        ...

    @property
    def best_metric(self) -> Metric | None:
        """Return the metric on val that selects the best weights, or ``None`` to end with the last
        weights.
        """
        ...

    def load_weights(self, step: int) -> None:
        """Load the weights saved after ``step`` into the job; every rank must call this method."""
        ...

    def is_due(self, step: int, *, last: bool, best: bool) -> bool:
        """Return whether to save after ``step``. ``best`` means that ``step`` is the best step so
        far.
        """
        ...

    def save(self, step: int, batch: Batch, loop: Mapping[str, Any]) -> None:
        """Save the job after ``step``, whose last batch is ``batch``; every rank must call this
        method.

        ``loop`` is the training loop's state as JSON values.
        """
        ...

    @property
    def stops(self) -> bool:
        """Return whether the run must stop, as decided by the last ``is_due`` call. All ranks
        agree.
        """
        ...

    def leave(self) -> None:
        """End a stopped run by raising the signal that stopped it. Call this method only after the
        last transfers of the run.
        """
        ...

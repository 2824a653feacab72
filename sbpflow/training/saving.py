"""Defines how the training loop uses checkpoints: where a run starts and when it is saved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sbpflow.config.metrics import Metric
from sbpflow.training.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position at which a run starts.

    ``step`` is the number of steps already trained, and ``steps_of_before`` the number of those on
    earlier data sets, which ``epoch`` does not count. Reading resumes in ``epoch``, counted from 0,
    in which ``batches_left`` batches are left (``None`` means all). ``loop`` is the training loop's
    state that was passed to ``Checkpoints.save``.
    """

    step: int = 0
    epoch: int = 0
    batches_left: int | None = None
    steps_of_before: int = 0
    loop: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Checkpoints(Protocol):
    """Decides where a run starts and when it is saved; every rank must make the same calls."""

    @property
    def start(self) -> Position:
        """Return the position at which the run starts."""
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

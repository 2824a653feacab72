"""The interface between the training loop and checkpoints: where a run starts, when it saves."""

from collections.abc import Mapping
from typing import Any, Protocol

from sbpflow.config.metrics import Metric
from sbpflow.training.batch import Batch


class Checkpoints(Protocol):
    """Every rank has one and makes the same calls."""

    @property
    def step(self) -> int:
        """The number of steps already trained."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch in which reading resumes, counted from 0."""
        ...

    @property
    def steps_of_before(self) -> int:
        """How many of ``step`` were on another data set and so do not count for the epochs."""
        ...

    @property
    def loop(self) -> Mapping[str, Any]:
        """The saved ``loop`` of ``save``; empty at the start of a run."""
        ...

    @property
    def best_metric(self) -> Metric | None:
        """The metric of val that selects the best weights; ``None`` to end with the last ones."""
        ...

    def load_weights(self, step: int) -> None:
        """Load the weights saved after ``step`` into the job; every rank calls it."""
        ...

    def is_due(self, step: int, *, last: bool, best: bool) -> bool:
        """Whether to call ``save`` after this step, the last or the best so far."""
        ...

    def save(self, step: int, batch: Batch, loop: Mapping[str, Any]) -> None:
        """Save the job after ``step``, whose last batch was ``batch``; every rank calls it.

        ``loop`` is the state of the loop itself, as JSON values.
        """
        ...

    @property
    def stops(self) -> bool:
        """Whether the run was asked to stop by the last ``is_due`` call; equal on all ranks."""
        ...

    def leave(self) -> None:
        """End a run that was asked to stop, after its last transfers."""
        ...


class NoCheckpoints:
    """A run that starts at its first step and is not saved."""

    step = epoch = steps_of_before = 0
    stops = False
    loop: Mapping[str, Any] = {}
    best_metric: Metric | None = None

    def leave(self) -> None:
        raise RuntimeError("leave() without checkpoints, which cannot be asked to stop")

    def load_weights(self, step: int) -> None:
        raise RuntimeError(f"load_weights({step}) without checkpoints, which save no weights")

    def is_due(self, step: int, *, last: bool, best: bool) -> bool:
        del step, last, best
        return False

    def save(self, step: int, batch: Batch, loop: Mapping[str, Any]) -> None:
        pass

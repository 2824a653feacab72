"""What the loop asks of checkpoints: where a run begins, and when it is saved."""

from collections.abc import Mapping
from typing import Any, Protocol

from sbpflow.training.batch import Batch
from sbpflow.training.metrics import Evaluation


class Checkpoints(Protocol):
    """Every rank has one and asks it alike."""

    @property
    def step(self) -> int:
        """Steps that were trained before."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch that the read goes on with, counted from 0."""
        ...

    @property
    def steps_of_before(self) -> int:
        """Of them, those of another set: they do not count as steps of the epochs to come."""
        ...

    @property
    def loop(self) -> Mapping[str, Any]:
        """The ``loop`` that was saved; empty at the start of a run."""
        ...

    def scored(self, step: int, evaluation: Evaluation | None) -> None:
        """The validation part was scored after ``step``; ``None`` on ranks other than 0."""
        ...

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether ``save`` is to be called after this step."""
        ...

    def save(self, step: int, batch: Batch, loop: Mapping[str, Any]) -> None:
        """Save, once ``step`` was made of batches up to ``batch``; every rank calls it.

        ``loop`` is what the loop itself must remember, as JSON values.
        """
        ...

    @property
    def stops(self) -> bool:
        """Whether the run was asked to stop after the last step that ``is_due`` was called with;
        equal on all ranks.
        """
        ...

    def leave(self) -> None:
        """End the run that was asked to stop, once its last transfers are over."""
        ...


class NoCheckpoints:
    """A run from its first step on, which is not saved."""

    step = epoch = steps_of_before = 0
    stops = False

    def leave(self) -> None:
        raise RuntimeError("a run that is not saved was not asked to stop")

    @property
    def loop(self) -> Mapping[str, Any]:
        return {}

    def scored(self, step: int, evaluation: Evaluation | None) -> None:
        pass

    def is_due(self, step: int, *, last: bool) -> bool:
        del step, last
        return False

    def save(self, step: int, batch: Batch, loop: Mapping[str, Any]) -> None:
        pass

"""Several reporters in the place of one: the run's own, and a user's tracker."""

from collections.abc import Mapping, Sequence

from sbpflow.training.loop import Reporter
from sbpflow.training.metrics import Evaluation


class Reporters:
    """Tells each of ``reporters`` in turn; an error of one ends the run."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = tuple(reporters)

    def step(
        self, step: int, loss: float, samples_per_s: float, extra: Mapping[str, float]
    ) -> None:
        """A log interval is over."""
        for one in self._reporters:
            one.step(step, loss, samples_per_s, extra)

    def advance(self, step: int, loss: float) -> None:
        """A step is over."""
        for one in self._reporters:
            one.advance(step, loss)

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """A split was scored; rank 0 alone is told."""
        for one in self._reporters:
            one.evaluation(split, step, evaluation)

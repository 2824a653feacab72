"""Combines the run's own reporter and the user's reporters into one."""

from collections.abc import Mapping, Sequence

from sbpflow.training.loop import Reporter
from sbpflow.training.metrics import Evaluation


class Reporters:
    """Calls each of ``reporters`` in turn; an exception in one of them ends the run."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = tuple(reporters)

    def step(
        self, step: int, loss: float, samples_per_s: float, extra: Mapping[str, float]
    ) -> None:
        """Report a log interval."""
        for reporter in self._reporters:
            reporter.step(step, loss, samples_per_s, extra)

    def advance(self, step: int, loss: float) -> None:
        """Report the end of a step."""
        for reporter in self._reporters:
            reporter.advance(step, loss)

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """Report a scored split; only rank 0 calls this method."""
        for reporter in self._reporters:
            reporter.evaluation(split, step, evaluation)

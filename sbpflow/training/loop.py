"""The loop: epochs, evaluations, and what is reported when. It decides nothing about tensors."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sbpflow.boxing import Boxing
from sbpflow.config import TrainConfig
from sbpflow.training.evaluate import score_split
from sbpflow.training.health import LossWatch
from sbpflow.training.metrics import Evaluation
from sbpflow.training.trainer import Loader, Trainer


class Reporter(Protocol):
    """Where progress goes; rank 0 shows and writes it, the others ignore it."""

    def step(self, step: int, loss: float, samples_per_s: float) -> None:
        """A log interval is over."""
        ...

    def advance(self, step: int, loss: float) -> None:
        """A step is over."""
        ...

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """A split was scored."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to; evaluations are on rank 0 only."""

    steps: int
    rows: int
    train_seconds: float
    loss: float
    val: Evaluation | None
    test: Evaluation | None

    @property
    def samples_per_s(self) -> float:
        """Over all ranks, evaluations and reporting not counted."""
        return self.rows / self.train_seconds if self.train_seconds else 0.0


class Stopwatch:
    """Seconds of training, without what ``paused`` times."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start - self._paused

    def pause(self, seconds: float) -> None:
        """Leave out ``seconds`` that went to something else."""
        self._paused += seconds


def num_train_steps(train: TrainConfig, steps_per_epoch: int) -> int:
    """Steps that a run will take."""
    total = train.epochs * steps_per_epoch
    return total if train.max_steps is None else min(total, train.max_steps)


def fit(
    trainer: Trainer,
    loaders: Mapping[str, Loader],
    train: TrainConfig,
    *,
    boxing: Boxing,
    watch: LossWatch,
    reporter: Reporter,
) -> Result:
    """Train on ``loaders["train"]``, score ``val`` on the way and ``val`` and ``test`` at the end.

    Raises TrainingError at a loss that is not a number.
    """
    last = num_train_steps(train, loaders["train"].num_steps)
    clock, rows, interval = Stopwatch(), 0, (0, 0.0)
    step = 0
    for epoch in range(train.epochs):
        for batch in loaders["train"].epoch(epoch):
            if step == last:
                break
            step += 1
            loss = trainer.step(batch)
            watch.push(step, loss, batch)
            rows += batch.num_rows
            reporter.advance(step, watch.last)
            if step % train.log_every == 0 or step == last:
                watch.flush()
                seconds = clock.seconds
                rate = (rows - interval[0]) / max(seconds - interval[1], 1e-9)
                reporter.step(step, watch.last, rate)
                interval = (rows, seconds)
            if train.eval_every and step % train.eval_every == 0 and step != last:
                _score("val", step, trainer, loaders, boxing, reporter, clock)
    seconds = clock.seconds
    return Result(
        steps=step,
        rows=rows,
        train_seconds=seconds,
        loss=watch.last,
        val=_score("val", step, trainer, loaders, boxing, reporter, clock),
        test=_score("test", step, trainer, loaders, boxing, reporter, clock),
    )


def _score(
    split: str,
    step: int,
    trainer: Trainer,
    loaders: Mapping[str, Loader],
    boxing: Boxing,
    reporter: Reporter,
    clock: Stopwatch,
) -> Evaluation | None:
    start = time.perf_counter()
    evaluation = None
    if split in loaders and loaders[split].num_steps:
        evaluation = score_split(trainer, loaders[split], boxing)
        if evaluation is not None:
            reporter.evaluation(split, step, evaluation)
    clock.pause(time.perf_counter() - start)
    return evaluation

"""The loop: epochs, evaluations, and what is reported when. It decides nothing about tensors."""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import TrainConfig
from sbpflow.training.evaluate import score_split
from sbpflow.training.health import LossWatch
from sbpflow.training.metrics import Evaluation
from sbpflow.training.overlap import OverlapWatch
from sbpflow.training.trainer import Batch, Loader, Trainer


class Reporter(Protocol):
    """Where progress goes; rank 0 shows and writes it, the others ignore it."""

    def step(
        self, step: int, loss: float, samples_per_s: float, extra: Mapping[str, float]
    ) -> None:
        """A log interval is over; ``extra`` are further figures, such as ``data_ms``."""
        ...

    def advance(self, step: int, loss: float) -> None:
        """A step is over."""
        ...

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """A split was scored."""
        ...


class Checkpoints(Protocol):
    """Where a run begins, and when it is saved; every rank has one and asks it alike."""

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

    def scored(self, step: int, evaluation: Evaluation | None) -> None:
        """The validation part was scored after ``step``; ``None`` on ranks other than 0."""
        ...

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether ``save`` is to be called after this step."""
        ...

    def save(self, step: int, batch: Batch, *, last: bool) -> None:
        """Save, once ``step`` was made of batches up to ``batch``; every rank calls it."""
        ...


class _NoCheckpoints:
    """A run from its first step on, which is not saved."""

    step = epoch = steps_of_before = 0

    def scored(self, step: int, evaluation: Evaluation | None) -> None:
        pass

    def is_due(self, step: int, *, last: bool) -> bool:
        del step, last
        return False

    def save(self, step: int, batch: Batch, *, last: bool) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to; ``samples_per_s`` is over all ranks, evaluations are on rank 0 only."""

    steps: int
    samples_per_s: float
    loss: float
    val: Evaluation | None
    test: Evaluation | None
    overlap: str


class Pace:
    """Rows and seconds of training, without the first step (it allocates and connects), without
    evaluations, and with the seconds that went into waiting for data told apart.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.seconds = 0.0
        self._interval = [0, 0, 0.0, 0.0]  # steps, rows, seconds, of them for data
        self._begin = time.perf_counter()
        self._data_seconds = 0.0
        self._warm = False

    def got_batch(self) -> None:
        """The batch of the next step is there."""
        self._data_seconds = time.perf_counter() - self._begin

    def stepped(self, num_rows: int) -> None:
        """The step is over."""
        now = time.perf_counter()
        if self._warm:
            seconds = now - self._begin
            self.rows += num_rows
            self.seconds += seconds
            for place, value in enumerate((1, num_rows, seconds, self._data_seconds)):
                self._interval[place] += value
        self._warm = True
        self._begin = now

    def resume(self) -> None:
        """What happened since the last step was no training."""
        self._begin = time.perf_counter()

    def interval(self) -> tuple[float, dict[str, float]]:
        """Samples/s and ms per step since the last call; the first step alone gives NaN."""
        steps, rows, seconds, data = self._interval
        self._interval = [0, 0, 0.0, 0.0]
        if not steps:
            return float("nan"), {}
        return rows / seconds, {"step_ms": 1e3 * seconds / steps, "data_ms": 1e3 * data / steps}


def num_train_steps(train: TrainConfig, steps_per_epoch: int) -> int:
    """Steps that a run will take; the last of an epoch may be of fewer batches than the others."""
    total = train.epochs * -(-steps_per_epoch // train.accumulate)
    return total if train.max_steps is None else min(total, train.max_steps)


def is_logged(step: int, log_every: int) -> bool:
    """Whether ``step`` ends a log interval: every ``log_every``, and before the first at 2, 5, 10,
    20, 50 and so on, for a short run should show whether it learns. Step 1 has no rate.
    """
    if step >= log_every:
        return step % log_every == 0
    digits = str(step)
    return step > 1 and digits[0] in "125" and not digits[1:].strip("0")


def fit(
    trainer: Trainer,
    loaders: Mapping[str, Loader],
    train: TrainConfig,
    *,
    boxing: Boxing,
    watch: LossWatch,
    reporter: Reporter,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Train on ``loaders["train"]``, score ``val`` on the way and ``val`` and ``test`` at the end.

    With ``checkpoints`` it goes on from where they say, and is saved when they say. Raises
    TrainingError at a loss that is not a number.
    """
    keeper = checkpoints or _NoCheckpoints()
    last = keeper.steps_of_before + num_train_steps(train, loaders["train"].num_steps)
    pace, step = Pace(), keeper.step
    overlap = OverlapWatch(trainer, boxing.world.size, last, boxing.world.device)
    for epoch in range(keeper.epoch, train.epochs):
        if step >= last:
            break
        for batches, ahead in with_next(loaders["train"].epoch(epoch), train.accumulate):
            pace.got_batch()
            step += 1
            with overlap.step(step), _named(step):
                loss = trainer.step(batches, ahead if step < last else None)
            watch.push(step, loss, batches)
            logged = is_logged(step, train.log_every) or step == last
            if logged:
                watch.flush()
            pace.stepped(sum(batch.num_rows for batch in batches))
            reporter.advance(step, watch.last)
            if logged:
                rate, split = pace.interval()
                reporter.step(step, watch.last, rate, {"epoch": epoch + 1, **split})
            if step < last and train.eval_every and step % train.eval_every == 0:
                watch.flush()
                keeper.scored(step, _score("val", step, trainer, loaders, boxing, reporter))
            if keeper.is_due(step, last=step == last):
                watch.flush()
                keeper.save(step, batches[-1], last=step == last)
            if step == last:
                break
            pace.resume()
    return Result(
        steps=step,
        samples_per_s=pace.rows / pace.seconds if pace.seconds else float("nan"),
        loss=watch.last,
        val=_score("val", step, trainer, loaders, boxing, reporter),
        test=_score("test", step, trainer, loaders, boxing, reporter),
        overlap=overlap.summary(),
    )


@contextmanager
def _named(step: int) -> Generator[None]:
    """An error of a step names it in its traceback."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in step {step}")
        raise


def with_next(
    batches: Iterable[Batch], accumulate: int
) -> Iterator[tuple[list[Batch], Batch | None]]:
    """The batches of each step, and the first one of the next step; ``None`` after the last."""
    held: list[Batch] = []
    for batch in batches:
        if len(held) == accumulate:
            yield held, batch
            held = []
        held.append(batch)
    if held:
        yield held, None


def _score(
    split: str,
    step: int,
    trainer: Trainer,
    loaders: Mapping[str, Loader],
    boxing: Boxing,
    reporter: Reporter,
) -> Evaluation | None:
    if split not in loaders or not loaders[split].num_steps:
        return None
    evaluation = score_split(trainer, loaders[split], boxing)
    if evaluation is not None:
        reporter.evaluation(split, step, evaluation)
    return evaluation

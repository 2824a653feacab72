"""The loop: epochs, evaluations, and what is reported when. It decides nothing about tensors."""

import logging
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import TrainConfig
from sbpflow.errors import ConfigError
from sbpflow.training.batch import Batch, Loader
from sbpflow.training.evaluate import ScoreOptions, score_split, slice_columns
from sbpflow.training.health import LossWatch
from sbpflow.training.metrics import Evaluation
from sbpflow.training.move_times import MoveTimes, StepProfiler
from sbpflow.training.overlap import OverlapWatch
from sbpflow.training.saving import Checkpoints, NoCheckpoints
from sbpflow.training.stopping import Watchers
from sbpflow.training.trainer import Trainer

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to; ``samples_per_s`` is over all ranks, evaluations are on rank 0 only."""

    steps: int
    samples_per_s: float
    loss: float
    val: Evaluation | None
    test: Evaluation | None
    overlap: str
    stopped: str = ""  # why a run ended early
    best: str = ""  # the best value of val that was watched, and its step

    @property
    def notes(self) -> dict[str, str]:
        """What the end of a run says beside its figures, by title."""
        lines = {"stopped": self.stopped, "best val": self.best, "overlap": self.overlap}
        return {title: line for title, line in lines.items() if line}


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

    def stepped(self, batch_size: int) -> None:
        """The step is over."""
        now = time.perf_counter()
        if self._warm:
            seconds = now - self._begin
            self.rows += batch_size
            self.seconds += seconds
            for place, value in enumerate((1, batch_size, seconds, self._data_seconds)):
                self._interval[place] += value
        self._warm = True
        self._begin = now

    def resume(self) -> None:
        """What happened since the last step was no training."""
        self._begin = time.perf_counter()

    def interval(self, moves: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Samples/s and ms per step since the last call, of the seconds of each move too; the first
        step alone gives NaN.
        """
        steps, rows, seconds, data = self._interval
        self._interval = [0, 0, 0.0, 0.0]
        if not steps:
            return float("nan"), {}
        parts = {"step": seconds, "data": data, **{f"move_{k}": v for k, v in moves.items()}}
        return rows / seconds, {f"{name}_ms": 1e3 * s / steps for name, s in parts.items()}


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
    profiler: StepProfiler | None = None,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Train on ``loaders["train"]``, score ``val`` on the way and ``val`` and ``test`` at the end.

    ``profiler`` traces some of the steps; with ``checkpoints`` it goes on from where they say, and
    is saved when they say. Raises TrainingError at a loss that is not a number, and ConfigError
    where val, which is to be watched, has no rows.
    """
    keeper = checkpoints or NoCheckpoints()
    watchers = Watchers.of(train)
    watchers.load(keeper.loop)
    score = _Scores(trainer, loaders, train, boxing, reporter)
    trainer.rate_scale = watchers.rate_scale
    last = keeper.steps_of_before + num_train_steps(train, loaders["train"].num_steps)
    _check_val(train, watchers, loaders, last)
    _check_profile(profiler, last)
    pace, times, step = Pace(), MoveTimes(), keeper.step
    every = train.eval_every or last
    overlap = OverlapWatch(trainer, boxing.world.size, last, boxing.world.device)
    steps = _Steps(loaders["train"], range(keeper.epoch, train.epochs), train.accumulate)
    window = _Window(steps.first(0 if watchers.stops else last - step), trainer)
    while (now := window.next_step()) is not None:
        batches = now.batches
        pace.got_batch()
        step += 1
        # The end scores all of val: where evaluations do, too, it is one of them.
        due = step % every == 0 if step < last else train.eval_rows is None
        scored = bool(train.eval_every) and due
        with overlap.step(step), _named(step), _watched(trainer, times, profiler, step):
            loss = trainer.step(batches)
        watch.push(step, loss, batches, trainer.gradient_norm)
        logged = is_logged(step, train.log_every) or step == last
        if logged:
            watch.flush()
        pace.stepped(sum(batch.batch_size for batch in batches))
        if step == keeper.step + 1:  # it allocates and connects
            times.take()
        reporter.advance(step, watch.last)
        if logged:
            rate, split = pace.interval(times.take())
            extra = {"epoch": now.epoch + 1, **split, **watch.figures(), **watchers.figures()}
            reporter.step(step, watch.last, rate, extra)
        if scored:
            watch.flush()
            evaluation = score("val", step, train.eval_rows)
            watchers.push(step, evaluation, boxing)
            keeper.scored(step, evaluation)
            trainer.rate_scale = watchers.rate_scale
        over = step == last or watchers.stops
        if keeper.is_due(step, last=over):
            watch.flush()
            keeper.save(step, batches[-1], watchers.state())
            if keeper.stops:
                trainer.drain()
                keeper.leave()
        if over:
            break
        pace.resume()
    trainer.drain()  # of a run that stopped early
    _close(profiler, step)
    return Result(
        steps=step,
        samples_per_s=pace.rows / pace.seconds if pace.seconds else float("nan"),
        loss=watch.last,
        val=score("val", step),
        test=score("test", step),
        overlap=overlap.summary(),
        stopped=watchers.stop.why(step) if watchers.stop and watchers.stops and step < last else "",
        best=str(watchers.stop.best) if watchers.stop else "",
    )


def _check_profile(profiler: StepProfiler | None, last: int) -> None:
    if profiler is not None and profiler.first > last:
        raise ConfigError(
            f"train.profile: begins at step {profiler.first}, the run has {last}; for example "
            f"[{max(1, last - 2)}, {last}]"
        )


def _close(profiler: StepProfiler | None, step: int) -> None:
    if profiler is not None:
        profiler.close()
        if step < profiler.first:
            logger.warning(
                "train.profile: the run stopped before step %d: no trace", profiler.first
            )


def _check_val(
    train: TrainConfig, watchers: Watchers, loaders: Mapping[str, Loader], last: int
) -> None:
    rows = loaders["val"].num_steps if "val" in loaders else 0
    key = "stop" if train.stop is not None else "plateau"
    if watchers.active and not rows:
        raise ConfigError(
            f"train.{key}: watches the split val, which the data does not have or which has no "
            f"rows; prepare it with some, or remove train.{key}"
        )
    if watchers.active and train.eval_every >= last:
        text = "train.%s does nothing: val has one evaluation; train.eval_every is %d of %d steps"
        logger.warning(text, key, train.eval_every, last)


@contextmanager
def _watched(
    trainer: Trainer, times: MoveTimes, profiler: StepProfiler | None, step: int
) -> Generator[None]:
    """The trainer tells ``times``, and the profiler in its steps, of its moves."""
    trainer.move_watch = times
    if profiler is None:
        yield
        return
    with profiler.step(step, times) as trainer.move_watch:
        yield


@contextmanager
def _named(step: int) -> Generator[None]:
    """An error of a step names it in its traceback."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in step {step}")
        raise


@dataclass(frozen=True, slots=True)
class Step:
    """The batches of one step, and their epoch, counted from 0."""

    epoch: int
    batches: list[Batch]


class _Steps:
    """The steps of several epochs; the last one of an epoch may have fewer batches."""

    def __init__(self, loader: Loader, epochs: Iterable[int], accumulate: int) -> None:
        self._loader, self._epochs, self._accumulate = loader, epochs, accumulate

    def first(self, count: int) -> Iterator[Step]:
        """The first ``count``; no batch behind them is read."""
        return islice(self._all(), max(count, 0))

    def _all(self) -> Iterator[Step]:
        for epoch in self._epochs:
            batches = iter(self._loader.epoch(epoch))
            while held := list(islice(batches, self._accumulate)):
                yield Step(epoch, held)


class _Window:
    """Reads steps as far ahead as the trainer exchanges ids, and announces their batches.

    The window runs on over the end of an epoch. It holds no batch that the run will not come to,
    unless an evaluation or a signal stops the run.
    """

    def __init__(self, steps: Iterator[Step], trainer: Trainer) -> None:
        self._steps, self._trainer = steps, trainer
        self._held: deque[Step] = deque()

    def next_step(self) -> Step | None:
        """The step to train now; ``None`` when all are trained."""
        while not self._held or self._num_behind < self._trainer.lookahead:
            step = next(self._steps, None)
            if step is None:
                break
            self._held.append(step)
            for batch in step.batches:
                self._trainer.announce(batch)
        return self._held.popleft() if self._held else None

    @property
    def _num_behind(self) -> int:
        """Batches behind those of the next step."""
        return sum(len(step.batches) for step in islice(self._held, 1, None))


class _Scores:
    """Scores splits and tells the reporter; what was scored whole at a step is not scored again."""

    def __init__(
        self,
        trainer: Trainer,
        loaders: Mapping[str, Loader],
        train: TrainConfig,
        boxing: Boxing,
        reporter: Reporter,
    ) -> None:
        self._trainer, self._loaders = trainer, loaders
        self._boxing, self._reporter = boxing, reporter
        self._options = ScoreOptions(
            exact_rows=train.exact_auc_rows,
            slices=slice_columns(train.slices, trainer.embedding_plan),
        )
        self._last: tuple[str, int, Evaluation | None] | None = None

    def __call__(self, split: str, step: int, max_rows: int | None = None) -> Evaluation | None:
        """The split after ``step``, or its first ``max_rows``; on rank 0."""
        if split not in self._loaders or not self._loaders[split].num_steps:
            return None
        if self._last is not None and self._last[:2] == (split, step):
            return self._last[2]
        options = replace(self._options, max_rows=max_rows)
        evaluation = score_split(self._trainer, self._loaders[split], self._boxing, options)
        if max_rows is None:
            self._last = (split, step, evaluation)
        if evaluation is not None:
            self._reporter.evaluation(split, step, evaluation)
        return evaluation

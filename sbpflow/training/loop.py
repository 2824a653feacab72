"""Runs the training loop: epochs, evaluations, and progress reports. The loop itself does not
compute with tensors.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import TrainConfig
from sbpflow.errors import ConfigError
from sbpflow.runtime.ranks.world import World
from sbpflow.training.batch import Batch, Loader
from sbpflow.training.cache_watch import CacheWatch
from sbpflow.training.evaluate import ScoreOptions, score_split, slice_columns
from sbpflow.training.growth_watch import GrowthWatch
from sbpflow.training.health import LossWatch
from sbpflow.training.metrics import Evaluation
from sbpflow.training.move_times import MoveTimes, StepProfiler
from sbpflow.training.overlap import OverlapWatch
from sbpflow.training.saving import Checkpoints, Position
from sbpflow.training.stopping import Watchers
from sbpflow.training.trainer import Trainer

logger = logging.getLogger(__name__)

_KEEP_BEST = "checkpoint.keep_best"


class Reporter(Protocol):
    """The interface of an object that receives progress reports. Only the reporter of rank 0
    displays and writes reports.
    """

    def step(
        self, step: int, loss: float, samples_per_s: float, extra: Mapping[str, float]
    ) -> None:
        """Report a log interval; ``extra`` contains additional values, such as ``data_ms``."""
        ...

    def advance(self, step: int, loss: float) -> None:
        """Report the end of a step."""
        ...

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """Report an evaluation; only rank 0 calls this method."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run's result. ``samples_per_s`` is the total rate of all ranks; only rank 0 has the
    evaluations.

    ``val`` and ``test`` are scores of the weights of ``best_step`` if the run keeps its best
    weights, or else of the last weights. ``last_val`` and ``last_test`` are the scores of the last
    step if another step is the best.
    """

    steps: int
    samples_per_s: float
    timed_steps: int  # the steps that ``samples_per_s`` includes
    loss: float
    val: Evaluation | None
    test: Evaluation | None
    overlap: str
    stopped: str = ""  # Why the run ended early.
    best: str = ""  # Best value of the watched metric on val, and its step.
    best_step: int | None = None
    last_val: Evaluation | None = None
    last_test: Evaluation | None = None

    @property
    def notes(self) -> dict[str, str]:
        """Return the lines to add to the end summary, by title."""
        best = self.best
        if self.best_step not in (None, self.steps):
            best += (
                "; val and test are computed with the weights of that step, and last_* with those "
                f"of step {self.steps}"
            )
        lines = {"stopped": self.stopped, "best val": best, "overlap": self.overlap}
        return {title: line for title, line in lines.items() if line}


class Pace:
    """Counts the steps, rows, and seconds of training and, separately, the seconds spent waiting
    for data and for transfers. Evaluations and the start and end of this rank's trace are excluded,
    and so is the first step, because it allocates memory and opens connections.
    """

    def __init__(self, world: World) -> None:
        self.steps = self.rows = 0
        self.seconds = 0.0
        # steps, rows, seconds, seconds waiting for data, seconds waiting for transfers
        self._interval = [0, 0, 0.0, 0.0, 0.0]
        self._device, self._waits = world.device, world.waits if world.size > 1 else None
        self._restart(time.perf_counter())
        self._data_seconds = 0.0
        self._warm = False

    def got_batch(self) -> None:
        """Record that the batch of the next step has arrived."""
        self._data_seconds = time.perf_counter() - self._begin

    def stepped(self, batch_size: int) -> None:
        """Record the end of a step."""
        now = time.perf_counter()
        if self._warm:
            seconds = now - self._begin
            self.steps += 1
            self.rows += batch_size
            self.seconds += seconds
            waited = self._waits.seconds - self._waited if self._waits else 0.0
            for place, value in enumerate((1, batch_size, seconds, self._data_seconds, waited)):
                self._interval[place] += value
        self._warm = True
        self._restart(now)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Exclude the time in this context from the time of the step, which includes the work that
        the device has not yet done.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        yield
        self._begin += time.perf_counter() - start

    def resume(self) -> None:
        """Exclude the time since the last step, such as the time of an evaluation."""
        self._restart(time.perf_counter())

    def _restart(self, now: float) -> None:
        self._begin, self._waited = now, self._waits.seconds if self._waits else 0.0

    def interval(self, moves: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Return the samples/s since the last call, and the ms per step: in total, for reading
        data, for waiting for transfers, and for each move.

        ``moves`` contains the seconds of each move. The samples/s are NaN if only the first step
        has run.
        """
        steps, rows, seconds, data, wait = self._interval
        self._interval = [0, 0, 0.0, 0.0, 0.0]
        if not steps:
            return float("nan"), {}
        waited = {"wait": wait} if self._waits else {}
        parts = {"step": seconds, "data": data, **waited}
        parts |= {f"move_{k}": v for k, v in moves.items()}
        return rows / seconds, {f"{name}_ms": 1e3 * s / steps for name, s in parts.items()}


def last_step(train: TrainConfig, batches_per_epoch: int, start: Position) -> int:
    """Return the number of a run's last step.

    The last step of an epoch may have fewer than ``accumulate`` batches. The steps before ``start``
    may have had another batch size.
    """
    left = batches_per_epoch if start.batches_left is None else start.batches_left
    steps = 0
    if start.epoch < train.epochs:
        later = train.epochs - start.epoch - 1
        steps = -(-left // train.accumulate) + later * -(-batches_per_epoch // train.accumulate)
    most = math.inf if train.max_steps is None else start.steps_of_before + train.max_steps
    return int(min(start.step + steps, most))


def is_logged(step: int, log_every: int) -> bool:
    """Return whether ``step`` ends a log interval of ``log_every`` steps.

    Within the first ``log_every`` steps, the result is also True for steps 2, 5, 10, 20, 50 and so
    on, so that even short runs show whether the model learns. Step 1 is not among these, because it
    is not timed.
    """
    if step >= log_every:
        return step % log_every == 0
    digits = str(step)
    return step > 1 and digits[0] in "125" and not digits[1:].strip("0")


def _is_scored(step: int, last: int, train: TrainConfig, watchers: Watchers) -> bool:
    """Return whether ``val`` is scored during the run after ``step``.

    The last step is included in two cases: if ``val`` is watched, because the last step can be the
    best; and if all rows are scored, because the result is then also the final score.
    """
    if not train.eval_every or step < last:
        return bool(train.eval_every) and step % train.eval_every == 0
    return watchers.active or train.eval_rows is None


def fit(
    trainer: Trainer,
    loaders: Mapping[str, Loader],
    train: TrainConfig,
    *,
    boxing: Boxing,
    watch: LossWatch,
    reporter: Reporter,
    checkpoints: Checkpoints,
    profiler: StepProfiler | None = None,
) -> Result:
    """Train on ``loaders["train"]`` and score ``val``; at the end, score ``val`` and ``test``.

    ``checkpoints`` decides where the run starts, when it is saved, and whether it ends with the
    weights of the best or of the last step. ``profiler`` traces some of the steps. Raises
    TrainingError if the loss is not finite, and ConfigError for an empty ``val`` or trace.
    """
    watchers, start = Watchers.of(train, checkpoints.best_metric), checkpoints.start
    watchers.load(start.loop)
    score = _Scores(trainer, loaders, train, boxing, reporter)
    trainer.rate_scale = watchers.rate_scale
    last = last_step(train, loaders["train"].num_steps, start)
    _check_val(train, watchers, loaders, last, boxing.world.rank)
    _check_profile(profiler, start.step, last, boxing.world.rank)
    step, pace, times = start.step, Pace(boxing.world), MoveTimes()
    caches = CacheWatch(trainer)
    growth = GrowthWatch(trainer.embeddings.growth_counts, boxing.world.rank)
    overlap = OverlapWatch(trainer, boxing.world.size, last - step, boxing.world.device)
    steps = _read_steps(loaders["train"], range(start.epoch, train.epochs), train.accumulate)
    _warn_if_finished(step, last, boxing.world.rank)
    window = _Window(islice(steps, 0 if watchers.stops else max(last - step, 0)), trainer)
    while (current := window.next_step()) is not None:
        batches = current.batches
        pace.got_batch()
        step += 1
        scored = _is_scored(step, last, train, watchers)
        with overlap.step(), _named(step), _watched(trainer, times, pace, profiler, step):
            loss = trainer.step(batches)
        watch.push(step, loss, batches, trainer.gradient_norm)
        logged = is_logged(step, train.log_every) or step == last
        if logged:
            watch.flush()
        pace.stepped(sum(batch.batch_size for batch in batches))
        if step == start.step + 1:  # the first step allocates memory and opens connections
            times.take()
        reporter.advance(step, watch.last)
        if logged:
            rate, split = pace.interval(times.take())
            extra = {"epoch": current.epoch + 1, **split, **watch.figures(), **watchers.figures()}
            extra |= caches.figures(step) | growth.figures()
            reporter.step(step, watch.last, rate, extra)
        if scored:
            watch.flush()
            watchers.push(step, score("val", step, train.eval_rows), boxing)
            trainer.rate_scale = watchers.rate_scale
        is_last = step == last or watchers.stops
        if checkpoints.is_due(step, last=is_last, best=scored and watchers.improved(step)):
            watch.flush()
            checkpoints.save(step, batches[-1], watchers.state())
            if checkpoints.stops:
                trainer.drain()
                checkpoints.leave()
        if is_last:
            break
        pace.resume()
    trainer.drain()  # If the run stops early, announced batches are left over.
    _close(profiler, step, boxing.world.rank)
    result = Result(
        steps=step,
        samples_per_s=pace.rows / pace.seconds if pace.seconds else float("nan"),
        timed_steps=pace.steps,
        loss=watch.last,
        val=score("val", step),
        test=score("test", step),
        overlap=overlap.summary(),
        stopped=watchers.stop.why(step) if watchers.stop and watchers.stops and step < last else "",
        best=str(watchers.best or watchers.stop or ""),
    )
    best_step = watchers.best.step if watchers.best else 0
    return _with_best_weights(result, best_step, checkpoints, score) if best_step else result


def _with_best_weights(
    result: Result, best_step: int, checkpoints: Checkpoints, score: "_Scores"
) -> Result:
    """Load the best weights, unless the last weights are the best, and return ``result`` with the
    best weights' scores.
    """
    if best_step == result.steps:
        return replace(result, best_step=best_step)
    logger.info("step %d is the best on val; loading and scoring its weights", best_step)
    checkpoints.load_weights(best_step)
    return replace(
        result,
        best_step=best_step,
        val=score("val", best_step),
        test=score("test", best_step),
        last_val=result.val,
        last_test=result.test,
    )


def _warn_if_finished(step: int, last: int, rank: int) -> None:
    if last <= step and rank == 0:
        logger.warning(
            "nothing is left to train: the weights are those of step %d, and the run ends at step "
            "%d; to train longer, raise train.epochs (or train.max_steps, if it is set)",
            *(step, last),
        )


def _check_profile(profiler: StepProfiler | None, step: int, last: int, rank: int) -> None:
    if profiler is None:
        return
    if profiler.last <= step and rank == 0:
        logger.warning(
            "train.profile has no effect: it ends at step %d, but the run resumes after step %d",
            *(profiler.last, step),
        )
    if profiler.first > last:
        raise ConfigError(
            f"train.profile starts at step {profiler.first}, but the run has only {last} steps; "
            f"use, for example, [{max(1, last - 2)}, {last}]"
        )


def _close(profiler: StepProfiler | None, step: int, rank: int) -> None:
    if profiler is not None:
        profiler.close()
        if step < profiler.first and rank == 0:
            logger.warning(
                "train.profile: no trace was written; the run stopped before step %d",
                profiler.first,
            )


def _check_val(
    train: TrainConfig, watchers: Watchers, loaders: Mapping[str, Loader], last: int, rank: int
) -> None:
    rows = loaders["val"].num_steps if "val" in loaders else 0
    key = "train.stop" if train.stop else "train.plateau" if train.plateau else _KEEP_BEST
    if watchers.active and not rows:
        raise ConfigError(
            f"{key} watches the split val, but the data has no val rows; prepare the data with "
            f"a val split, or remove {key}"
        )
    if watchers.active and train.eval_every >= last and rank == 0:
        text = "%s has no effect: train.eval_every is %d, but the run has only %d steps"
        logger.warning(text, key, train.eval_every, last)


@contextmanager
def _watched(
    trainer: Trainer, times: MoveTimes, pace: Pace, profiler: StepProfiler | None, step: int
) -> Generator[None]:
    """Time the moves of the step; also trace them if ``profiler`` traces this step. Starting and
    writing a trace can take seconds, which ``pace`` excludes.
    """
    trainer.move_watch = times.move
    if profiler is None:
        yield
        return
    if profiler.starts_at(step):
        with pace.paused():
            profiler.start()
    with profiler.step(step, times.move) as trainer.move_watch:
        yield
    if step == profiler.last:
        with pace.paused():
            profiler.close()


@contextmanager
def _named(step: int) -> Generator[None]:
    """Add a note with the step number to any error raised inside the context."""
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


def _read_steps(loader: Loader, epochs: Iterable[int], accumulate: int) -> Iterator[Step]:
    """Yield the steps of several epochs. The last step of an epoch may have fewer than
    ``accumulate`` batches.
    """
    for epoch in epochs:
        batches = iter(loader.epoch(epoch))
        while group := list(islice(batches, accumulate)):
            yield Step(epoch, group)


class _Window:
    """Reads steps ahead, up to the trainer's lookahead, and announces their batches.

    The window can span several epochs. The run trains on all batches in the window unless an
    evaluation or a signal stops the run.
    """

    def __init__(self, steps: Iterator[Step], trainer: Trainer) -> None:
        self._steps, self._trainer = steps, trainer
        self._queue: deque[Step] = deque()

    def next_step(self) -> Step | None:
        """Return the next step, or ``None`` after the last step."""
        while not self._queue or self._num_behind < self._trainer.lookahead:
            step = next(self._steps, None)
            if step is None:
                break
            self._queue.append(step)
            full = [batch for batch in step.batches if batch.batch_size]
            for batch in full:
                self._trainer.announce(batch, begins_step=batch is full[0])
        return self._queue.popleft() if self._queue else None

    @property
    def _num_behind(self) -> int:
        """Return the number of batches read for steps after the next step."""
        return sum(len(step.batches) for step in islice(self._queue, 1, None))


class _Scores:
    """Scores and reports splits; never scores a whole split twice with the same weights."""

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
            slices=slice_columns(train.slices, trainer.embeddings.plan),
        )
        self._done: dict[tuple[str, int], Evaluation | None] = {}

    def __call__(self, split: str, step: int, max_rows: int | None = None) -> Evaluation | None:
        """Score the split after ``step``, on ``max_rows`` rows or on all rows.

        Returns ``None`` on all ranks except rank 0.
        """
        if split not in self._loaders or not self._loaders[split].num_steps:
            return None
        if (split, step) in self._done:
            return self._done[split, step]
        options = replace(self._options, max_rows=max_rows)
        evaluation = score_split(self._trainer, self._loaders[split], self._boxing, options)
        if max_rows is None:
            self._done[split, step] = evaluation
        if evaluation is not None:
            self._reporter.evaluation(split, step, evaluation)
        return evaluation

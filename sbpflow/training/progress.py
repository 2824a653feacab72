"""Progress of a training run on rank 0: a bar on a terminal, else one log line per interval.

Measures time only; the loss is asked for when an interval ends, so that a device is not made to
wait at every step. The first steps and whatever runs inside ``paused`` are not timed.
"""

import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One interval: ``step`` counts from 1, rates are over all ranks, ``extra`` is the caller's."""

    step: int
    loss: float
    samples_per_s: float | None
    ms_per_step: float | None
    eta_s: float | None
    extra: Mapping[str, float] = field(default_factory=dict[str, float])

    def values(self) -> dict[str, float | None]:
        """What goes into the ``step`` event of metrics.jsonl."""
        return {
            "step": self.step,
            "loss": self.loss,
            "samples_per_s": self.samples_per_s,
            "ms_per_step": self.ms_per_step,
            "eta_s": self.eta_s,
            **self.extra,
        }


class Progress:
    """Counts the steps of a run; use as a context manager so that the bar is closed."""

    def __init__(
        self,
        num_steps: int,
        *,
        log_every: int,
        visible: bool,
        bar: bool = True,
        first_step: int = 0,
        warmup_steps: int = 5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``visible`` on rank 0 only; ``bar`` asks for a bar where stderr is a terminal."""
        self._num_steps, self._log_every = num_steps, log_every
        self._step, self._clock = first_step, clock
        self._untimed = warmup_steps
        self._visible = visible
        self._interval, self._whole = _Timed(), _Timed()
        self._since = clock()
        on_terminal = visible and bar and sys.stderr.isatty()
        self._bar = (
            tqdm(total=num_steps, initial=first_step, unit="step", dynamic_ncols=True)
            if on_terminal
            else None
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    @property
    def samples_per_s(self) -> float | None:
        """Over all timed steps, all ranks; None before the first of them."""
        return self._whole.rate()

    def tick(
        self,
        num_rows: int,
        loss: Callable[[], float],
        extra: Callable[[], Mapping[str, float]] | None = None,
    ) -> StepRecord | None:
        """One step of ``num_rows`` rows (all ranks) is done; a record where an interval ends.

        Every rank must call it, and the ranks get records at the same steps, so ``loss`` may hold
        a collective.
        """
        self._step += 1
        ends = self._step % self._log_every == 0 or self._step == self._num_steps
        value = loss() if ends else None  # before the clock: it waits for the device
        self._time(num_rows)
        if self._bar is not None:
            self._bar.update(1)
        if value is None:
            return None
        record = self._record(value, extra() if extra is not None else {})
        self._show(record)
        self._interval = _Timed()
        return record

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave out of all rates what runs inside, such as an evaluation."""
        before = self._clock() - self._since
        yield
        self._since = self._clock() - before

    def _time(self, num_rows: int) -> None:
        now = self._clock()
        if self._untimed > 0:
            self._untimed -= 1
        else:
            self._interval.add(now - self._since, num_rows)
            self._whole.add(now - self._since, num_rows)
        self._since = now

    def _record(self, loss: float, extra: Mapping[str, float]) -> StepRecord:
        per_step = self._interval.seconds_per_step()
        pace = self._whole.seconds_per_step()
        return StepRecord(
            step=self._step,
            loss=loss,
            samples_per_s=self._interval.rate(),
            ms_per_step=None if per_step is None else 1e3 * per_step,
            eta_s=None if pace is None else pace * (self._num_steps - self._step),
            extra=extra,
        )

    def _show(self, record: StepRecord) -> None:
        if self._bar is not None:
            rate = (
                "" if record.samples_per_s is None else f", {record.samples_per_s:,.0f} samples/s"
            )
            self._bar.set_postfix_str(f"loss {record.loss:.4f}{rate}")
        elif self._visible:
            logger.info(line(record, self._num_steps))


class _Timed:
    """Seconds, rows and number of the steps added."""

    def __init__(self) -> None:
        self.seconds, self.rows, self.steps = 0.0, 0, 0

    def add(self, seconds: float, rows: int) -> None:
        self.seconds += seconds
        self.rows += rows
        self.steps += 1

    def rate(self) -> float | None:
        return self.rows / self.seconds if self.seconds > 0 else None

    def seconds_per_step(self) -> float | None:
        return self.seconds / self.steps if self.steps else None


def line(record: StepRecord, num_steps: int) -> str:
    """One interval in one line, for logs."""
    parts = [f"step {record.step}/{num_steps}", f"loss {record.loss:.5f}"]
    if record.samples_per_s is not None and record.ms_per_step is not None:
        parts += [f"{record.samples_per_s:,.0f} samples/s", f"{record.ms_per_step:.2f} ms/step"]
    parts += [f"{name} {value:.4g}" for name, value in record.extra.items()]
    if record.eta_s is not None:
        parts.append(f"ETA {tqdm.format_interval(record.eta_s)}")
    return ", ".join(parts)

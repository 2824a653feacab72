"""Shows the progress of a run: a bar on a terminal or in a notebook, otherwise log lines.

Callers provide the values; this module only measures the time that the ETA needs.
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping

from tqdm.auto import tqdm

logger = logging.getLogger(__name__)


def can_show_bars() -> bool:
    """Return whether stderr is a terminal or the output of a notebook cell."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")


class Progress:
    """Shows progress if ``visible``, which is True on rank 0. With ``bar``, it shows a progress bar
    if stderr supports one.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        visible: bool,
        bar: bool = True,
        first_step: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_steps, self._visible, self._clock = num_steps, visible, clock
        self._start: tuple[int, float] | None = None
        self._bar = None
        if visible and bar and can_show_bars():
            self._bar = tqdm(
                desc="train", total=num_steps, initial=first_step, unit="step", dynamic_ncols=True
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, step: int) -> None:
        """Record the end of step ``step``, counted from 1."""
        if self._start is None:  # the first step, which allocates memory and connects, is not timed
            self._start = (step, self._clock())
        if self._bar is not None:
            self._bar.update(1)

    def eta_s(self, step: int) -> float | None:
        """Return the estimated seconds until the end, including evaluations, or None before the
        second step of this process.
        """
        if self._start is None or step <= self._start[0]:
            return None
        pace = (self._clock() - self._start[1]) / (step - self._start[0])
        return pace * (self.num_steps - step)

    def interval(
        self, step: int, loss: float, samples_per_s: float, extra: Mapping[str, float]
    ) -> None:
        """Show the values of a log interval; ``extra`` contains additional values."""
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join([f"loss {loss:.4f}", *_rate(samples_per_s)]))
        elif self._visible:
            logger.info(self._line(step, loss, samples_per_s, extra))

    def _line(
        self, step: int, loss: float, samples_per_s: float, extra: Mapping[str, float]
    ) -> str:
        parts = [f"step {step}/{self.num_steps}", f"loss {loss:.5f}"]
        parts += _rate(samples_per_s)
        parts += [
            f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}"
            for name, value in extra.items()
        ]
        eta = self.eta_s(step)
        if eta is not None:
            parts.append(f"ETA {tqdm.format_interval(eta)}")
        return ", ".join(parts)


def _rate(samples_per_s: float) -> list[str]:
    """Return the formatted rate in a list, which is empty if no step was timed."""
    return [f"{samples_per_s:,.0f} samples/s"] if math.isfinite(samples_per_s) else []

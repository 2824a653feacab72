"""Compares the ranks' step times at each log interval, and names a rank that is persistently slow.

In synchronous training, all ranks take the same time per step, because fast ranks wait for slow
ones. A rank's own time is therefore its step time without the waits for transfers. On CUDA, the
waits happen on the device, where the host cannot measure them, so only ranks that read data slowly
are found.
"""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sbpflow.boxing.agreement import combine_parts, gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.runtime.processes.environment import machine_name
from sbpflow.sbp.sbp import Split
from sbpflow.training.metrics import Evaluation

logger = logging.getLogger(__name__)

_PERSISTS = 3  # Number of consecutive windows in which a rank must be slow before a warning.
# Minimum length of a window, because single steps vary, and because other processes, such as an
# exporter that starts, slow down a rank for a few seconds.
_WINDOW_STEPS, _WINDOW_MS = 20, 5000.0
# A rank is slow if its own time exceeds ``_FACTOR`` times the median of the other ranks, and the
# difference exceeds the share ``_SHARE`` of a step.
_FACTOR, _SHARE = 1.2, 0.05


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The ms per step of each rank in one log interval; ``own_ms`` excludes waiting for
    transfers.
    """

    step: int
    hosts: Sequence[str]
    step_ms: Sequence[float]
    data_ms: Sequence[float]
    wait_ms: Sequence[float]

    @property
    def own_ms(self) -> list[float]:
        """Return the ms per step that each rank spends on its own work, including reading data."""
        return [step - wait for step, wait in zip(self.step_ms, self.wait_ms, strict=True)]

    @property
    def slow_rank(self) -> int | None:
        """Return the rank that the other ranks wait for, or None if no rank's own time is much
        longer than the others'.
        """
        own = self.own_ms
        slowest = max(range(len(own)), key=own.__getitem__)
        median = statistics.median([*own[:slowest], *own[slowest + 1 :]])
        is_slow = own[slowest] > _FACTOR * median
        is_slow &= own[slowest] - median > _SHARE * max(self.step_ms)
        return slowest if is_slow else None


class RankWatch:
    """A ``Reporter`` that gathers the times of all ranks, passes them to each function in
    ``write`` on every rank, and warns about a slow rank.

    The only communication is one small all-gather per log interval.
    """

    def __init__(self, boxing: Boxing, *write: Callable[[RankTimes], None]) -> None:
        self._boxing, self._write = boxing, write
        self._hosts: Sequence[str] = ()
        self._last_step = 0
        self._window = torch.zeros(0)  # sums of the times of the current window, by rank
        self._window_steps = 0
        self._recent: list[int | None] = []  # the slow rank in each of the last few windows
        self._named: int | None = None

    def advance(self, step: int, loss: float) -> None:
        """Do nothing; ranks are compared only at the end of a log interval."""

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """Do nothing."""

    def step(
        self, step: int, loss: float, samples_per_s: float, extra: Mapping[str, float]
    ) -> None:
        """Gather the times in ``extra`` (see ``Pace.interval``); every rank must call this
        method.
        """
        world = self._boxing.world
        if world.size == 1 or "step_ms" not in extra:  # the first step is not timed
            return
        self._hosts = self._hosts or gather_values(self._boxing, machine_name())
        mine = [[extra["step_ms"], extra["data_ms"], extra["wait_ms"]]]
        part = torch.tensor(mine, dtype=torch.float32, device=world.device)
        parts = combine_parts(self._boxing, part, Split(0), "ranks/times")
        times = RankTimes(step, self._hosts, *parts.T.tolist())
        for write in self._write:
            write(times)
        if world.rank == 0:
            self._add(step, parts.cpu())

    def _add(self, step: int, parts: torch.Tensor) -> None:
        """Add a log interval to the current window; once the window is long enough, look for a slow
        rank.
        """
        steps, self._last_step = step - self._last_step, step
        previous = self._window if self._window_steps else torch.zeros_like(parts)
        self._window, self._window_steps = previous + steps * parts, self._window_steps + steps
        if self._window_steps >= _WINDOW_STEPS and self._window[:, 0].max() >= _WINDOW_MS:
            means = self._window / self._window_steps
            self._window_steps = 0
            self._warn(RankTimes(step, self._hosts, *means.T.tolist()))

    def _warn(self, times: RankTimes) -> None:
        slow = times.slow_rank
        self._recent = [*self._recent, slow][-_PERSISTS:]
        if slow is None or slow == self._named or self._recent != [slow] * _PERSISTS:
            if slow is None and self._named is not None:
                logger.info("step %d: rank %d is no longer slow", times.step, self._named)
                self._named = None
            return
        self._named = slow
        own = times.own_ms
        others = statistics.median([*own[:slow], *own[slow + 1 :]])
        reads = times.data_ms[slow] > (own[slow] - others) / 2
        logger.warning(
            "rank %d on %s is slow: its own work takes %.1f ms per step (other ranks: %.1f ms), "
            "and other ranks wait up to %.1f ms for it; %s",
            *(slow, times.hosts[slow], own[slow], others, max(times.wait_ms)),
            f"{times.data_ms[slow]:.1f} ms of its own work is reading data, so check its disk"
            if reads
            else "check other processes, the temperature, and the number of cores of that machine",
        )

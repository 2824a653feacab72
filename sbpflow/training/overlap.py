"""What overlap hides, measured within a run: some of its steps take turns with overlap and without.

The numbers do not depend on the schedule, so a run may take another for a few steps and compare.
"""

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from sbpflow.training.trainer import Trainer

FIRST_STEP = 11  # by then everything is allocated and connected
BLOCK_STEPS = 5  # in a row with overlap, then without; the first of each is not counted
NUM_BLOCKS = 8
MIN_RUN_STEPS = 200  # so that the slower steps are at most a tenth of a run


Reading = Callable[[], float]  # ms, asked for when the run is over


def _host_clock() -> Callable[[], Reading]:
    """Starts; the function returned stops, and what that returns reads the time between."""
    start = time.perf_counter()

    def stop() -> Reading:
        elapsed = 1e3 * (time.perf_counter() - start)
        return lambda: elapsed

    return stop


def _device_clock() -> Callable[[], Reading]:
    """As ``_host_clock``, by events of the device, which the host runs ahead of."""
    start = torch.cuda.Event(enable_timing=True)
    start.record()

    def stop() -> Reading:
        end = torch.cuda.Event(enable_timing=True)
        end.record()

        def read() -> float:
            end.synchronize()
            return start.elapsed_time(end)

        return read

    return stop


class OverlapWatch:
    """Times steps 11 to 50 of a run of several ranks with overlap, and says what came of it."""

    def __init__(
        self, trainer: Trainer, world_size: int, num_steps: int, device: torch.device
    ) -> None:
        self._trainer = trainer
        self._clock = _device_clock if device.type == "cuda" else _host_clock
        self._overlapped = trainer.schedule
        self._why_not = ""
        if world_size == 1:
            self._why_not = "one rank, nothing to overlap"
        elif trainer.schedule.wait_at_once:
            self._why_not = "off (parallel.overlap)"
        elif num_steps < MIN_RUN_STEPS:
            self._why_not = f"on; measured in runs of {MIN_RUN_STEPS} steps or more"
        self._readings: dict[bool, list[Reading]] = {True: [], False: []}

    @contextmanager
    def step(self, step: int) -> Generator[None]:
        """Around a training step, counted from 1."""
        block, place = divmod(step - FIRST_STEP, BLOCK_STEPS)
        if self._why_not or not 0 <= block < NUM_BLOCKS:
            yield
            return
        on = block % 2 == 0
        self._trainer.schedule = self._overlapped if on else self._overlapped.serial()
        stop = self._clock()
        yield
        reading = stop()
        if place:
            self._readings[on].append(reading)
        if block == NUM_BLOCKS - 1 and place == BLOCK_STEPS - 1:
            self._trainer.schedule = self._overlapped

    def summary(self) -> str:
        """One line for the end of a run."""
        with_it, without = ([read() for read in self._readings[on]] for on in (True, False))
        if not without:
            return self._why_not or "on; the run ended before it was measured"
        on, off = statistics.median(with_it), statistics.median(without)
        return (
            f"hides {off - on:.2f} ms of a step of {off:.2f} ms (medians of {len(with_it)} steps "
            f"with and {len(without)} without)"
        )

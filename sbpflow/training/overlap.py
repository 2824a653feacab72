"""Measures the time that overlap saves, by running some steps without overlap.

Results do not depend on the schedule, so a run can switch to a serial schedule for a few steps.
"""

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from sbpflow.training.trainer import Trainer

# The measurement starts at this step, when memory has been allocated and connections are open.
FIRST_STEP = 11
# Blocks run alternately with and without overlap; the first step of a block is not timed.
BLOCK_STEPS = 5
NUM_BLOCKS = 8
# in runs of at least this many steps, at most a tenth of the steps run without overlap
MIN_RUN_STEPS = 200


Reading = Callable[[], float]  # returns milliseconds; called at the end of the run


def _host_clock() -> Callable[[], Reading]:
    """Start a clock; return a function that stops the clock and returns its reading."""
    start = time.perf_counter()

    def stop() -> Reading:
        elapsed = 1e3 * (time.perf_counter() - start)
        return lambda: elapsed

    return stop


def _device_clock() -> Callable[[], Reading]:
    """Start a clock that records device events, because on CUDA the host runs ahead of the
    device.
    """
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
    """Measures the times of steps 11 to 50, half of them without overlap, in a run with several
    ranks.
    """

    def __init__(
        self, trainer: Trainer, world_size: int, num_steps: int, device: torch.device
    ) -> None:
        self._trainer = trainer
        self._clock = _device_clock if device.type == "cuda" else _host_clock
        self._overlapped = trainer.schedule
        self._why_not = ""
        if world_size == 1:
            self._why_not = "not used: a single rank has no transfers"
        elif trainer.schedule.wait_at_once:
            self._why_not = "off (parallel.overlap)"
        elif num_steps < MIN_RUN_STEPS:
            self._why_not = f"on; measured only in runs of {MIN_RUN_STEPS} steps or more"
        self._readings: dict[bool, list[Reading]] = {True: [], False: []}
        self._num_steps = 0  # steps of this process, which may have resumed a run

    @contextmanager
    def step(self) -> Generator[None]:
        """Wrap the next training step of this process."""
        self._num_steps += 1
        block, place = divmod(self._num_steps - FIRST_STEP, BLOCK_STEPS)
        if self._why_not or not 0 <= block < NUM_BLOCKS:
            yield
            return
        overlaps = block % 2 == 0
        self._trainer.schedule = self._overlapped if overlaps else self._overlapped.serial()
        stop = self._clock()
        yield
        reading = stop()
        if place:
            self._readings[overlaps].append(reading)
        if block == NUM_BLOCKS - 1 and place == BLOCK_STEPS - 1:
            self._trainer.schedule = self._overlapped

    def summary(self) -> str:
        """Return one line for the end summary of a run."""
        on, off = ([read() for read in self._readings[overlaps]] for overlaps in (True, False))
        if not off:
            return self._why_not or "on; the run ended before overlap was measured"
        on_ms, off_ms = statistics.median(on), statistics.median(off)
        text = f"saves {off_ms - on_ms:.2f} ms of a step of {off_ms:.2f} ms"
        if on_ms >= off_ms:
            text = f"saves nothing: {on_ms:.2f} ms per step with overlap, {off_ms:.2f} ms without"
        return f"{text} (medians of {len(on)} steps with overlap and {len(off)} without)"

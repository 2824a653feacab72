"""What overlap hides, measured within a run: some of its steps take turns with overlap and without.

The numbers do not depend on the schedule, so a run may take another for a few steps and compare.
"""

import statistics
import time
from collections.abc import Generator
from contextlib import contextmanager

from sbpflow.training.step_schedule import SERIAL
from sbpflow.training.trainer import Trainer

FIRST_STEP = 11  # by then everything is allocated and connected
BLOCK_STEPS = 5  # in a row with overlap, then without; the first of each is not counted
NUM_BLOCKS = 8
MIN_RUN_STEPS = 200  # so that the slower steps are at most a tenth of a run


class OverlapWatch:
    """Times steps 11 to 50 of a run of several ranks with overlap, and says what came of it."""

    def __init__(self, trainer: Trainer, world_size: int, num_steps: int) -> None:
        self._trainer = trainer
        self._overlapped = trainer.schedule
        self._why_not = ""
        if world_size == 1:
            self._why_not = "one rank, nothing to overlap"
        elif trainer.schedule.wait_at_once:
            self._why_not = "off (parallel.overlap)"
        elif num_steps < MIN_RUN_STEPS:
            self._why_not = f"on; measured in runs of {MIN_RUN_STEPS} steps or more"
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @contextmanager
    def step(self, step: int) -> Generator[None]:
        """Around a training step, counted from 1."""
        block, place = divmod(step - FIRST_STEP, BLOCK_STEPS)
        if self._why_not or not 0 <= block < NUM_BLOCKS:
            yield
            return
        on = block % 2 == 0
        self._trainer.schedule = self._overlapped if on else SERIAL
        start = time.perf_counter()
        yield
        if place:
            self._seconds[on].append(time.perf_counter() - start)
        if block == NUM_BLOCKS - 1 and place == BLOCK_STEPS - 1:
            self._trainer.schedule = self._overlapped

    def summary(self) -> str:
        """One line for the end of a run."""
        with_it, without = self._seconds[True], self._seconds[False]
        if not without:
            return self._why_not or "on; the run ended before it was measured"
        on, off = 1e3 * statistics.median(with_it), 1e3 * statistics.median(without)
        return (
            f"hides {off - on:.2f} ms of a step of {off:.2f} ms (medians of {len(with_it)} steps "
            f"with and {len(without)} without)"
        )

"""Defines time limits that adapt to the load: the busier the machine, the slower the clock."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any


class Deadline:
    """Counts seconds as on an idle machine. Call ``over`` often, because it samples the load.

    The time between two samples is divided by the load per core (the higher of the two samples).
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._sampled, self._load = time.monotonic(), load_per_core()

    def over(self) -> bool:
        now, load = time.monotonic(), load_per_core()
        self._left -= (now - self._sampled) / max(load, self._load)
        self._sampled, self._load = now, load
        return self._left <= 0


def load_per_core() -> float:
    """Return the current number of runnable processes per core, at least 1."""
    try:
        running, _ = Path("/proc/loadavg").read_text().split()[3].split("/")
    except FileNotFoundError:  # not Linux: use wall-clock time
        return 1.0
    return max(1.0, int(running) / (os.cpu_count() or 1))


def outputs_of(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Return the output of a process; after the limit, kill it and raise TimeoutExpired."""
    deadline = Deadline(seconds)
    while True:
        try:
            return process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            if deadline.over():
                process.kill()
                raise


def output_of(process: subprocess.Popen[str], seconds: float) -> str:
    """Like ``outputs_of``, for a process whose stderr is redirected to stdout."""
    return outputs_of(process, seconds)[0]


def run(command: list[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run``, with both outputs captured as text."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        stdout, stderr = outputs_of(process, seconds)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

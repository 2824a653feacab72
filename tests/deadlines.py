"""Limits in seconds that judge the machine: on a busy one, time counts by the share there is."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any


class Deadline:
    """So many seconds of an idle machine from now; ask often, for each answer looks at the load.

    The time since the last look counts by the part of a core that each process could have had.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._seen, self._crowd = time.monotonic(), crowd()

    def over(self) -> bool:
        now, here = time.monotonic(), crowd()
        self._left -= (now - self._seen) / max(here, self._crowd)
        self._seen, self._crowd = now, here
        return self._left <= 0


def crowd() -> float:
    """How many processes want to run on each core at this moment; 1 where a core is free."""
    try:
        running, _ = Path("/proc/loadavg").read_text().split()[3].split("/")
    except FileNotFoundError:  # no Linux: a limit is one of the clock
        return 1.0
    return max(1.0, int(running) / (os.cpu_count() or 1))


def outputs_of(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """What a process wrote till its end; killed and TimeoutExpired if that is past the limit."""
    deadline = Deadline(seconds)
    while True:
        try:
            return process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            if deadline.over():
                process.kill()
                raise


def output_of(process: subprocess.Popen[str], seconds: float) -> str:
    """As ``outputs_of``, where stderr goes the way of stdout."""
    return outputs_of(process, seconds)[0]


def run(command: list[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with both outputs captured as text."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        stdout, stderr = outputs_of(process, seconds)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

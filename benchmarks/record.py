"""Writes the results of a benchmark as JSON lines, with the conditions of the measurement.

``Results("name")`` replaces benchmarks/results/name.jsonl. Every line records the device, versions,
commit, and time, so the provenance of every result is known.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sbpflow.runtime.compute.cpu import cpu_name
from sbpflow.runtime.compute.versions import dist_version

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "triton",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "nvidia-dali-cuda130",
    "torchrec",
    "numpy",
    "numba",
    "uvloop",
)


def provenance() -> dict[str, Any]:
    """Return the device, versions, commit, and time of this process."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else None,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := dist_version(name))},
        "commit": _command("git", "rev-parse", "--short", "HEAD"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class Results:
    """Prints each line and appends it to a file.

    The first added line replaces the old file. With ``benchmark``, it replaces only that
    benchmark's lines, so that a module's benchmarks can run separately. If ``recorded`` is false
    (for example, in a run with other sizes), lines are only printed.
    """

    def __init__(self, name: str, benchmark: str | None = None, *, recorded: bool = True) -> None:
        self.path = RESULTS / f"{name}.jsonl"
        self._benchmark = {} if benchmark is None else {"benchmark": benchmark}
        self._recorded = recorded
        self._provenance = provenance()
        if not recorded:
            sys.stderr.write(f"results are printed, but not recorded in {self.path.name}\n")
            return
        RESULTS.mkdir(exist_ok=True)
        kept = self.path.read_text().splitlines() if benchmark and self.path.exists() else []
        kept = [line for line in kept if json.loads(line)["benchmark"] != benchmark]
        self._lines = kept

    def add(self, **values: object) -> None:
        """Add a measurement; the names of values end in their unit (``_ms``, ``_bytes``)."""
        self._write({**self._benchmark, **values})

    def _write(self, values: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(dict(values)) + "\n")
        sys.stdout.flush()
        if self._recorded:
            self._lines.append(json.dumps({**values, **self._provenance}))
            self.path.write_text("".join(line + "\n" for line in self._lines))


def _command(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0]

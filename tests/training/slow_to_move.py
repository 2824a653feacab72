"""Defines ranks of a training run, of which rank 0 is slow to move the files of an earlier run."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sbpflow.commands.train import main
from sbpflow.runtime.processes.launch import run_main
from sbpflow.training import report


def train() -> int:
    """Train as one rank, with the arguments of ``sbpflow train``."""
    move = report.set_aside

    def late(folder: Path, names: Sequence[str]) -> Path | None:
        time.sleep(1)
        return move(folder, names)

    report.set_aside = late
    return main(sys.argv[1:])


if __name__ == "__main__":
    run_main(train)

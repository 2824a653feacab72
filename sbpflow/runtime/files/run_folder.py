"""The folder of a run: it takes one run at a time, and nothing of an earlier one is overwritten."""

import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from sbpflow.errors import ConfigError
from sbpflow.runtime.files.file_lock import HeldError, hold, sign

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
METRICS_FILE = "metrics.jsonl"
BOARD_FOLDER = "tensorboard"
START_FILE = "start.txt"
PLAN_FILE = (
    "plan.json"  # the plan that a run followed; run/planning/plan_file.py reads and writes it
)
TABLE_PLAN_FILE = "tables.yaml"  # what parallel.plan: auto chose, as parallel.plan takes it
TRACE_FILE = "trace-rank{rank}.json"  # of the steps of train.profile
REPORT_FILE = "report.html"  # written on demand by run/report/page.py
CHECKPOINTS_FOLDER = "checkpoints"
RUN_FILES = (
    METRICS_FILE,
    BOARD_FOLDER,
    PLAN_FILE,
    TABLE_PLAN_FILE,
    START_FILE,
    REPORT_FILE,
    CHECKPOINTS_FOLDER,
)


class RunLock:
    """Rank 0's hold on ``folder`` until ``close`` or the end of the process, however it comes.

    An advisory lock (flock) on run.lock, which stays there and says who took it last. Raises
    ConfigError if another run has it. The other ranks hold nothing.
    """

    def __init__(self, folder: Path, *, rank: int, key: str = "run.dir") -> None:
        self._file = None
        if rank != 0:
            return
        try:
            file = hold(folder / LOCK_FILE)
        except HeldError as error:
            raise ConfigError(
                f"{key}: {folder} is in use by another run{error}; give each run its own, for "
                f"example {_another(key, folder)}, or wait for its end"
            ) from error
        except OSError as error:
            reason = (error.strerror or "cannot be opened").lower()
            raise ConfigError(
                f"{key}: {folder / LOCK_FILE}: {reason}; remove it, or use {_another(key, folder)}"
            ) from error
        sign(file)
        self._file = file

    def close(self) -> None:
        """Let another run have the folder."""
        if self._file is not None:
            self._file.close()


def _another(key: str, folder: Path) -> str:
    """``key=`` with a folder that is not there yet, as one types it."""
    folder, number = folder.resolve(), 2
    name = folder.name or "run"
    while (free := folder.parent / f"{name}-{number}").exists():
        number += 1
    return f"{key}={shlex.quote(str(free))}"


def set_aside(folder: Path, names: Sequence[str]) -> Path | None:
    """Move what an earlier run left under ``names`` to ``previous-N``; None if there is nothing.

    N is one above the highest there, so that the files of every earlier run stay.
    """
    found = [folder / name for name in names if (folder / name).exists()]
    if not found:
        return None
    matches = [re.fullmatch(r"previous-(\d+)", path.name) for path in folder.iterdir()]
    last = max((int(match[1]) for match in matches if match), default=0)
    target = folder / f"previous-{last + 1}"
    target.mkdir()
    for path in found:
        path.replace(target / path.name)
    return target

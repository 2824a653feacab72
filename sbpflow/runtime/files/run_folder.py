"""Manages run folders: only one run uses a folder at a time, and files of earlier runs are kept."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from sbpflow.errors import ConfigError
from sbpflow.runtime.files.file_lock import HeldError, hold, sign

LOCK_FILE = "run.lock"
METRICS_FILE = "metrics.jsonl"
BOARD_FOLDER = "tensorboard"
START_FILE = "start.txt"
PLAN_FILE = "plan.json"  # The run's plan, written by run/planning/plan_file.py.
# The layouts chosen for parallel.plan: auto, in a file that parallel.plan accepts.
TABLE_PLAN_FILE = "tables.yaml"
TRACE_FILE = "trace-rank{rank}.json"  # Trace of the steps that train.profile selects.
REPORT_FILE = "report.html"  # Written by `sbpflow report`.
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
    """Locks ``folder`` on rank 0 until ``close`` or the end of the process; does nothing on other
    ranks. The lock is an advisory lock (flock) on the file run.lock, which names the last holder
    and is never deleted. Raises ConfigError if another run has locked the folder, or if the
    file cannot be opened.
    """

    def __init__(self, folder: Path, *, rank: int, key: str = "run.dir") -> None:
        self._file = None
        if rank != 0:
            return
        try:
            file = hold(folder / LOCK_FILE)
        except HeldError as error:
            raise ConfigError(
                f"{key}: {folder} is in use by another run{error}; use a different folder (for "
                f"example, {_another(key, folder)}), or wait until that run ends"
            ) from error
        except OSError as error:
            reason = (error.strerror or "cannot be opened").lower()
            raise ConfigError(
                f"{key}: the lock file {folder / LOCK_FILE} cannot be opened ({reason}); remove "
                f"it, or use {_another(key, folder)}"
            ) from error
        sign(file)
        self._file = file

    def close(self) -> None:
        """Release the folder."""
        if self._file is not None:
            self._file.close()


def _another(key: str, folder: Path) -> str:
    """Return ``key=FOLDER`` with a folder that does not exist yet, quoted for a shell."""
    folder, number = folder.resolve(), 2
    name = folder.name or "run"
    while (free := folder.parent / f"{name}-{number}").exists():
        number += 1
    return f"{key}={shlex.quote(str(free))}"


def set_aside(folder: Path, names: Sequence[str]) -> Path | None:
    """Move the files ``names`` of an earlier run to ``previous-N``; return that folder, or None if
    none of the files exists. N is the highest existing number plus 1, so the files of all earlier
    runs are kept.
    """
    paths = [folder / name for name in names if (folder / name).exists()]
    if not paths:
        return None
    matches = [re.fullmatch(r"previous-(\d+)", path.name) for path in folder.iterdir()]
    last = max((int(match[1]) for match in matches if match), default=0)
    target = folder / f"previous-{last + 1}"
    target.mkdir()
    for path in paths:
        path.replace(target / path.name)
    return target

"""Locks folders with lock files, so that only one run at a time writes to a folder. The locks are
advisory (flock) and are always released when the process ends. A lock file names the last
process that signed it.
"""

import fcntl
import logging
import os
import platform
from pathlib import Path
from typing import IO

_LOG = logging.getLogger(__name__)
_MAX_CHARACTERS = 200  # maximum length of a holder's name


class HeldError(Exception):
    """Raised if another process has locked the file; ``str`` is " (HOLDER)", or "" if the holder is
    unknown.
    """


def hold(path: Path, *, wait: bool = False) -> IO[str]:
    """Open a file and lock it until it is closed. If another process holds the lock, waits if
    ``wait`` is set, and raises HeldError otherwise. Raises OSError if the file cannot be opened. On
    a file system without locks, logs a warning and returns the unlocked file.
    """
    file = path.open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read(_MAX_CHARACTERS).strip()
        file.close()
        raise HeldError(f" ({holder})" if holder else "") from error
    except OSError as error:
        advice = "processes will not wait for each other" if wait else "do not start a second run"
        _LOG.warning("%s cannot be locked (%s); %s", path, error, advice)
    return file


def sign(file: IO[str]) -> None:
    """Write this process's name to a file that it has locked."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()

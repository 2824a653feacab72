"""Lock files, for folders to which only one run may write at a time.

They use advisory locks (flock), which end with the process in any case. The file names the last
holder.
"""

import fcntl
import logging
import os
import platform
from pathlib import Path
from typing import IO

_LOG = logging.getLogger(__name__)
_MAX_CHARACTERS = 200  # read of the holder's name


class HeldError(Exception):
    """Another process holds the file; its ``str`` is " (holder)", or "" if that is unknown."""


def hold(path: Path, *, wait: bool = False) -> IO[str]:
    """Open and lock a file until it is closed; HeldError, or OSError if it cannot be opened.

    With ``wait`` it waits for the lock instead of raising HeldError. On a file system without locks
    it warns and returns the file unlocked.
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
        advice = "processes will not wait for each other" if wait else "start no second run there"
        _LOG.warning("%s cannot be locked (%s); %s", path, error, advice)
    return file


def sign(file: IO[str]) -> None:
    """Write this process's name to a file that it holds."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()

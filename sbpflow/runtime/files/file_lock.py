"""A file that one process at a time may hold: for folders that two runs must not write into.

An advisory lock (flock), which ends with the process however it comes; the file says who took it
last.
"""

import fcntl
import logging
import os
import platform
from pathlib import Path
from typing import IO

_LOG = logging.getLogger(__name__)
_MOST_CHARACTERS = 200  # read of who holds a lock


class HeldError(Exception):
    """Another process holds the file; ``str`` of it is " (who)", or "" where that is not known."""


def hold(path: Path, *, wait: bool = False) -> IO[str]:
    """The file, held until it is closed. HeldError, or OSError where it cannot be opened.

    With ``wait`` there is no HeldError: who comes second waits. A file system without locks is
    warned of, and the file returned all the same.
    """
    file = path.open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read(_MOST_CHARACTERS).strip()
        file.close()
        raise HeldError(f" ({holder})" if holder else "") from error
    except OSError as error:
        advice = "nobody waits for another" if wait else "start no second run there"
        _LOG.warning("%s cannot be locked (%s); %s", path, error, advice)
    return file


def sign(file: IO[str]) -> None:
    """Write into a file that is held who holds it."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()

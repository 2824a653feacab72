"""Finds the user's cache folder, which holds compiled code and measurements of this machine.

Loading compiled code executes it (numba's and torch.compile's caches are pickles and shared
libraries), so ``code_cache`` checks that no other user can write to its folder. Measurements and
plans are JSON files, which are never executed.
"""

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

from sbpflow.errors import ConfigError
from sbpflow.runtime.processes.environment import env_int

LOG = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


def cache_dir() -> Path:
    """Return the user's cache folder for sbpflow according to the XDG base directory
    specification. Raises ConfigError if the user has no home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():
        return Path(given) / "sbpflow"
    try:
        return Path.home() / ".cache" / "sbpflow"
    except RuntimeError as error:
        raise ConfigError(
            "there is no folder for caches, because HOME is not set and the user with ID "
            f"{os.geteuid()} has no home folder; set XDG_CACHE_HOME to a folder that you own (for "
            "example, $PWD/cache)"
        ) from error


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents for this user only (mode 0700)."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def code_cache(name: str) -> Path | None:
    """Return the folder ``name`` in the user's cache for compiled code; create the folder if
    needed.

    Returns None if the folder cannot be created or written to, or if another user could have
    written to it. In all cases, the first rank of each machine logs one warning.
    """
    try:
        folder = cache_dir() / name
    except ConfigError as error:
        warn_once(f"compiled code is not cached, so code is recompiled at every start: {error}")
        return None
    return _checked(folder)


@functools.cache
def _checked(folder: Path) -> Path | None:
    try:
        # Resolve links before the check, because the owner of a link could change the link
        # afterwards.
        folder = folder.resolve()
        make_private(folder)
        problem = _other_writer(folder)
        if not problem:
            # If numba cannot write to the folder, it uses others, which are not checked, or fails.
            tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # before 3.13, circular links raise RuntimeError
        problem = str(error)
    if not problem:
        return folder
    warn_once(
        f"compiled code is not cached in {folder}, so code is recompiled at every start: "
        f"{problem}; cached code is executed, so nobody else may have write access to the folder: "
        "remove it, or set XDG_CACHE_HOME to a folder that you own"
    )
    return None


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once per process, and only in the first rank of each machine."""
    if env_int("LOCAL_RANK", 0) == 0:
        LOG.warning("%s", text)


def _other_writer(folder: Path) -> str:
    """Describe how another user, except root, could have written to ``folder``, or return "".
    Parent folders are checked too, because a user who can write to a parent can replace ``folder``,
    unless the parent has the sticky bit, like /tmp.
    """
    user = os.geteuid()

    def problem(path: Path, facts: os.stat_result, owners: tuple[int, ...], forbidden: int) -> str:
        if facts.st_uid not in owners:
            return f"{path} belongs to user {facts.st_uid}, but you are user {user}"
        if facts.st_mode & forbidden:
            return f"{path} is writable by other users (mode {stat.S_IMODE(facts.st_mode):04o})"
        return ""

    top = folder.stat()
    if text := problem(folder, top, (user,), _OTHERS_WRITE):
        return text
    for parent in folder.parents:
        facts = parent.stat()
        forbidden = 0 if facts.st_mode & stat.S_ISVTX else _OTHERS_WRITE
        if text := problem(parent, facts, (user, 0), forbidden):
            return text
    # Check existing files too, because making the folder private does not change their owners. If
    # others cannot enter the folder, the modes of its files (0664 with a umask of 002) do not
    # matter.
    forbidden = _OTHERS_WRITE if top.st_mode & _OTHERS_ENTER else 0
    for path in folder.rglob("*"):
        try:
            facts = path.lstat()
        except FileNotFoundError:  # another rank just replaced the file
            continue
        is_link = stat.S_ISLNK(facts.st_mode)
        if text := problem(path, facts, (user,), 0 if is_link else forbidden):
            return text
    return ""

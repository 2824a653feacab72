"""Where things are kept that can be made again: compiled code, measurements of this machine.

Compiled code is loaded by executing it (numba's and torch.compile's caches are pickles and shared
libraries), so its folder must be one that no other user can write to: ``code_cache`` checks that.
Measurements and plans are JSON, which can mislead a choice and run nothing.
"""

import functools
import logging
import os
import stat
from pathlib import Path

from sbpflow.runtime.processes.environment import env_int

LOG = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


def cache_dir() -> Path:
    """The user's cache folder for sbpflow, by the XDG base directory specification."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return base / "sbpflow"


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone (mode 0700)."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def code_cache(name: str) -> Path | None:
    """The folder ``name`` of the user's cache, made if need be, to load compiled code from.

    None where it cannot be made or another user could have put files there; the first rank of a
    machine warns once.
    """
    return _checked(cache_dir() / name)


@functools.cache
def _checked(folder: Path) -> Path | None:
    try:
        # Links are resolved before the check, for whoever owns one could turn it afterwards.
        folder = folder.resolve()
        make_private(folder)
        problem = _who_else_writes(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        problem = str(error)
    if not problem:
        return folder
    if env_int("LOCAL_RANK", 0) == 0:
        LOG.warning(
            "compiled code is not kept in %s, so every start compiles again: %s; code from there "
            "would be executed, so nobody else may write to it: remove that folder, or set "
            "XDG_CACHE_HOME to a folder of your own",
            folder,
            problem,
        )
    return None


def _who_else_writes(folder: Path) -> str:
    """How another user could have put a file into ``folder``; "" if nobody but root could.

    Folders above count, too: who can write to one can put another folder in the place of this one,
    but where the sticky bit keeps that to the owner, as in /tmp.
    """
    me = os.geteuid()
    top = folder.stat()
    if top.st_uid != me:
        return f"{folder} belongs to user {top.st_uid}, you are user {me}"
    if top.st_mode & _OTHERS_WRITE:
        return f"{folder} may be written by others (mode {stat.S_IMODE(top.st_mode):04o})"
    for above in folder.parents:
        facts = above.stat()
        if facts.st_uid not in (me, 0):
            return f"{above} belongs to user {facts.st_uid}, you are user {me}"
        if facts.st_mode & _OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
            return f"{above} may be written by others (mode {stat.S_IMODE(facts.st_mode):04o})"
    # What was put there before: a file keeps its owner. Where others cannot enter the folder, the
    # modes inside do not matter, which a umask of 002 makes 0664.
    loose = _OTHERS_WRITE if top.st_mode & _OTHERS_ENTER else 0
    for path in folder.rglob("*"):
        try:
            facts = path.lstat()
        except FileNotFoundError:  # another rank has just replaced it
            continue
        if facts.st_uid != me:
            return f"{path} belongs to user {facts.st_uid}, you are user {me}"
        if facts.st_mode & loose and not stat.S_ISLNK(facts.st_mode):
            return f"{path} may be written by others (mode {stat.S_IMODE(facts.st_mode):04o})"
    return ""

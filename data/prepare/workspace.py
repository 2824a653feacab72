"""Create, recognize, and remove the work folder with unfinished results next to an output.

A result is complete once its record, a JSON file, has been written. Only folders with this
program's mark are emptied, because any other folder of that name belongs to the user.
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.runtime.files.cache_dir import make_private
from sbpflow.runtime.files.file_lock import HeldError, hold, sign
from sbpflow.runtime.files.json_file import JsonError, read_json
from sbpflow.runtime.files.local_path import local_path

MARK = "plan"
_NEW_MARK = "plan.partial"
_REMOVED = "being removed"  # the content of the mark
_LOG = logging.getLogger(__name__)


class DamagedWork(DataError):
    """Raised if a result in the work folder is missing or damaged, so that the run must start
    over.
    """


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Write the record of a finished result atomically."""
    full = {"content": content, "crc32": _record_crc32(path, content)}
    with replacing(path) as partial:
        partial.write_text(json.dumps(full), encoding="ascii")


def read_record(path: Path, keys: Collection[str]) -> dict[str, Any] | None:
    """Return the record of a result, or None if the record is missing or invalid: the result is
    then unfinished.
    """
    try:
        raw = read_json(path)
    except (FileNotFoundError, JsonError):
        return None
    full = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    content = full.get("content")
    if not isinstance(content, dict) or full.get("crc32") != _record_crc32(path, content):
        return None
    known = cast("dict[str, Any]", content)
    return known if set(known) == set(keys) else None


def require_record(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """Return the record of a result. Raises DamagedWork if the record is missing or invalid."""
    record = read_record(path, keys)
    if record is None:
        raise DamagedWork(f"{path} is missing or damaged")
    return record


def _record_crc32(path: Path, content: Mapping[str, object]) -> int:
    """Return a checksum of the content and the file name, so that a renamed record is invalid."""
    return zlib.crc32(json.dumps([path.name, content], sort_keys=True).encode("ascii"))


def work_folder(output: Path) -> Path:
    """Return ``OUTPUT.work``. Raises ConfigError if the output is a URL or has no folder name."""
    local_path(output)  # rejects a URL that a caller has converted to a Path
    if not output.name or output.name in (".", ".."):
        raise ConfigError(f"--output: {output} has no folder name; use, for example, out/criteo")
    return output.with_name(output.name + ".work")


@contextmanager
def only_run(output: Path, name: object = None) -> Iterator[None]:
    """Hold a lock (flock) on the file ``OUTPUT.work.lock`` while an output is made. ``name`` is the
    URL to which ``output``, a folder in the user's cache folder, is uploaded.

    The file is removed at the end, so a lock is valid only if the path still refers to the locked
    file. Raises ConfigError if another run holds the lock.
    """
    path = work_folder(output).with_name(f"{output.name}.work.lock")
    try:
        if name is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        else:
            make_private(path.parent)
        file = _locked(path, name or output)
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        advice = f"use, for example, out/{output.name}"
        if name is not None:
            advice = "set XDG_CACHE_HOME to a folder that you own (for example, $PWD/cache)"
        raise ConfigError(f"--output: {path} cannot be created ({reason}); {advice}") from error
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path, output: object) -> IO[str]:
    while True:
        try:
            file = hold(path)
        except HeldError as error:
            raise ConfigError(
                f"--output: another run{error} is writing {output}; wait until that run ends, or "
                "choose another output"
            ) from error
        mine = os.fstat(file.fileno())
        if path.exists() and os.path.samestat(mine, path.stat()):
            break
        file.close()  # the previous holder of the lock has removed this file
    sign(file)
    return file


def open_work(output: Path, plan: str) -> tuple[Path, bool]:
    """Return the work folder, and whether it already contains results of the same ``plan``. Raises
    ConfigError if the folder cannot be created or was not made by this program.
    """
    work = work_folder(output)
    if work.is_dir() and set(os.listdir(work)) <= {_NEW_MARK}:
        (work / _NEW_MARK).unlink(missing_ok=True)
        # The folder is empty if a run was killed before it wrote the mark or after it removed the
        # mark.
        work.rmdir()
    if work.exists():
        if not (work / MARK).is_file():
            raise ConfigError(
                f"--output: {work} already exists and was not created by this program; move it, or "
                "choose another output"
            )
        mark = (work / MARK).read_text(encoding="ascii", errors="replace")
        if mark == plan:
            return work, True
        if mark != _REMOVED:
            _LOG.warning("removing %s, the results of a command with other options or files", work)
        discard(work)
    try:
        work.mkdir(parents=True)
        (work / _NEW_MARK).write_text(plan, encoding="ascii")
        os.replace(work / _NEW_MARK, work / MARK)
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        raise ConfigError(
            f"--output: {work} cannot be created ({reason}); use, for example, out/criteo"
        ) from error
    return work, False


def read_mark(work: Path) -> str:
    """Return the plan in the mark of a work folder, or "" if the folder has no mark."""
    try:
        return (work / MARK).read_text(encoding="ascii")
    except OSError:
        return ""


def discard(work: Path) -> None:
    """Remove a work folder.

    The mark is changed first, so that a later run does not resume from a partly removed folder, and
    removed last, so that this program recognizes the folder even after an interrupted removal.
    """
    (work / MARK).write_text(_REMOVED, encoding="ascii")
    for entry in work.iterdir():
        if entry.name == MARK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (work / MARK).unlink()
    work.rmdir()

"""The folder of unfinished results beside an output: made, recognised and removed in one place.

A part is done when its record is there: a JSON file, written last and in one step. Only a folder
that carries our mark is ever emptied; anything else of that name is a user's.
"""

import json
import os
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.file_lock import HeldError, hold, sign
from sbpflow.runtime.files.json_file import JsonError, read_json
from sbpflow.runtime.files.local_path import local_path

MARK = "plan"
_NEW_MARK = "plan.partial"


class DamagedWork(DataError):
    """A part of an earlier run is not what it wrote, and what it was made from is gone."""


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Write the record of a part that is done."""
    partial = path.with_suffix(".partial")
    full = {"content": content, "crc32": _record_crc32(path, content)}
    partial.write_text(json.dumps(full), encoding="ascii")
    os.replace(partial, path)


def read_record(path: Path, keys: Collection[str]) -> dict[str, Any] | None:
    """The record of a part; None where there is none, or it is not what was written under this
    name, so the part is not done.
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


def _record_crc32(path: Path, content: Mapping[str, object]) -> int:
    """Of the values and of the name, so that a record is of no use in another's place."""
    return zlib.crc32(json.dumps([path.name, content], sort_keys=True).encode("ascii"))


def work_folder(output: Path) -> Path:
    """``OUTPUT.work``; ConfigError if the output has no name or no usable parent."""
    local_path(output)  # a program may have made it of a URL
    if not output.name or output.name in (".", ".."):
        raise ConfigError(f"--output: {output} has no name of its own; for example out/criteo")
    return output.with_name(output.name + ".work")


@contextmanager
def only_run(output: Path, part: str = "") -> Iterator[None]:
    """Hold ``OUTPUT.work.lock`` (flock) while an output is made; ConfigError if another run does.

    Further machines hold one each, with ``part`` in its name.

    The file goes at the end, so a lock counts only while the file of that name is the one locked.
    """
    path = work_folder(output).with_name(f"{output.name}.work{part}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(path, output)
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        raise ConfigError(
            f"--output: {path} cannot be made ({reason}); for example --output out/criteo"
        ) from error
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path, output: Path) -> IO[str]:
    while True:
        try:
            file = hold(path)
        except HeldError as error:
            raise ConfigError(
                f"--output: {output} is being made by another run{error}; wait for its end, or "
                "choose another output"
            ) from error
        mine = os.fstat(file.fileno())
        if path.exists() and os.path.samestat(mine, path.stat()):
            break
        file.close()  # its holder has just removed it
    sign(file)
    return file


def open_work(output: Path, plan: str) -> tuple[Path, bool]:
    """The work folder, and whether it already holds results of the same ``plan``.

    Raises ConfigError if something that is not ours has its name, or it cannot be made.
    """
    work = work_folder(output)
    if work.is_dir() and set(os.listdir(work)) <= {_NEW_MARK}:
        (work / _NEW_MARK).unlink(missing_ok=True)
        work.rmdir()  # a run was killed before it had made, or after it had removed, all the rest
    if work.exists():
        if not (work / MARK).is_file():
            raise ConfigError(
                f"--output: {work} is in the way and was not made by this program; move it, or "
                "choose another output"
            )
        if (work / MARK).read_text(encoding="ascii", errors="replace") == plan:
            return work, True
        discard(work)
    try:
        work.mkdir(parents=True)
        (work / _NEW_MARK).write_text(plan, encoding="ascii")
        os.replace(work / _NEW_MARK, work / MARK)
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        raise ConfigError(
            f"--output: {work} cannot be made ({reason}); for example --output out/criteo"
        ) from error
    return work, False


def discard(work: Path) -> None:
    """Remove a work folder: its plan is made void first, so that nothing goes on from half a
    folder, and the mark goes last, so that a removal cut short leaves a folder that is ours.
    """
    (work / MARK).write_text("being removed", encoding="ascii")
    for entry in work.iterdir():
        if entry.name == MARK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (work / MARK).unlink()
    work.rmdir()

"""The folder of unfinished results beside an output: made, recognised and removed in one place.

Only a folder that carries our mark is ever emptied; anything else of that name is a user's.
"""

import os
import shutil
from pathlib import Path

from sbpflow.errors import ConfigError

MARK = "plan"


def work_folder(output: Path) -> Path:
    """``OUTPUT.work``; ConfigError if the output has no name or no usable parent."""
    if not output.name or output.name in (".", ".."):
        raise ConfigError(f"--output: {output} has no name of its own; for example out/criteo")
    return output.with_name(output.name + ".work")


def open_work(output: Path, plan: str) -> tuple[Path, bool]:
    """The work folder, and whether it already holds results of the same ``plan``.

    Raises ConfigError if something that is not ours has its name, or it cannot be made.
    """
    work = work_folder(output)
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
        (work / "plan.partial").write_text(plan, encoding="ascii")
        os.replace(work / "plan.partial", work / MARK)
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

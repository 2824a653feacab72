"""The folder of a run's checkpoints: ``step-N`` each, written beside and renamed when complete.

Says which there are and which is the newest good one, and removes those that are no longer kept.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sbpflow.checkpoint.format import INDEX_FILE, Index, to_json
from sbpflow.checkpoint.read import Checkpoint, open_checkpoint
from sbpflow.checkpoint.write import failed
from sbpflow.errors import CheckpointError

logger = logging.getLogger(__name__)

DATA_FOLDER = "data"  # the set of the run without its rows: what raw rows of tomorrow need
_STEP = re.compile(r"step-(\d+)")
_REPLACED = re.compile(r"\.replaced-(step-\d+)")
_PARTIAL = re.compile(r"\.step-\d+\.partial-[0-9a-f]+|\.removed-step-\d+|\.run\.json\.new")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return folder / f"step-{step}"


def data_folder(checkpoint: Path) -> Path:
    """Beside a checkpoint: the manifest and the vocabularies of the set that its run trained on."""
    return checkpoint.parent / DATA_FOLDER


def partial_folder(folder: Path, step: int, nonce: str) -> Path:
    """Where it is written until it is complete; hexadecimal ``nonce`` tells attempts apart."""
    return folder / f".step-{step}.partial-{nonce}"


def list_checkpoints(folder: str | Path) -> list[Path]:
    """The folders ``step-N`` that are there, complete or damaged, the newest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _step_of(path))]
    return [path for _, path in sorted(found, reverse=True)]


def _step_of(path: Path) -> re.Match[str] | None:
    return _STEP.fullmatch(path.name)


def good_checkpoints(folder: Path, *, run: str | None = None) -> Iterator[Checkpoint]:
    """The checkpoints whose index and files are as they were written, the newest first.

    One that is damaged, of another step than its name says or of another run than ``run`` is named
    in a warning and skipped. Their bytes are checked when they are read.
    """
    for path in list_checkpoints(folder):
        try:
            yield checked(path, run=run)
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)


def checked(path: Path, *, run: str | None = None) -> Checkpoint:
    """The checkpoint at ``path``, which must be of the step in its name, and of ``run``."""
    found = open_checkpoint(path)
    match = _step_of(path)
    if match and int(match[1]) != found.step:
        raise CheckpointError(
            f"{path}: holds the checkpoint of step {found.step}; put the right files there, or "
            f"rename it to step-{found.step}"
        )
    if run is not None and found.run != run:
        raise CheckpointError(
            f"{path}: was written by another run ({found.run}, not {run}); move it elsewhere, and "
            "give it as checkpoint.resume to go on from it"
        )
    return found


def publish(folder: Path, partial: Path, index: Index) -> Path:
    """Write the index of ``partial``, whose files are on disk, and give it its name.

    What a crash leaves is either the whole checkpoint or none. One of this step that is there
    already is replaced.
    """
    target = step_folder(folder, index.step)
    try:
        write_synced(partial / INDEX_FILE, to_json(index))
        sync_folder(partial)
        if target.exists():
            aside = folder / f".replaced-step-{index.step}"  # ``tidy`` knows that it is whole
            target.rename(aside)
            partial.rename(target)
            _remove(aside)
        else:
            partial.rename(target)
        sync_folder(folder)
    except OSError as error:
        raise failed(target, error) from error
    return target


def keep_only(folder: Path, *, newest: int, step: int, and_step: int | None) -> None:
    """Remove all but the ``newest`` ones up to ``step``, and that of ``and_step``."""
    found = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    for path in found[newest:]:
        if step_of(path) != and_step:
            remove_checkpoint(path)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def remove_checkpoint(path: Path) -> None:
    """Take ``path`` away: its name first, so that a crash leaves no half of it under the name."""
    aside = path.with_name(f".removed-{path.name}")
    _remove(aside)
    path.rename(aside)
    _remove(aside)


def tidy(folder: Path) -> list[str]:
    """Take away what a killed run had begun, and give a checkpoint that it was replacing its name
    back; no run may be writing there. Returns the names of what is gone.
    """
    gone: list[str] = []
    for path in sorted(folder.iterdir()):
        if match := _REPLACED.fullmatch(path.name):
            target = folder / match[1]
            if not target.exists():
                path.rename(target)
                continue
        elif not _PARTIAL.fullmatch(path.name):
            continue
        _remove(path)
        gone.append(path.name)
    return gone


def write_synced(path: Path, text: str) -> None:
    """Write ASCII text, and wait until the disk has it."""
    with path.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

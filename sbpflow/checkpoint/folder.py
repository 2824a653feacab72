"""Manages the folder of a run's checkpoints ``step-N``.

A checkpoint has another name until it is complete. This module lists the checkpoints, finds the
newest good one, and removes old ones.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from sbpflow.checkpoint.format import INDEX_FILE, Index, to_json
from sbpflow.checkpoint.read import Checkpoint, open_checkpoint
from sbpflow.checkpoint.write import failed
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.json_file import is_count, is_number

logger = logging.getLogger(__name__)

DATA_FOLDER = "data"  # data set metadata without rows, used to predict raw rows
_STEP = re.compile(r"step-(\d+)")
_REPLACED = re.compile(r"\.replaced-(step-\d+)")
_PARTIAL = re.compile(r"\.step-\d+\.partial-[0-9a-f]+|\.removed-step-\d+|\.run\.json\.new")


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return folder / f"step-{step}"


def data_folder(checkpoint: Path) -> Path:
    """Return the folder next to a checkpoint that has its data's manifest and vocabularies."""
    return checkpoint.parent / DATA_FOLDER


def partial_folder(folder: Path, step: int, nonce: str) -> Path:
    """Return the folder of an incomplete checkpoint; the hexadecimal ``nonce`` makes it unique."""
    return folder / f".step-{step}.partial-{nonce}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders ``step-N`` in ``folder``, complete or damaged, newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(paths, key=step_of, reverse=True)


def good_checkpoints(folder: Path, *, run: str | None = None) -> Iterator[Checkpoint]:
    """Yield the checkpoints with a valid index and complete files, newest first.

    Skip checkpoints that are damaged, belong to a run other than ``run``, or have a step that
    differs from their names; log a warning for each. The checksums are verified only when tensors
    are read.
    """
    for path in list_checkpoints(folder):
        try:
            yield checked(path, run=run)
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)


def checked(path: Path, *, run: str | None = None) -> Checkpoint:
    """Open the checkpoint at ``path``; verify that its step matches its name, and its run."""
    checkpoint = open_checkpoint(path)
    if _STEP.fullmatch(path.name) and step_of(path) != checkpoint.step:
        raise CheckpointError(
            f"{path}: contains the checkpoint of step {checkpoint.step}; put the right files there "
            f"or rename it to step-{checkpoint.step}"
        )
    if run is not None and checkpoint.run != run:
        raise CheckpointError(
            f"{path}: was written by another run ({checkpoint.run}, not {run}); move it elsewhere, "
            "and set checkpoint.resume to its new path to resume from it"
        )
    return checkpoint


def best_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the best validation score at the time of the save: ``metric``, ``value`` and ``step``.

    ``None`` if the run does not keep its best weights.
    """
    loop = checkpoint.documents.get("loop")
    best = loop.get("best") if isinstance(loop, dict) else None
    known = isinstance(best, dict) and is_count(best.get("step")) and is_number(best.get("value"))
    return cast("dict[str, Any]", best) if known else None


def publish(folder: Path, partial: Path, index: Index) -> Path:
    """Write the index into ``partial``, whose files are on disk, and rename it to ``step-N``.

    A crash leaves either a complete checkpoint or none. An existing checkpoint of the same step is
    replaced.
    """
    target = step_folder(folder, index.step)
    try:
        write_synced(partial / INDEX_FILE, to_json(index))
        sync_folder(partial)
        if target.exists():
            aside = folder / f".replaced-step-{index.step}"  # ``tidy`` recognizes it as complete
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
    """Remove checkpoints up to ``step``, but keep the ``newest`` last ones and ``and_step``.

    Also keep what these checkpoints need to be read. Deltas are removed before what they need.
    """
    paths = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    needed = needed_by([*paths[:newest], *(path for path in paths if step_of(path) == and_step)])
    for path in paths[newest:]:
        if path not in needed:
            remove_checkpoint(path)


def needed_by(paths: Iterable[Path]) -> set[Path]:
    """Return the paths of checkpoints and of all checkpoints that their deltas continue.

    Damaged checkpoints need nothing.
    """
    needed = set[Path]()
    for path in paths:
        needed.add(path)
        try:
            checkpoint = open_checkpoint(path).before
        except CheckpointError:
            continue
        while checkpoint is not None:
            needed.add(checkpoint.path)
            checkpoint = checkpoint.before
    return needed


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def remove_checkpoint(path: Path) -> None:
    """Rename, then remove, so that a crash does not leave a partial checkpoint at ``path``."""
    aside = path.with_name(f".removed-{path.name}")
    _remove(aside)
    path.rename(aside)
    _remove(aside)


def tidy(folder: Path) -> list[str]:
    """Clean up after a killed run; return the names of the removed entries.

    Remove incomplete files, and restore a checkpoint whose replacement was interrupted. A run must
    not be writing to the folder.
    """
    removed: list[str] = []
    for path in sorted(folder.iterdir()):
        if match := _REPLACED.fullmatch(path.name):
            target = folder / match[1]
            if not target.exists():
                path.rename(target)
                continue
        elif not _PARTIAL.fullmatch(path.name):
            continue
        _remove(path)
        removed.append(path.name)
    return removed


def write_synced(path: Path, text: str) -> None:
    """Write ASCII text and fsync it."""
    with path.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Call fsync on ``folder`` itself, so that its entries survive a crash."""
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

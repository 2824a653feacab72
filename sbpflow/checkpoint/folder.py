"""Manages the folder of a run's checkpoints ``step-N``.

Until a checkpoint is complete, its folder has another name. In an object store, where nothing can
be renamed, the files have unique names instead, and the checkpoint is complete once its index
exists. This module lists checkpoints, finds the newest good one, and removes old ones.
"""

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from sbpflow.checkpoint.format import INDEX_FILE, Index, to_json
from sbpflow.checkpoint.read import Checkpoint, open_checkpoint
from sbpflow.checkpoint.write import failed
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.json_file import is_count, is_number
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath
from sbpflow.runtime.files.run_folder import LOCK_FILE

logger = logging.getLogger(__name__)

DATA_FOLDER = "data"  # metadata of the data set, without rows; needed to predict raw rows
_STEP = re.compile(r"step-(\d+)")
_REMOTE_PIECES = re.compile(r"(step-\d+)/rank-\d+\..*bin")
_REPLACED = re.compile(r"\.replaced-(step-\d+)")
_PARTIAL = re.compile(r"\.step-\d+\.partial-[0-9a-f]+|\.removed-step-\d+|\.run\.json\.new")


def step_folder(folder: AnyPath, step: int) -> AnyPath:
    """Return the folder of the checkpoint of ``step``."""
    return folder / f"step-{step}"


def data_folder(checkpoint: AnyPath) -> AnyPath:
    """Return the folder next to a checkpoint with the manifest and vocabularies of its data; raise
    CheckpointError if this folder does not exist.
    """
    folder = checkpoint.parent / DATA_FOLDER
    if not folder.is_dir():
        raise CheckpointError(
            f"{checkpoint}: the folder {folder}, which has the vocabularies of the run's set, does "
            "not exist; use the checkpoint in the folder where the run saved it, or copy the "
            f"folder {DATA_FOLDER} from there (a run writes it when it continues from a checkpoint "
            "of `sbpflow checkpoint to-keys`)"
        )
    return folder


def partial_folder(folder: AnyPath, step: int, nonce: str) -> AnyPath:
    """Return the folder of an incomplete checkpoint, which the hexadecimal ``nonce`` makes unique.

    In an object store, this is the final folder, and ``piece_file`` makes the names of its files
    unique.
    """
    if isinstance(folder, RemotePath):
        return step_folder(folder, step)
    return folder / f".step-{step}.partial-{nonce}"


def piece_file(partial: AnyPath, rank: int, nonce: str) -> AnyPath:
    """Return the path of the file for the pieces of a rank."""
    is_remote = isinstance(partial, RemotePath)
    return partial / (f"rank-{rank}.{nonce}.bin" if is_remote else f"rank-{rank}.bin")


def drop_partial(partial: AnyPath, nonce: str) -> None:
    """Remove the files of an incomplete checkpoint, ignoring errors.

    In an object store, the files are kept if the index refers to them: the store may have written
    it although the writer received an error.
    """
    if not isinstance(partial, RemotePath):
        shutil.rmtree(partial, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        sizes, end = partial.sizes(), f".{nonce}.bin"
        if INDEX_FILE in sizes and end.encode() in (partial / INDEX_FILE).read_bytes():
            return
        for name in sizes:
            if name.endswith(end):
                (partial / name).unlink(missing_ok=True)


class Claim:
    """Marks a folder in an object store as used by this launch of a run. Object stores have no
    locks.

    If another launch claims the folder later, ``check`` raises CheckpointError in this launch.
    """

    def __init__(self, folder: RemotePath) -> None:
        self._file = folder / LOCK_FILE
        self._text = uuid.uuid4().hex.encode()
        self._file.write_bytes(self._text)

    def check(self) -> None:
        """Raise CheckpointError if another launch has claimed the folder."""
        try:
            if self._file.read_bytes() == self._text:
                return
        except OSError as error:
            raise failed(self._file, error) from error
        raise CheckpointError(
            f"{self._file.parent}: another run has started saving here, so this run cannot save; "
            "stop one of the runs, or use another checkpoint.dir"
        )


def list_checkpoints(folder: AnyPath) -> list[AnyPath]:
    """Return the folders ``step-N`` in ``folder``, newest first.

    The checkpoints may be damaged. In an object store, a folder without an index is not a
    checkpoint.
    """
    if isinstance(folder, RemotePath):
        steps = (name.removesuffix(f"/{INDEX_FILE}") for name in folder.sizes())
        remote = [folder / name for name in steps if _STEP.fullmatch(name)]
        return sorted(remote, key=step_of, reverse=True)
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(paths, key=step_of, reverse=True)


def good_checkpoints(
    folder: AnyPath, *, run: str | None = None, known: dict[str, Index] | None = None
) -> Iterator[Checkpoint]:
    """Yield the checkpoints with a valid index and complete files, newest first.

    Checkpoints that are damaged, belong to a run other than ``run``, or have a name that does not
    match their step are skipped with a warning. Checksums are verified only when tensors are read.
    ``known`` is that of ``open_checkpoint``.
    """
    for path in list_checkpoints(folder):
        try:
            yield checked(path, run=run, known=known)
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)


def checked(
    path: AnyPath, *, run: str | None = None, known: dict[str, Index] | None = None
) -> Checkpoint:
    """Open the checkpoint at ``path``; check that its step matches its name and, if ``run`` is
    given, that this run wrote it. ``known`` is that of ``open_checkpoint``.
    """
    checkpoint = open_checkpoint(path, known)
    path = checkpoint.path
    if _STEP.fullmatch(path.name) and step_of(path) != checkpoint.step:
        raise CheckpointError(
            f"{path} contains the checkpoint of step {checkpoint.step}; restore the right files, "
            f"or rename the folder to step-{checkpoint.step}"
        )
    if run is not None and checkpoint.run != run:
        raise CheckpointError(
            f"{path} was written by another run ({checkpoint.run}, not {run}); move it elsewhere, "
            "and set checkpoint.resume to its new path to resume from it"
        )
    return checkpoint


def best_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the best validation score at the time of the checkpoint: ``metric``, ``value``,
    ``step``.

    Return ``None`` if the run does not keep its best weights.
    """
    loop = checkpoint.documents.get("loop")
    best = loop.get("best") if isinstance(loop, dict) else None
    known = isinstance(best, dict) and is_count(best.get("step")) and is_number(best.get("value"))
    return cast("dict[str, Any]", best) if known else None


def publish(folder: AnyPath, partial: AnyPath, index: Index) -> AnyPath:
    """Write the index into ``partial``, whose files must be on disk; rename ``partial`` to
    ``step-N``.

    If the process crashes, there is either a complete checkpoint or none. An existing checkpoint of
    the same step is replaced. In an object store, writing the index publishes the checkpoint;
    leftover files are then removed.
    """
    target = step_folder(folder, index.step)
    try:
        if isinstance(folder, Path) and isinstance(partial, Path) and isinstance(target, Path):
            _publish_files(folder, partial, target, to_json(index))
        elif isinstance(target, RemotePath):
            _publish_objects(target, index)
    except OSError as error:
        raise failed(target, error) from error
    return target


def _publish_files(folder: Path, partial: Path, target: Path, text: str) -> None:
    write_synced(partial / INDEX_FILE, text)
    sync_path(partial)
    if target.exists():
        # ``tidy`` restores the old checkpoint if the replacement is interrupted.
        aside = folder / f".replaced-{target.name}"
        target.rename(aside)
        partial.rename(target)
        _try_to_remove(aside)
    else:
        partial.rename(target)
    sync_path(folder)


def _publish_objects(target: RemotePath, index: Index) -> None:
    (target / INDEX_FILE).write_bytes(to_json(index).encode("ascii"))
    # The checkpoint is now complete, so the save has succeeded even if leftover files stay.
    with contextlib.suppress(OSError):
        for name in target.sizes():
            if name != INDEX_FILE and name not in index.files:
                (target / name).unlink(missing_ok=True)


def keep_only(
    folder: AnyPath,
    *,
    newest: int,
    step: int,
    and_step: int | None,
    known: dict[str, Index] | None = None,
) -> None:
    """Remove old checkpoints: of those up to ``step``, keep only the last ``newest`` and the
    checkpoint of ``and_step``.

    Checkpoints that the kept ones depend on are also kept. Deltas are removed before the
    checkpoints that they continue. ``known`` is that of ``open_checkpoint``.
    """
    paths = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    kept = [*paths[:newest], *(path for path in paths if step_of(path) == and_step)]
    needed = needed_by(kept, known)
    for path in paths[newest:]:
        if path not in needed:
            remove_checkpoint(path)
    if known is not None:
        for digest, index in list(known.items()):
            if step_folder(folder, index.step) not in needed:
                del known[digest]


def needed_by(paths: Iterable[AnyPath], known: dict[str, Index] | None = None) -> set[AnyPath]:
    """Return the paths of these checkpoints and of all checkpoints that they depend on.

    A damaged checkpoint counts as depending on no other. ``known`` is that of ``open_checkpoint``.
    """
    needed = set[AnyPath]()
    for path in paths:
        if path in needed:  # the checkpoints that it depends on are in ``needed``, too
            continue
        needed.add(path)
        try:
            checkpoint = open_checkpoint(path, known).before
        except CheckpointError:
            continue
        while checkpoint is not None:
            needed.add(checkpoint.path)
            checkpoint = checkpoint.before
    return needed


def step_of(path: AnyPath) -> int:
    """Return the step given by the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def remove_checkpoint(path: AnyPath) -> None:
    """Remove a checkpoint; after a crash, ``path`` holds either all of it or nothing.

    The folder is renamed first; in an object store, the index is removed first. If the renamed
    folder cannot be removed, this is only logged, and ``tidy`` tries again.
    """
    if isinstance(path, RemotePath):
        path.remove_tree(first=INDEX_FILE)
        return
    aside = path.with_name(f".removed-{path.name}")
    _remove(aside)
    path.rename(aside)
    _try_to_remove(aside)


def tidy(folder: AnyPath) -> list[str]:
    """Clean up after a killed run; return the names of the removed entries.

    Remove incomplete files, and restore a checkpoint whose replacement was interrupted. No run may
    be writing to the folder.
    """
    if isinstance(folder, RemotePath):
        return _tidy_store(folder)
    removed: list[str] = []
    for path in sorted(folder.iterdir()):
        if match := _REPLACED.fullmatch(path.name):
            target = folder / match[1]
            if not target.exists():
                path.rename(target)
                continue
        elif not _PARTIAL.fullmatch(path.name):
            continue
        if _try_to_remove(path):
            removed.append(path.name)
    return removed


def _tidy_store(folder: RemotePath) -> list[str]:
    """Remove the files of checkpoints without an index; return the names of these checkpoints."""
    removed: list[str] = []
    names = folder.sizes()
    for name in sorted(names):
        pieces = _REMOTE_PIECES.fullmatch(name)
        if pieces and f"{pieces[1]}/{INDEX_FILE}" not in names:
            (folder / name).unlink(missing_ok=True)
            removed += [] if pieces[1] in removed else [pieces[1]]
    return removed


def write_synced(path: Path, text: str) -> None:
    """Write ASCII text to a file, and call fsync."""
    with path.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Call fsync on a file or on a folder itself, so that the folder's entries survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _try_to_remove(path: Path) -> bool:
    """Remove a file or folder; return whether this succeeded, and log a warning otherwise."""
    try:
        _remove(path)
    except OSError as error:  # on NFS, for example, while a process reads one of the files
        logger.warning("%s is left until the next start of a run: %s", path, error)
        return False
    return True

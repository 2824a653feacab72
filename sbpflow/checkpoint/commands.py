"""Produces the output of ``sbpflow checkpoint ls | verify | diff | prune | compact``.

The commands read, rewrite, and remove checkpoints without loading them into a job.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from os.path import lexists
from typing import Any, cast

import torch

from sbpflow.checkpoint.folder import (
    best_of,
    checked,
    list_checkpoints,
    needed_by,
    remove_checkpoint,
)
from sbpflow.checkpoint.format import INDEX_FILE, Index
from sbpflow.checkpoint.read import Checkpoint, with_parent
from sbpflow.checkpoint.rewrite import row_blocks, unchanged, write_full
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.runtime.files.file_lock import HeldError, hold
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath
from sbpflow.runtime.files.run_folder import CHECKPOINTS_FOLDER, LOCK_FILE


def checkpoint_folder(path: AnyPath) -> AnyPath:
    """Return the checkpoint folder in ``path`` if ``path`` is a run folder, else ``path``."""
    inside = path / CHECKPOINTS_FOLDER
    return inside if inside.is_dir() and not list_checkpoints(path) else path


def checkpoints_of(path: AnyPath) -> list[AnyPath]:
    """Return [``path``] if it is a checkpoint, else the checkpoints in the folder, newest first.

    The folder may be a run folder. Raise CheckpointError if it has no checkpoints.
    """
    paths = list_checkpoints(checkpoint_folder(path))
    if not paths and (path / INDEX_FILE).exists():
        return [with_parent(path)]
    if not paths:
        raise CheckpointError(
            f"{path} has no checkpoints; give a checkpoint, a folder of checkpoints, or the "
            "folder of a run"
        )
    return paths


def list_text(path: AnyPath) -> str:
    """Return a line per checkpoint, newest first: name, time, size, and number of tensors, or what
    is damaged.
    """
    lines = [f"{'checkpoint':<16} {'written':<16} {'size':>12} {'tensors':>8}  state"]
    known = dict[str, Index]()
    for folder in checkpoints_of(path):
        try:
            checkpoint = checked(folder, known=known)
            written = datetime.fromtimestamp((folder / INDEX_FILE).stat().st_mtime)
        except (CheckpointError, FileNotFoundError) as error:
            if not _is_gone(folder):
                lines.append(f"{folder.name:<16} {'':<16} {'':>12} {'':>8}  DAMAGED: {error}")
            continue
        size, count = f"{checkpoint.num_bytes / 1e6:,.1f} MB", len(checkpoint.tensors)
        lines.append(
            f"{folder.name:<16} {written:%Y-%m-%d %H:%M} {size:>12} {count:>8}  "
            f"{_describe(checkpoint)}"
        )
    return "\n".join(lines)


def _describe(checkpoint: Checkpoint) -> str:
    """Describe a checkpoint's run and number of ranks, and its score if it is the best so far."""
    count = len(checkpoint.index.files)
    text = f"run {checkpoint.run}, written by {count} rank{'s' * (count != 1)}"
    if checkpoint.before is not None and checkpoint.previous is not None:
        text = f"delta {checkpoint.previous.number} after {checkpoint.before.path.name}, {text}"
    best = best_of(checkpoint)
    if best is not None and best["step"] == checkpoint.step:
        text += f", best so far: {best.get('metric')} {best['value']:.6g} on val"
    return text


def verify_text(path: AnyPath) -> tuple[str, bool]:
    """Read every byte of every checkpoint; return a line for each, and whether all are intact.

    A checkpoint that is removed before it has been read does not count as damaged.
    """
    faults, is_whole = dict[AnyPath, str](), True
    lines, known = list[str](), dict[str, Index]()
    for folder in checkpoints_of(path):
        checkpoint, fault = _verified(folder, faults, known)
        if fault and _is_gone(folder):
            lines.append(f"removed {folder}: it was deleted before it could be read (by a run?)")
        elif fault:
            lines.append(f"DAMAGED {fault}")
            is_whole = False
        elif checkpoint is not None:
            lines.append(f"ok      {folder}: all {checkpoint.num_bytes:,} bytes are intact")
    return "\n".join(lines), is_whole


def _is_gone(folder: AnyPath) -> bool:
    """Return whether a listed checkpoint has been removed; in a store, its index is removed first.

    A link whose target is missing, for example on another disk, has not been removed.
    """
    if isinstance(folder, RemotePath):
        return not (folder / INDEX_FILE).exists()
    return not lexists(folder)


def _verified(
    folder: AnyPath, faults: dict[AnyPath, str], known: dict[str, Index]
) -> tuple[Checkpoint | None, str]:
    """Read every byte of a checkpoint and of those it depends on.

    Return the checkpoint (None if it cannot be opened), and what is damaged ("" if nothing is).
    ``faults`` contains the results so far, so that nothing is read twice; ``known`` is that of
    ``open_checkpoint``.
    """
    checkpoint, fault = None, ""
    try:
        checkpoint = checked(folder, known=known)
        if checkpoint.before is not None:
            before = checkpoint.before.path
            fault = faults[before] if before in faults else _verified(before, faults, known)[1]
            fault = (
                f"{folder} is a delta, and a checkpoint that it needs is damaged: {fault}"
                if fault
                else ""
            )
        if folder not in faults and not fault:
            checkpoint.verify()
    except CheckpointError as error:
        fault = str(error)
    fault = faults.setdefault(folder, fault)
    return checkpoint, fault


def diff_text(left_path: AnyPath, right_path: AnyPath) -> tuple[str, bool]:
    """Return the differences between two checkpoints, by tensor and document, and whether they are
    equal.
    """
    left, right = checked(checkpoints_of(left_path)[0]), checked(checkpoints_of(right_path)[0])
    lines = [f"{left.path} (step {left.step}) and {right.path} (step {right.step})"]
    lines += _missing(left, right) + _missing(right, left)
    num_equal = 0
    for name in left.tensors:
        if name in right.tensors:
            difference = _tensor_diff(left, right, name)
            num_equal += not difference
            lines += [f"  {name}: {difference}"] if difference else []
    lines += [f"  {line}" for line in _document_diff("", left.documents, right.documents)]
    differs = len(lines) > 1
    lines.append(f"{num_equal} tensors are equal" if differs else f"equal: {num_equal} tensors")
    return "\n".join(lines), not differs


def _missing(left: Checkpoint, right: Checkpoint) -> list[str]:
    return [f"  {name}: not in {right.path}" for name in left.tensors if name not in right.tensors]


def _tensor_diff(left: Checkpoint, right: Checkpoint, name: str) -> str:
    """Describe how the two tensors differ; return "" if they are equal. NaN counts as equal to
    NaN.
    """
    saved, other = left.saved(name), right.saved(name)
    if (saved.shape, saved.dtype) != (other.shape, other.dtype):
        return f"{saved.dtype} {list(saved.shape)} and {other.dtype} {list(other.shape)}"
    rows = elements = 0
    largest = 0.0
    for part in row_blocks(saved, max(left.chain_length, right.chain_length)):
        a, b = left.tensor(name, rows=part), right.tensor(name, rows=part)
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        if not bool(unequal.any()):
            continue
        flat = unequal.reshape(max(1, part.stop - part.start), -1)
        rows += int(flat.any(1).sum())
        elements += int(flat.sum())
        gap = (a.to(torch.float64) - b.to(torch.float64)).abs()[unequal]
        largest = max(largest, float(gap.nan_to_num(nan=float("inf")).max()))
    if not elements:
        return ""
    return f"{elements:,} elements in {rows:,} rows differ, by at most {largest:.3g}"


def _document_diff(key: str, left: object, right: object) -> Iterator[str]:
    """Yield ``key: value -> value`` for every difference. Long values are shortened."""
    if isinstance(left, dict) and isinstance(right, dict):
        old, new = cast("Mapping[str, Any]", left), cast("Mapping[str, Any]", right)
        for name in dict.fromkeys([*old, *new]):
            yield from _document_diff(
                f"{key}.{name}" if key else name, old.get(name), new.get(name)
            )
    elif left != right:
        texts = [
            text if len(text) < 60 else f"{text[:57]}..." for text in (repr(left), repr(right))
        ]
        yield f"{key}: {texts[0]} -> {texts[1]}"


def prune(path: AnyPath, keep: int, *, dry_run: bool) -> list[str]:
    """Remove all but the best and the ``keep`` newest good checkpoints; return a line for each.

    Checkpoints that a kept delta needs are also kept. Damaged checkpoints are listed, but neither
    removed nor counted. Raise ConfigError if ``keep`` is less than 1, or if a run is saving to the
    local folder.
    """
    if keep < 1:
        raise ConfigError(f"--keep must be 1 or more, got {keep}; for example, --keep 3")
    paths = checkpoints_of(path)
    with held(paths[0].parent):
        return _prune(paths, keep, dry_run=dry_run)


@contextmanager
def held(folder: AnyPath) -> Generator[None]:
    """Lock a local folder of checkpoints; raise ConfigError if a run is saving there."""
    if isinstance(folder, RemotePath):  # stores have no locks; see docs/checkpoints.md
        yield
        return
    try:
        file = hold(folder / LOCK_FILE)
    except HeldError as error:
        raise ConfigError(
            f"{folder}: a run is saving there{error}; wait until it has ended, and repeat this "
            "command (during a run, checkpoint.keep limits the number of checkpoints)"
        ) from error
    with file:
        yield


def _prune(paths: Sequence[AnyPath], keep: int, *, dry_run: bool) -> list[str]:
    kept, lines, best = list[AnyPath](), dict[AnyPath, str](), None
    faults, known = dict[AnyPath, str](), dict[str, Index]()
    for path in paths:
        checkpoint, fault = _verified(path, faults, known)
        if checkpoint is None or fault:
            lines[path] = f"skipped, damaged: {fault}"
            continue
        best = best or best_of(checkpoint)  # the newest checkpoint names the best step of the run
        if len(kept) < keep or (best and best["step"] == checkpoint.step):
            kept.append(path)
    needed = needed_by(kept, known)
    for path in paths:
        if path in kept:
            lines[path] = f"kept {path}"
        elif path in needed:
            lines[path] = f"kept {path}, which a delta needs"
        elif path not in lines:
            if not dry_run:
                remove_checkpoint(path)
            lines[path] = f"{'would remove' if dry_run else 'removed'} {path}"
    return [lines[path] for path in paths]


def compact(path: AnyPath) -> str:
    """Replace the delta at ``path`` with a full checkpoint; return a line that says so.

    If ``path`` is a folder, replace its newest checkpoint. Raise CheckpointError if another delta
    continues the checkpoint.
    """
    paths = checkpoints_of(path)
    delta = checked(paths[0])
    if delta.previous is None:
        return f"{delta.path} is already a full checkpoint"
    folder = delta.path.parent
    with held(folder):
        check_last(delta)
        size = write_full(
            folder, delta.index, {name: unchanged(delta, name) for name in delta.tensors}
        )
    return f"{delta.path} is now a full checkpoint of {size:,} bytes"


def check_last(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the checkpoint must not be changed, because a delta continues it."""
    known = dict[str, Index]()
    for other in list_checkpoints(checkpoint.path.parent):
        if other != checkpoint.path and checkpoint.path in needed_by([other], known):
            raise CheckpointError(
                f"{checkpoint.path} must not be changed, because the delta {other.name} depends "
                f"on it; compact {other} first"
            )

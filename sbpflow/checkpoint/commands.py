"""``sbpflow checkpoint ls | verify | diff | prune``: what checkpoints hold, as text.

Reads and removes; loads nothing into a job.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch

from sbpflow.checkpoint.folder import checked, list_checkpoints, remove_checkpoint
from sbpflow.checkpoint.format import BLOCK_BYTES, INDEX_FILE, SavedTensor
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.runtime.files.file_lock import HeldError, hold
from sbpflow.runtime.files.run_folder import CHECKPOINTS_FOLDER, LOCK_FILE


def checkpoint_folder(path: Path) -> Path:
    """The folder of checkpoints that ``path``, itself one or the folder of a run, has."""
    inside = path / CHECKPOINTS_FOLDER
    return inside if inside.is_dir() and not list_checkpoints(path) else path


def checkpoints_of(path: Path) -> list[Path]:
    """``path`` if it is a checkpoint, else those in it or in a run's folder, the newest first.

    CheckpointError if there is none.
    """
    folder = checkpoint_folder(path)
    found = list_checkpoints(folder)
    if not found and (path / INDEX_FILE).exists():
        return [path]
    if not found:
        raise CheckpointError(
            f"{path}: holds no checkpoint; give a checkpoint, a folder of some, or that of a run"
        )
    return found


def list_text(path: Path) -> str:
    """A line per checkpoint, the newest first: step, bytes, tensors, or what is wrong with it."""
    lines = [f"{'checkpoint':<16} {'written':<16} {'size':>12} {'tensors':>8}  state"]
    for one in checkpoints_of(path):
        try:
            found = checked(one)
        except CheckpointError as error:
            lines.append(f"{one.name:<16} {'':<16} {'':>12} {'':>8}  DAMAGED: {error}")
            continue
        written = datetime.fromtimestamp((one / INDEX_FILE).stat().st_mtime)
        size, count = f"{found.num_bytes / 1e6:,.1f} MB", len(found.tensors)
        lines.append(
            f"{one.name:<16} {written:%Y-%m-%d %H:%M} {size:>12} {count:>8}  {_about(found)}"
        )
    return "\n".join(lines)


def _about(found: Checkpoint) -> str:
    """Run, the ranks that wrote it, and whether it has the best score so far."""
    text = f"run {found.run}, files of {len(found.index.files)} ranks"
    best = found.documents.get("best")
    if isinstance(best, dict) and best.get("step") == found.step:
        text += f", best so far: AUC {best.get('auc')} of val"
    return text


def verify_text(path: Path) -> tuple[str, bool]:
    """Read every byte of every checkpoint: a line each, and whether all are as written."""
    lines: list[str] = []
    good = True
    for one in checkpoints_of(path):
        try:
            found = checked(one)
            found.verify()
            lines.append(f"ok      {one}: {found.num_bytes:,} bytes are as they were written")
        except CheckpointError as error:
            good = False
            lines.append(f"DAMAGED {error}")
    return "\n".join(lines), good


def diff_text(left: Path, right: Path) -> tuple[str, bool]:
    """What two checkpoints do not have in common, tensor by tensor and document by document."""
    one, other = checked(checkpoints_of(left)[0]), checked(checkpoints_of(right)[0])
    lines = [f"{one.path} (step {one.step}) and {other.path} (step {other.step})"]
    lines += _missing(one, other) + _missing(other, one)
    same = 0
    for name in one.tensors:
        if name in other.tensors:
            found = _tensor_diff(one, other, name)
            same += not found
            lines += [f"  {name}: {found}"] if found else []
    lines += [f"  {line}" for line in _document_diff("", one.documents, other.documents)]
    differs = len(lines) > 1
    lines.append(f"{same} tensors are equal" if differs else f"equal: {same} tensors")
    return "\n".join(lines), not differs


def _missing(one: Checkpoint, other: Checkpoint) -> list[str]:
    return [f"  {name}: not in {other.path}" for name in one.tensors if name not in other.tensors]


def _tensor_diff(one: Checkpoint, other: Checkpoint, name: str) -> str:
    left, right = one.saved(name), other.saved(name)
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return f"{left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
    rows = changed = 0
    most = 0.0
    for part in _row_blocks(left):
        a, b = one.tensor(name, rows=part), other.tensor(name, rows=part)
        unequal = (a != b) & ~((a != a) & (b != b))  # NaN is equal to NaN here
        if not bool(unequal.any()):
            continue
        flat = unequal.reshape(max(1, part.stop - part.start), -1)
        rows += int(flat.any(1).sum())
        changed += int(flat.sum())
        gap = (a.to(torch.float64) - b.to(torch.float64)).abs()[unequal]
        most = max(most, float(gap.nan_to_num(nan=float("inf")).max()))
    if not changed:
        return ""
    return f"{changed:,} elements in {rows:,} rows differ, by {most:.3g} at most"


def _row_blocks(saved: SavedTensor) -> Iterator[slice]:
    whole = saved.whole
    step = max(1, BLOCK_BYTES // max(1, whole.num_columns * saved.dtype.itemsize))
    for start in range(0, whole.row_stop, step):
        yield slice(start, min(start + step, whole.row_stop))


def _document_diff(key: str, one: object, other: object) -> Iterator[str]:
    """``key: value -> value`` of all that differs, long values cut."""
    if isinstance(one, dict) and isinstance(other, dict):
        left, right = cast("Mapping[str, Any]", one), cast("Mapping[str, Any]", other)
        for name in [*left, *(name for name in right if name not in left)]:
            below = f"{key}.{name}" if key else name
            yield from _document_diff(below, left.get(name), right.get(name))
    elif one != other:
        texts = [text if len(text) < 60 else f"{text[:57]}..." for text in (repr(one), repr(other))]
        yield f"{key}: {texts[0]} -> {texts[1]}"


def prune(path: Path, keep: int, *, dry_run: bool) -> list[str]:
    """Remove all but the ``keep`` newest good checkpoints; lines that say what became of each.

    A damaged one is named and left for whoever wants to look; it counts for nothing. ConfigError
    for fewer than one, and while a run saves there.
    """
    if keep < 1:
        raise ConfigError(f"--keep: {keep} would leave none; for example --keep 3")
    found = checkpoints_of(path)
    try:
        with hold(found[0].parent / LOCK_FILE):
            return _prune(found, keep, dry_run=dry_run)
    except HeldError as error:
        raise ConfigError(
            f"{found[0].parent}: a run saves there{error}; it keeps as many as checkpoint.keep "
            "says, prune when it has ended"
        ) from error


def _prune(found: Sequence[Path], keep: int, *, dry_run: bool) -> list[str]:
    kept, lines = 0, list[str]()
    for one in found:
        try:
            checked(one).verify()
        except CheckpointError as error:
            lines.append(f"left, damaged: {error}")
            continue
        if kept < keep:
            kept += 1
            lines.append(f"kept {one}")
            continue
        if not dry_run:
            remove_checkpoint(one)
        lines.append(f"{'would remove' if dry_run else 'removed'} {one}")
    return lines

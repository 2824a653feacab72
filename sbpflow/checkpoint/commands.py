"""Produces the text of ``sbpflow checkpoint ls | verify | diff | prune``.

The commands read and remove checkpoints, but do not load them into a job.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch

from sbpflow.checkpoint.folder import best_of, checked, list_checkpoints, remove_checkpoint
from sbpflow.checkpoint.format import BLOCK_BYTES, INDEX_FILE, SavedTensor
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.runtime.files.file_lock import HeldError, hold
from sbpflow.runtime.files.run_folder import CHECKPOINTS_FOLDER, LOCK_FILE


def checkpoint_folder(path: Path) -> Path:
    """Return ``path`` if it is a folder of checkpoints, else the checkpoint folder of that run."""
    inside = path / CHECKPOINTS_FOLDER
    return inside if inside.is_dir() and not list_checkpoints(path) else path


def checkpoints_of(path: Path) -> list[Path]:
    """Return [``path``] if it is a checkpoint, else the checkpoints in the folder, newest first.

    The folder can be a run folder. Raise CheckpointError if the folder has no checkpoints.
    """
    paths = list_checkpoints(checkpoint_folder(path))
    if not paths and (path / INDEX_FILE).exists():
        return [path]
    if not paths:
        raise CheckpointError(
            f"{path}: has no checkpoints; give a checkpoint, a folder of checkpoints, or the "
            "folder of a run"
        )
    return paths


def list_text(path: Path) -> str:
    """Return a line per checkpoint, newest first: step, size, and tensors, or its fault."""
    lines = [f"{'checkpoint':<16} {'written':<16} {'size':>12} {'tensors':>8}  state"]
    for folder in checkpoints_of(path):
        try:
            checkpoint = checked(folder)
        except CheckpointError as error:
            lines.append(f"{folder.name:<16} {'':<16} {'':>12} {'':>8}  DAMAGED: {error}")
            continue
        written = datetime.fromtimestamp((folder / INDEX_FILE).stat().st_mtime)
        size, count = f"{checkpoint.num_bytes / 1e6:,.1f} MB", len(checkpoint.tensors)
        lines.append(
            f"{folder.name:<16} {written:%Y-%m-%d %H:%M} {size:>12} {count:>8}  "
            f"{_describe(checkpoint)}"
        )
    return "\n".join(lines)


def _describe(checkpoint: Checkpoint) -> str:
    """Describe the run, the number of ranks that wrote it, and its score if it is the best."""
    text = f"run {checkpoint.run}, written by {len(checkpoint.index.files)} ranks"
    best = best_of(checkpoint)
    if best is not None and best["step"] == checkpoint.step:
        text += f", best so far: {best.get('metric')} {best['value']:.6g} of val"
    return text


def verify_text(path: Path) -> tuple[str, bool]:
    """Read every byte of every checkpoint; return a line for each and whether all are intact."""
    lines: list[str] = []
    intact = True
    for folder in checkpoints_of(path):
        try:
            checkpoint = checked(folder)
            checkpoint.verify()
            lines.append(f"ok      {folder}: all {checkpoint.num_bytes:,} bytes are intact")
        except CheckpointError as error:
            intact = False
            lines.append(f"DAMAGED {error}")
    return "\n".join(lines), intact


def diff_text(left_path: Path, right_path: Path) -> tuple[str, bool]:
    """Return two checkpoints' differences by tensor and document, and True if there are none."""
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
    """Describe how the tensor differs; return "" if it is equal. NaN equals NaN."""
    saved, other = left.saved(name), right.saved(name)
    if (saved.shape, saved.dtype) != (other.shape, other.dtype):
        return f"{saved.dtype} {list(saved.shape)} and {other.dtype} {list(other.shape)}"
    rows = elements = 0
    largest = 0.0
    for part in _row_blocks(saved):
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
    return f"{elements:,} elements in {rows:,} rows differ, by {largest:.3g} at most"


def _row_blocks(saved: SavedTensor) -> Iterator[slice]:
    whole = saved.whole
    step = max(1, BLOCK_BYTES // max(1, whole.num_columns * saved.dtype.itemsize))
    for start in range(0, whole.row_stop, step):
        yield slice(start, min(start + step, whole.row_stop))


def _document_diff(key: str, left: object, right: object) -> Iterator[str]:
    """Yield ``key: value -> value`` for every difference, with long values shortened."""
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


def prune(path: Path, keep: int, *, dry_run: bool) -> list[str]:
    """Remove all but the best and ``keep`` newest good checkpoints; return a line per checkpoint.

    Damaged checkpoints are listed but neither removed nor counted. Raise ConfigError if ``keep`` is
    less than 1, or if a run is saving to the folder.
    """
    if keep < 1:
        raise ConfigError(f"--keep: must be 1 or more, got {keep}; use, for example, --keep 3")
    paths = checkpoints_of(path)
    try:
        with hold(paths[0].parent / LOCK_FILE):
            return _prune(paths, keep, dry_run=dry_run)
    except HeldError as error:
        raise ConfigError(
            f"{paths[0].parent}: a run is saving there{error} and applies checkpoint.keep itself; "
            "wait until the run has ended, then prune"
        ) from error


def _prune(paths: Sequence[Path], keep: int, *, dry_run: bool) -> list[str]:
    num_kept, lines, best = 0, list[str](), None
    for path in paths:
        try:
            checkpoint = checked(path)
            checkpoint.verify()
        except CheckpointError as error:
            lines.append(f"skipped, damaged: {error}")
            continue
        best = best or best_of(checkpoint)  # the newest checkpoint has the best step of the run
        if num_kept < keep or (best and best["step"] == checkpoint.step):
            num_kept += 1
            lines.append(f"kept {path}")
            continue
        if not dry_run:
            remove_checkpoint(path)
        lines.append(f"{'would remove' if dry_run else 'removed'} {path}")
    return lines

"""Exports the checkpoints of a run as bundles and deltas (``sbpflow.serving.deltas``).

A delta contains the rows that have changed since the last export, according to the run's delta
checkpoints. Without delta checkpoints, after ``num_deltas`` deltas, or if the bundle cannot apply
the changes to a growing field, a new bundle is exported instead. The old bundle is removed when the
new one is complete.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sbpflow.checkpoint.folder import good_checkpoints, sync_path
from sbpflow.checkpoint.format import INDEX_FILE, Index, digest_of
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.errors import CheckpointError, DataError
from sbpflow.run.export.growing_deltas import (
    Entries,
    KeyDelta,
    key_delta,
    served_keys,
    values_of,
    vocabulary_of,
)
from sbpflow.run.export.row_formats import RowFormat, to_stored
from sbpflow.runtime.files.json_file import JsonError, object_of, read_json
from sbpflow.runtime.files.remote_path import AnyPath
from sbpflow.serving import deltas
from sbpflow.serving.deltas import BUNDLE_FILE, DeltaHead, DeltaWriter, bundles_in, delta_folder

WriteBase = Callable[[Checkpoint, Path], object]
logger = logging.getLogger(__name__)
_REMOVED = ".old"  # start of the names of bundles that are being removed
_BLOCK = 1 << 16  # rows converted at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The last export: a bundle, its first ``number`` deltas, and the digest of the last exported
    checkpoint. ``entries`` contains the keys and ids that the deltas changed, by vocabulary, oldest
    first.
    """

    bundle: Path
    content: Mapping[str, Any]
    number: int
    digest: str
    checkpoint: str
    entries: Mapping[str, tuple[Entries, ...]] = field(
        default_factory=dict[str, tuple[Entries, ...]]
    )


def last_export(folder: Path) -> Exported | None:
    """Return the newest bundle of ``folder`` with its last good delta, or None without a bundle."""
    for bundle in reversed(bundles_in(folder)):
        try:
            content = object_of(read_json(bundle / BUNDLE_FILE), str(bundle / BUNDLE_FILE))
        except (JsonError, FileNotFoundError):
            continue
        base = deltas.digest_of(bundle)
        last = Exported(
            bundle=bundle,
            content=content,
            number=0,
            digest=base,
            checkpoint=str(content.get("checkpoint")),
        )
        while (following := _next(last, base)) is not None:
            last = following
        return last
    return None


def _next(last: Exported, base: str) -> Exported | None:
    try:
        delta = deltas.read_delta(last.bundle, last.number + 1, base=base, previous=last.digest)
    except (FileNotFoundError, DataError):
        return None
    entries = dict(last.entries)
    for name, (keys, ids) in delta.vocabulary.items():
        entries[name] = (*entries.get(name, ()), (keys.numpy(), ids.numpy().astype(np.int32)))
    head, digest = delta.head, delta.digest
    return replace(
        last, number=head.number, digest=digest, checkpoint=head.checkpoint, entries=entries
    )


def export_newest(
    run: AnyPath,
    seen: str,
    folder: Path,
    num_deltas: int,
    write_base: WriteBase,
    *,
    is_over: bool = False,
    known: dict[str, Index] | None = None,
) -> tuple[str, str]:
    """Export the newest good checkpoint in ``run`` unless its identity is ``seen``. ``known`` is
    that of ``open_checkpoint``.

    Returns two strings: the identity of the checkpoint, to pass as ``seen`` next time, and a log
    line, which is "" if nothing was exported. If ``is_over``, the run saves no more
    checkpoints, and a missing or damaged checkpoint raises CheckpointError or FileNotFoundError.
    """
    try:
        checkpoint = next(good_checkpoints(run, known=known), None)
        if checkpoint is None:
            if is_over:
                raise CheckpointError(f"{run} contains no usable checkpoint to export")
            return seen, ""
        newest = digest_of(checkpoint.index)
        written = None
        if newest != seen:
            written = export_next(checkpoint, folder, num_deltas, write_base)
    except (CheckpointError, FileNotFoundError) as error:
        if is_over:
            raise
        # The run may have removed this checkpoint in the meantime, but only after saving a newer
        # one.
        logger.warning("%s; the next checkpoint is exported instead", error)
        return seen, ""
    return newest, f"{written} has the weights of step {checkpoint.step}" if written else ""


def export_next(
    checkpoint: Checkpoint,
    folder: Path,
    num_deltas: int,
    write_base: WriteBase,
) -> Path | None:
    """Export a checkpoint to ``folder`` as a delta or a new bundle; return the new folder.

    Returns None if the last export already contains this checkpoint.
    """
    last = last_export(folder)
    if last is not None:
        _remove_all_but(last.bundle)  # of an interrupted export
        if last.checkpoint == digest_of(checkpoint.index):
            return None
        members = _since(checkpoint, last.checkpoint)
        if members and last.number < num_deltas:
            growing = _growing(members, last)
            if growing is not None:
                return _write_delta(checkpoint, members, last, growing)
    target = folder / f"step-{checkpoint.step}"
    new = folder / ".new"
    for path in (new, *folder.glob(f"{_REMOVED}*")):  # of an interrupted export
        shutil.rmtree(path, ignore_errors=True)
    try:
        write_base(checkpoint, new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if target.exists():
        # The run was restarted. Readers use the old bundle under its other name until the new one
        # is in its place, because a folder can only replace an empty folder.
        old = folder / f"{target.name}.old"
        if old.exists():
            _remove(old)
        target.rename(old)
    new.rename(target)
    sync_path(folder)
    _remove_all_but(target)
    return target


def _remove_all_but(kept: Path) -> None:
    for bundle in bundles_in(kept.parent):
        if bundle != kept:
            _remove(bundle)


def _remove(bundle: Path) -> None:
    # Its step may be the highest, so a reader would try to load what is left of it. The new name is
    # unique, because an earlier bundle may still be there.
    removed = Path(tempfile.mkdtemp(prefix=_REMOVED, dir=bundle.parent))
    bundle.rename(removed)
    try:
        shutil.rmtree(removed)
    except OSError as error:  # on NFS, for example, while a server has files of the bundle open
        logger.warning("%s is left until the export of the next bundle: %s", removed, error)


def _since(checkpoint: Checkpoint, digest: str) -> list[Checkpoint]:
    """Return the deltas after the checkpoint with this digest up to ``checkpoint``, oldest first,
    or [] if no chain of deltas connects the two.
    """
    members: list[Checkpoint] = []
    member: Checkpoint | None = checkpoint
    while member is not None and member.previous is not None:
        members.append(member)
        if member.previous.sha256 == digest:
            return members[::-1]
        member = member.before
    return []


def _growing(members: Sequence[Checkpoint], last: Exported) -> dict[str, KeyDelta] | None:
    """Return the changes to growing fields by vocabulary; None if the bundle cannot apply them."""
    fields: dict[str, dict[str, int]] = {}
    for table, facts in last.content["tables"].items():
        if (name := vocabulary_of(members[-1], table)) is not None:
            fields.setdefault(name, {})[table] = facts["rows"]
    result: dict[str, KeyDelta] = {}
    for name, tables in fields.items():
        served = served_keys(last.bundle, last.content, name, last.entries.get(name, ()))
        delta = key_delta(members, tables, served)
        if delta is None:
            return None
        result[name] = delta
    return result


def _write_delta(
    checkpoint: Checkpoint,
    members: Sequence[Checkpoint],
    last: Exported,
    growing: Mapping[str, KeyDelta],
) -> Path:
    base = deltas.digest_of(last.bundle)
    head = DeltaHead(
        number=last.number + 1,
        base=base,
        previous=last.digest,
        run=checkpoint.run,
        step=checkpoint.step,
        time=(checkpoint.path / INDEX_FILE).stat().st_mtime,
        checkpoint=digest_of(checkpoint.index),
    )
    tables = cast("Mapping[str, Mapping[str, Any]]", last.content["tables"])
    keyed = {name: rows for delta in growing.values() for name, rows in delta.rows.items()}
    rows = {
        name: keyed[name][0] if name in keyed else _changed_rows(members, f"tables/{name}")
        for name in tables
    }
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, changed in rows.items():
        saved = checkpoint.saved(f"tables/{name}")
        row_format = _format_of(tables[name], saved.dtype)
        row = torch.zeros(1, *saved.shape[1:], dtype=saved.dtype)
        tensors[f"tables/{name}/rows"] = torch.int64, (len(changed),)
        for suffix, part in to_stored(name, row, [0], row_format).items():
            tensors[f"tables/{name}{suffix}"] = part.dtype, (len(changed), *part.shape[1:])
    weights = {f"dense/{name}" for name in last.content["graph"]["weights"].values()}
    dense = {name: saved for name, saved in checkpoint.tensors.items() if name in weights}
    tensors |= {name: (saved.dtype, saved.shape) for name, saved in dense.items()}
    for name, delta in growing.items():
        tensors |= dict.fromkeys(
            (f"vocabulary/{name}/keys", f"vocabulary/{name}/ids"),
            (torch.int64, (len(delta.entries[0]),)),
        )
    writer = DeltaWriter(last.bundle, head, tensors)
    for name, delta in growing.items():
        keys, ids = map(torch.from_numpy, delta.entries)
        writer.append_keys(name, keys, ids.long())
    for name, changed in rows.items():
        writer.append(f"tables/{name}/rows", changed)
        if name in keyed:
            values = values_of(checkpoint, f"tables/{name}", keyed[name][1])
        else:
            values = _changed_values(members, f"tables/{name}", changed)
        row_format = _format_of(tables[name], values.dtype)
        for start in range(0, len(changed), _BLOCK):
            block = values[start : start + _BLOCK]
            numbers = changed[start : start + _BLOCK].tolist()
            for suffix, part in to_stored(name, block, numbers, row_format).items():
                writer.append(f"tables/{name}{suffix}", part)
    for name in dense:
        writer.append(name, checkpoint.tensor(name))
    writer.close()
    return delta_folder(last.bundle, head.number)


def _format_of(table: Mapping[str, Any], dtype: torch.dtype) -> RowFormat:
    """Return the format in which a bundle stores a table that was trained with ``dtype``."""
    stored = table["stored"]
    if stored == "int8":
        return "int8"
    return "float16" if getattr(torch, stored) != dtype else "as_trained"


def _changed_rows(members: Sequence[Checkpoint], name: str) -> Tensor:
    return torch.cat([member.changed_rows(name) for member in members]).unique()


def _changed_values(members: Sequence[Checkpoint], name: str, changed: Tensor) -> Tensor:
    """Return the latest values of the rows ``changed`` in the deltas ``members`` ([n, dim])."""
    saved = members[-1].saved(name)
    values = torch.empty(len(changed), *saved.shape[1:], dtype=saved.dtype)
    for member in members:
        for rows, columns, part in member.changes(name):
            values[:, columns].index_copy_(0, torch.searchsorted(changed, rows), part)
    return values

"""Computes a growing field's part of a bundle delta: the ids of changed keys, and the changed rows.

In a bundle, the keys of a growing field have ids starting at 2, and a key's id is also its row in
the field's tables. Row 0 is for missing values, and row 1 is shared by all keys without a row. New
keys are assigned the ids of removed keys, or unused ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.checkpoint.keys import key_changes, read_rows
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.serving.cells import MISSING_KEY, NUM_RESERVED_IDS, RARE_ID
from sbpflow.serving.row_store import Tensors

# Keys and ids; the id ``RARE_ID`` means that the key no longer has a row.
Entries = tuple[NDArray[np.int64], NDArray[np.int32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDelta:
    """The changes of a field: ``entries`` for its vocabulary, and rows by table. For each table,
    ``rows`` has the row numbers in the bundle, ascending, and the matching row numbers in the
    checkpoint.
    """

    entries: Entries
    rows: Mapping[str, tuple[Tensor, Tensor]]


def vocabulary_of(checkpoint: Checkpoint, table: str) -> str | None:
    """Return the vocabulary of a growing table, or None for other tables."""
    keys = checkpoint.saved(f"tables/{table}").keys
    return keys and keys.removeprefix("vocabularies/").removesuffix("/keys")


def served_keys(
    bundle: Path, content: Mapping[str, Any], name: str, later: Sequence[Entries]
) -> Entries:
    """Return the keys of vocabulary ``name``, ascending, and their ids after the changes in
    ``later``.
    """
    place, words = (
        content["input"]["vocabularies"][name],
        Tensors(bundle / "vocabulary.safetensors"),
    )
    slots = slice(place["start"], place["start"] + place["capacity"])
    keys, ids = words.array("keys")[slots].view(np.int64), words.array("ids")[slots]
    used = ids != RARE_ID
    return _newest([(keys[used], ids[used]), *later])


def key_delta(
    members: Sequence[Checkpoint], tables: Mapping[str, int], served: Entries
) -> KeyDelta | None:
    """Return the changes that consecutive checkpoints make to the tables of a growing field.

    ``tables`` maps the tables to their numbers of rows in the bundle, and ``served`` contains the
    keys and ids that are in the bundle. Returns None if the bundle cannot apply the changes, for
    example if there are more new keys than free rows.
    """
    newest = members[-1]
    changes = {table: key_changes(members, table) for table in tables}
    key_change, first = next(iter(changes.values())), next(iter(tables))
    name = newest.saved(f"tables/{first}").keys
    if name is None:
        raise TypeError(f"{first} does not grow")
    saved = newest.tensor(name)
    removed = key_change.removed.numpy()
    added = saved[key_change.rows[key_change.is_added] - 1].numpy()
    used = served[1][~np.isin(served[0], removed)]
    every = np.arange(NUM_RESERVED_IDS, min(tables.values()), dtype=np.int32)
    free = np.setdiff1d(every, used, assume_unique=True)  # finding unique values is slow
    if len(free) < len(added):
        return None
    entries = (
        np.concatenate([removed, added]),
        np.concatenate([np.full(len(removed), RARE_ID, np.int32), free[: len(added)]]),
    )
    keys, ids = _newest([served, entries])
    if not np.array_equal(keys, np.sort(saved.numpy())):
        return None  # the bundle's keys differ from those of the checkpoint it was made from
    missing = (saved == MISSING_KEY).nonzero().reshape(-1).tolist()
    reserved = torch.tensor([missing[0] + 1 if missing else 0, 0])
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    for table, change in changes.items():
        own = change.rows[change.rows > 0]
        at = torch.from_numpy(ids[np.searchsorted(keys, saved[own - 1].numpy())]).long()
        at, order = torch.cat([torch.arange(NUM_RESERVED_IDS), at]).sort()
        rows[table] = at, torch.cat([reserved, own])[order]
    return KeyDelta(entries=entries, rows=rows)


def values_of(checkpoint: Checkpoint, name: str, rows: Tensor) -> Tensor:
    """Return these rows of a growing table's tensor ([n, dim]); they may be in any order."""
    saved = checkpoint.saved(name)
    ascending, index = rows.unique(return_inverse=True)
    out = torch.empty(len(ascending), *saved.shape[1:], dtype=saved.dtype)
    read_rows(checkpoint, name, ascending, saved.whole, out)
    return out[index]


def _newest(parts: Sequence[Entries]) -> Entries:
    """Return the last entry of each key, by ascending key, omitting keys without a row."""
    keys, ids = (np.concatenate(each)[::-1] for each in zip(*parts, strict=True))
    keys, first = np.unique(keys, return_index=True)
    ids = ids[first]
    return keys[ids != RARE_ID], ids[ids != RARE_ID].astype(np.int32)

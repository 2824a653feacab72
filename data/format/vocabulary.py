"""The vocabularies of a set: by field, the values with an id, their ids and their counts in train.

They are arrays ``vocabulary/FIELD.{keys,ids,counts}.npy`` in the order of the keys, so that they
can be mapped, searched and merged. A key has 32 or 64 bits: hex and integers are their own keys,
and strings have a 64-bit blake2b. For strings ``checks`` has 32 more bits of the digest, which
distinguish two strings with the same key.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.content_id import digest
from sbpflow.data.format.ids import Counts, IdTable, Keys, NarrowIdTable, WideIdTable
from sbpflow.data.format.manifest import Ancestor, Manifest
from sbpflow.data.format.manifest_check import VOCABULARY_FOLDER
from sbpflow.data.format.npy import check_file, open_array, read_array, type_name, write_array
from sbpflow.data.format.schema import NUM_RESERVED_IDS
from sbpflow.errors import DataError

_BLOCK = 1 << 20
HOW_TO_HAVE_VALUES = (
    "use a set made by `sbpflow prepare`; for generated rows, write them as text "
    "(`sbpflow synth --format tsv --output rows.tsv`) and then prepare that"
)
_TYPES = {"ids": "<i4", "counts": "<i8", "checks": "<u4"}


@dataclass(frozen=True)
class Vocabulary:
    """The values of one field in key order; ids that no value has are spare."""

    name: str
    num_rows: int
    """Rows of the embedding table."""
    keys: Keys
    ids: NDArray[np.int32]
    counts: Counts
    checks: NDArray[np.uint32] | None = None

    def table(self) -> IdTable:
        """Return the lookup table from keys to ids."""
        kind = NarrowIdTable if self.keys.dtype == np.uint32 else WideIdTable
        return kind(self.keys, self.ids, self.counts)

    def spare_ids(self) -> NDArray[np.int32]:
        """Return the ids of the table that no value has yet, in ascending order."""
        is_free = np.ones(self.num_rows, dtype=np.bool_)
        is_free[:NUM_RESERVED_IDS] = False
        is_free[self.ids] = False
        return np.flatnonzero(is_free).astype(np.int32)


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> dict[str, Any]:
    """Write the arrays into the set in ``folder``; returns their entry for the manifest."""
    entry: dict[str, Any] = {
        "values": len(vocabulary.keys),
        "key": type_name(vocabulary.keys.dtype),
    }
    (folder / VOCABULARY_FOLDER).mkdir(exist_ok=True)
    for array in ("keys", "ids", "counts", "checks"):
        values = getattr(vocabulary, array)
        if values is not None:
            file = f"{VOCABULARY_FOLDER}/{vocabulary.name}.{array}.npy"
            entry[array] = {"file": file, "crc32": write_array(folder / file, values)}
    return entry


def open_vocabularies(manifest: Manifest) -> dict[str, Vocabulary]:
    """The vocabularies of the fields that have one; DataError for a set without vocabularies."""
    content = manifest.content.get("vocabulary")
    if content is None:
        raise DataError(
            f"{manifest.path}: this set does not store the values of its ids, so new rows cannot "
            f"get them; {HOW_TO_HAVE_VALUES}"
        )
    return {
        name: read_vocabulary(manifest.path, name, manifest.field(name).rows, entry)
        for name, entry in content["fields"].items()
    }


def read_vocabulary(folder: Path, name: str, num_rows: int, entry: Mapping[str, Any]) -> Vocabulary:
    """A vocabulary of the set in ``folder`` from its manifest entry; large arrays are mapped."""
    arrays = {
        key: open_array(folder / part["file"], dtype, shape)
        for key, part, dtype, shape in array_files(entry)
    }
    return Vocabulary(name, num_rows, **arrays)


def array_files(entry: Mapping[str, Any]) -> list[tuple[str, Any, str, tuple[int]]]:
    """Return the arrays of a manifest entry: key, file entry, dtype and shape."""
    return [
        (key, entry[key], _TYPES.get(key, entry["key"]), (entry["values"],))
        for key in ("keys", "ids", "counts", "checks")
        if key in entry
    ]


def verify_vocabularies(manifest: Manifest) -> None:
    """Compare every array with its checksum, and its ids with the table. Raises DataError."""
    content = manifest.content.get("vocabulary") or {"fields": {}}
    for entry in content["fields"].values():
        for _, part, dtype, shape in array_files(entry):
            check_file(manifest.path / part["file"], dtype, shape, part["crc32"])
    for name, entry in content["fields"].items():
        check_vocabulary(manifest, name, entry)


def blocks(folder: Path, entry: Mapping[str, Any], *arrays: str) -> Iterator[list[NDArray[Any]]]:
    """Yield the named arrays of a vocabulary, one block of values at a time."""
    files = {key: (folder / part["file"], dtype) for key, part, dtype, _ in array_files(entry)}
    total = entry["values"]
    for start in range(0, total, _BLOCK):
        stop = min(start + _BLOCK, total)
        yield [read_array(*files[array], (total,), start, stop) for array in arrays]


def check_vocabulary(manifest: Manifest, name: str, entry: Mapping[str, Any]) -> None:
    """DataError unless keys ascend and each id is a row of the table and assigned only once."""
    num_rows = manifest.field(name).rows
    is_assigned = np.zeros(num_rows, dtype=np.bool_)
    last = -1
    for keys, ids in blocks(manifest.path, entry, "keys", "ids"):
        if int(keys[0]) <= last or not bool((keys[1:] > keys[:-1]).all()):
            raise DataError(
                f"{manifest.path}: the keys of {name} do not ascend; prepare the set again"
            )
        last = int(keys[-1])
        low, high = int(ids.min()), int(ids.max())
        if low < NUM_RESERVED_IDS or high >= num_rows:
            raise DataError(
                f"{manifest.path}: the vocabulary of {name} has ids {low}..{high}, but values "
                f"must have rows {NUM_RESERVED_IDS}..{num_rows - 1}; prepare the set again"
            )
        is_assigned[ids] = True
    if np.count_nonzero(is_assigned) < entry["values"]:
        raise DataError(
            f"{manifest.path}: the vocabulary of {name} gives two values the same id; prepare the "
            "set again"
        )


def vocabulary_content(
    entries: Mapping[str, Any],
    fields: Sequence[Mapping[str, Any]],
    seed: int,
    ancestors: Sequence[Ancestor],
) -> dict[str, Any]:
    """The manifest's ``vocabulary``; its digest covers what decides ids, which excludes counts."""
    facts: list[Any] = [seed]
    for field in fields:
        entry = entries.get(field["name"], {})
        arrays = {key: entry[key]["crc32"] for key in ("keys", "ids") if key in entry}
        settings = {k: field.get(k) for k in ("name", "rows", "hashed", "buckets", "kind")}
        facts.append([settings, arrays, entry.get("values")])
    return {
        "digest": digest(facts),
        "seed": seed,
        "ancestors": [{"digest": a.digest, "rows": dict(a.rows)} for a in ancestors],
        "fields": dict(entries),
    }

"""Read and write the vocabularies of a set: each field's values, ids, and counts in train.

A vocabulary is stored as arrays ``vocabulary/NAME.{keys,ids,counts}.npy`` in key order, so that
they can be mapped, searched and merged. A key has 32 or 64 bits: hex values and integers are their
own keys, and a string's key is a 64-bit blake2b hash. For strings, ``checks`` contains 32 more bits
of the hash, to distinguish strings with the same key. ``prepare --keep-strings`` also stores the
strings as UTF-8 text (``string_bytes``) with the end of each string (``string_ends``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.content_id import digest
from sbpflow.data.format.ids import Counts, IdTable, Keys
from sbpflow.data.format.manifest import Ancestor, Manifest
from sbpflow.data.format.manifest_check import COUNTED_ARRAYS, VOCABULARY_FOLDER
from sbpflow.data.format.npy import check_file, open_array, read_array, type_name, write_array
from sbpflow.errors import DataError
from sbpflow.serving.cells import NUM_RESERVED_IDS

_BLOCK = 1 << 20
HOW_TO_HAVE_VALUES = (
    "use a set made by `sbpflow prepare`; to use generated rows, write them as text "
    "(`sbpflow synth --format tsv --output rows.tsv`), and prepare that file"
)
_TYPES = {
    **{"ids": "<i4", "counts": "<i8", "checks": "<u4"},
    **{"string_ends": "<i8", "string_bytes": "|u1"},
}
_ARRAYS = ("keys", *_TYPES)


@dataclass(frozen=True)
class Vocabulary:
    """The values of one vocabulary in key order. Ids without a value are spare."""

    name: str
    num_rows: int
    """Number of rows of the embedding table"""
    keys: Keys
    ids: NDArray[np.int32]
    counts: Counts
    checks: NDArray[np.uint32] | None = None
    string_ends: NDArray[np.int64] | None = None
    string_bytes: NDArray[np.uint8] | None = None

    def table(self) -> IdTable:
        """Return the lookup table from keys to ids."""
        return IdTable(self.keys, self.ids, self.counts)

    def strings(self, places: slice | NDArray[np.int64] = slice(None)) -> list[str] | None:
        """Return the original strings at ``places`` (positions in key order), or None if strings
        are not stored.
        """
        if self.string_ends is None or self.string_bytes is None:
            return None
        raw, ends = self.string_bytes, self.string_ends
        if isinstance(places, slice):
            places = np.arange(len(ends))[places]
        starts = np.where(places, ends[places - 1], 0).tolist()
        spans = zip(starts, ends[places].tolist(), strict=True)
        return [raw[a:b].tobytes().decode() for a, b in spans]

    def with_strings(self, strings: Sequence[str]) -> "Vocabulary":
        """Return this vocabulary with ``strings``, the original strings in key order."""
        raw = [text.encode() for text in strings]
        ends = np.cumsum([len(text) for text in raw], dtype=np.int64)
        text = np.frombuffer(b"".join(raw), dtype=np.uint8)
        return replace(self, string_ends=ends, string_bytes=text)

    def spare_ids(self) -> NDArray[np.int32]:
        """Return the ids that are not assigned to a value, in ascending order."""
        is_free = np.ones(self.num_rows, dtype=np.bool_)
        is_free[:NUM_RESERVED_IDS] = False
        is_free[self.ids] = False
        return np.flatnonzero(is_free).astype(np.int32)


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> dict[str, Any]:
    """Write the arrays of a vocabulary to the set in ``folder``; return its manifest entry."""
    entry: dict[str, Any] = {
        "values": len(vocabulary.keys),
        "key": type_name(vocabulary.keys.dtype),
    }
    (folder / VOCABULARY_FOLDER).mkdir(exist_ok=True)
    for array in _ARRAYS:
        values = getattr(vocabulary, array)
        if values is not None:
            file = f"{VOCABULARY_FOLDER}/{vocabulary.name}.{array}.npy"
            entry[array] = {"file": file, "crc32": write_array(folder / file, values)}
            if array in COUNTED_ARRAYS:
                entry[array]["count"] = len(values)
    return entry


def open_vocabularies(manifest: Manifest) -> dict[str, Vocabulary]:
    """Return the vocabularies by name. Raises DataError for a set without vocabularies."""
    if manifest.content.get("vocabulary") is None:
        raise DataError(
            f"{manifest.path}: this set does not store the values of its ids, so new values cannot "
            f"be mapped to them; {HOW_TO_HAVE_VALUES}"
        )
    fetch_vocabularies(manifest)
    return {
        name: read_vocabulary(manifest.path, name, manifest.field(name).rows, entry)
        for name, entry in manifest.vocabularies.items()
    }


def vocabulary_files(manifest: Manifest) -> list[str]:
    """Return the names of the vocabulary files."""
    entries = manifest.vocabularies.values()
    return [part["file"] for entry in entries for _, part, *_ in array_files(entry)]


def fetch_vocabularies(manifest: Manifest) -> None:
    """Download all vocabularies of a set at a URL."""
    if manifest.cache is not None:
        manifest.cache.get_all(vocabulary_files(manifest))


def read_vocabulary(folder: Path, name: str, num_rows: int, entry: Mapping[str, Any]) -> Vocabulary:
    """Open a vocabulary of the set in ``folder``, given its manifest ``entry``; large arrays are
    mapped.
    """
    arrays = {
        key: open_array(folder / part["file"], dtype, shape)
        for key, part, dtype, shape in array_files(entry)
    }
    return Vocabulary(name, num_rows, **arrays)


def array_files(entry: Mapping[str, Any]) -> list[tuple[str, Any, str, tuple[int]]]:
    """Return the name, file entry, dtype and shape of each array that a vocabulary's manifest entry
    lists.
    """
    return [
        (key, part, _TYPES.get(key, entry["key"]), (part.get("count", entry["values"]),))
        for key in _ARRAYS
        if (part := entry.get(key))
    ]


def verify_vocabulary(manifest: Manifest, name: str) -> None:
    """Raise DataError if an array of a vocabulary does not match its checksum, or unless the keys
    ascend and the ids are unique rows of the table.
    """
    entry = manifest.vocabularies[name]
    for _, part, dtype, shape in array_files(entry):
        check_file(manifest.file(part["file"]), dtype, shape, part["crc32"])
    num_rows = manifest.field(name).rows
    is_assigned = np.zeros(num_rows, dtype=np.bool_)
    last = -1
    for keys, ids in blocks(manifest.path, entry, "keys", "ids"):
        if int(keys[0]) <= last or not bool((keys[1:] > keys[:-1]).all()):
            raise DataError(
                f"{manifest.path}: the keys of {name} are not ascending; prepare the set again"
            )
        last = int(keys[-1])
        low, high = int(ids.min()), int(ids.max())
        if low < NUM_RESERVED_IDS or high >= num_rows:
            raise DataError(
                f"{manifest.path}: the vocabulary of {name} contains ids {low}..{high}, but value "
                f"ids must be {NUM_RESERVED_IDS}..{num_rows - 1}; prepare the set again"
            )
        is_assigned[ids] = True
    if np.count_nonzero(is_assigned) < entry["values"]:
        raise DataError(
            f"{manifest.path}: the vocabulary of {name} assigns one id to two values; prepare the "
            "set again"
        )


def blocks(folder: Path, entry: Mapping[str, Any], *arrays: str) -> Iterator[list[NDArray[Any]]]:
    """Yield a vocabulary's named arrays in blocks of consecutive values."""
    files = {key: (folder / part["file"], dtype) for key, part, dtype, _ in array_files(entry)}
    total = entry["values"]
    for start in range(0, total, _BLOCK):
        stop = min(start + _BLOCK, total)
        yield [read_array(*files[array], (total,), start, stop) for array in arrays]


def vocabulary_content(
    entries: Mapping[str, Any],
    fields: Sequence[Mapping[str, Any]],
    seed: int,
    ancestors: Sequence[Ancestor],
) -> dict[str, Any]:
    """Return the ``vocabulary`` entry of the manifest, whose digest covers the keys and ids but not
    the counts.
    """
    facts: list[Any] = [seed]
    for field in fields:
        entry = entries.get(field["name"], {})
        arrays = {key: entry[key]["crc32"] for key in ("keys", "ids") if key in entry}
        settings = {k: field.get(k) for k in ("name", "rows", "hashed", "buckets", "kind")}
        settings |= {"keyed": True} if field.get("keyed") else {}
        facts.append([settings, arrays, entry.get("values")])
    return {
        "digest": digest(facts),
        "seed": seed,
        "ancestors": [{"digest": a.digest, "rows": dict(a.rows)} for a in ancestors],
        "fields": dict(entries),
    }

"""Write a set's raw row format and vocabularies for an exported bundle.

``sbpflow.serving.encoder`` reads the format and the vocabularies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.ids import IdTable, capacity_of
from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import DenseColumn
from sbpflow.data.format.vocabulary import open_vocabularies
from sbpflow.data.prepare.content import like_options
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.runtime.files.tensors_file import TensorsFile
from sbpflow.serving.cells import (
    CHECK_BYTES,
    KEY_BYTES,
    NUM_RESERVED_IDS,
    hash_salt,
    hashed_key_ids,
    string_key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedKeys:
    """The keys of the growing fields that share one table; ``read`` returns the keys (int64
    [num_keys]) in the order of their ids, which start at 2.

    A bundle maps these keys to ids in the same way as the values of a vocabulary.
    """

    fields: tuple[str, ...]
    num_keys: int
    read: Callable[[], NDArray[np.int64]]


Growing = Mapping[str, SavedKeys]
_DENSE_KEYS = ("name", "whole", "transform", "clip", "indicator", "decimal")
_LIST_KEYS = ("separator", "most", "beyond", "weights", "inline")
_TEXTS = ("", "red", "05db9164", "K\u00f6ln")


def input_content(manifest: Manifest, growing: Growing) -> dict[str, Any] | None:
    """Return the value of ``input`` in model.json, or None for a set without raw rows."""
    if manifest.content.get("vocabulary") is None or "schema" not in manifest.content:
        return None
    options = like_options(manifest)
    schema, fitted = options.schema, manifest.content["fitted"]
    places, _, _ = _places(manifest, growing)
    counted = {**options.counted, **{name: keys.fields for name, keys in growing.items()}}
    vocabularies = {field: name for name, fields in counted.items() for field in fields}
    return {
        "separator": schema.separator,
        "quote": schema.quote,
        "header": schema.header,
        "missing_values": list(schema.missing_values),
        "columns": _columns(options),
        "dense": [_dense(column, fitted.get(column.name, {})) for column in options.numbers],
        "fields": [_field(entry, options, vocabularies) for entry in manifest.content["fields"]],
        "vocabularies": places,
        "hashes": _hashes(),
    }


def _columns(options: PrepareOptions) -> list[dict[str, Any]]:
    schema = options.schema
    required = {*schema.features, *(c.weights for c in schema.many if c.weights)}
    kinds: dict[str, str] = dict(zip(schema.sparse, schema.kinds, strict=True))
    kinds |= dict.fromkeys(schema.dense, "dense")
    kinds |= dict.fromkeys((schema.label, *schema.labels), "label")
    kinds |= {column.weights: "weights" for column in schema.many if column.weights}
    kinds |= {column.name: "list" for column in schema.many}
    return [
        {"name": name, "kind": kinds.get(name, "ignored"), "required": name in required}
        for name in schema.columns or schema.used
    ]


def _dense(column: DenseColumn, fitted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: getattr(column, key) for key in _DENSE_KEYS},
        "bounds": fitted["bounds"] if column.buckets else None,
        "clips": fitted.get("clips", False),
        "mean": fitted.get("mean"),
        "std": fitted.get("std"),
    }


def _field(
    entry: dict[str, Any], options: PrepareOptions, vocabularies: Mapping[str, str]
) -> dict[str, Any]:
    name, schema = entry["name"], options.schema
    parts = entry.get("parts", ())
    column = schema.list_column(name)
    keyed, vocabulary = entry.get("keyed", False), vocabularies.get(name)
    salt = hash_salt(options.seed, schema.vocabulary(name)) if entry.get("hashed") else None
    if keyed and vocabulary is None:  # no table has rows for these keys, so all keys get id 2
        salt = 0
    return {
        "name": name,
        "rows": NUM_RESERVED_IDS + 1 if keyed else entry["rows"],
        "keyed": keyed,
        "kind": entry.get("kind"),
        "hot": entry.get("hot", 1),
        "ragged": entry.get("ragged", False),
        "weighted": entry.get("weighted", False),
        "parts": list(parts),
        "both_hex": bool(parts) and all(schema.kind(part) == "hex" for part in parts),
        "vocabulary": vocabulary,
        "salt": salt,
        "list": column and {key: getattr(column, key) for key in _LIST_KEYS},
    }


def _hashes() -> dict[str, Any]:
    """Return the definitions of the hashes, with samples for testing other implementations."""
    keys = np.array([0, 7, 2**64 - 1], dtype=np.uint64)
    return {
        "string": {
            "definition": f"blake2b digest of the UTF-8 bytes, {KEY_BYTES + CHECK_BYTES} bytes "
            f"long; the first {KEY_BYTES} bytes are the key and the other bytes are the check, "
            "both little-endian",
            "vectors": [[text, *string_key(text)] for text in _TEXTS],
        },
        "hashed": {
            "definition": "2 + murmur3_finalizer(key xor salt) mod (rows - 2)",
            "vectors": [
                [key, 5, 1000, got]
                for key, got in zip(
                    keys.tolist(), hashed_key_ids(keys, 1000, 5).tolist(), strict=True
                )
            ],
            "columns": ["key", "salt", "rows", "id"],
        },
    }


def _places(manifest: Manifest, growing: Growing) -> tuple[dict[str, Any], int, int]:
    """Return the positions of each vocabulary's slots and checks in the arrays, and the total
    numbers of slots and checks.
    """
    options, known = like_options(manifest), open_vocabularies(manifest)
    vocabularies = {name: known[fields[0]] for name, fields in options.counted.items()}
    tables = [(n, len(v.keys), v.num_rows, v.checks is not None) for n, v in vocabularies.items()]
    for name, keys in growing.items():
        tables.append((name, keys.num_keys, keys.num_keys + NUM_RESERVED_IDS, False))
    places: dict[str, Any] = {}
    slots, checks = 0, 0
    for name, num_values, num_rows, has_checks in tables:
        capacity = capacity_of(num_values)
        places[name] = {
            "start": slots,
            "capacity": capacity,
            "rows": num_rows,
            "values": num_values,
            "checks": checks if has_checks else None,
        }
        slots += capacity
        checks += num_rows if has_checks else 0
    return places, slots, checks


def write_vocabularies(manifest: Manifest, growing: Growing, file: Path) -> None:
    """Write the hash tables of all vocabularies to ``file``, one at a time to save memory."""
    options, known = like_options(manifest), open_vocabularies(manifest)
    places, slots, checks = _places(manifest, growing)
    arrays = {"keys": ("U64", [slots]), "ids": ("I32", [slots]), "checks": ("U32", [checks])}
    with TensorsFile(file, arrays) as out:
        for name, fields in options.counted.items():
            vocabulary, place = known[fields[0]], places[name]
            wide = vocabulary.keys.astype(np.uint64)
            table = IdTable(wide, vocabulary.ids, vocabulary.counts)
            out.put("keys", place["start"], table.keys)
            out.put("ids", place["start"], table.ids)
            if vocabulary.checks is not None:
                by_id: NDArray[np.uint32] = np.zeros(vocabulary.num_rows, dtype=np.uint32)
                by_id[vocabulary.ids] = vocabulary.checks
                out.put("checks", place["checks"], by_id)
        for name, keys in growing.items():
            place = places[name]
            ids = np.arange(NUM_RESERVED_IDS, place["rows"], dtype=np.int32)
            counts = np.broadcast_to(np.int64(0), len(ids))
            table = IdTable(keys.read().view(np.uint64), ids, counts)
            out.put("keys", place["start"], table.keys)
            out.put("ids", place["start"], table.ids)

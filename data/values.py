"""Finds the values of a field and their ids in the vocabulary of a set."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import MISSING_ID, MISSING_KEY, NUM_RESERVED_IDS, Kind
from sbpflow.data.format.vocabulary import (
    HOW_TO_HAVE_VALUES,
    Vocabulary,
    open_vocabularies,
    read_vocabulary,
)
from sbpflow.data.prepare.encode import FieldIds
from sbpflow.data.prepare.keys import key_of, string_keys
from sbpflow.data.prepare.schema_file import schema_from
from sbpflow.errors import ConfigError, unknown_value


def values_and_ids(
    manifest: Manifest, field: str, given: pl.Series | None
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return the values [n] of ``field`` that have their own ids, and the ids int32 [n].

    The values are the distinct values of ``given``, or all values in key order. Strings must be
    given unless the set keeps them, because a vocabulary has only hashes of strings. Raises
    ConfigError.
    """
    stored, kind = _vocabulary(manifest, field)
    if given is None:
        return _decoded(stored, kind, slice(None)), np.asarray(stored.ids)
    values = given.drop_nulls().unique(maintain_order=True)
    keys, checks = key_of(values, kind), None
    if kind == "string":
        keys, checks = string_keys(keys)
        checks = checks.fill_null(0).to_numpy()
    ids = FieldIds(stored.table(), stored).lookup(
        keys.fill_null(0).to_numpy(), keys.is_null().to_numpy(), checks
    )
    has_own = ids >= NUM_RESERVED_IDS
    return values.to_numpy()[has_own], ids[has_own]


def value_blocks(
    manifest: Manifest, field: str, block_rows: int
) -> Iterator[tuple[NDArray[Any], NDArray[np.int32]]]:
    """Yield all values and ids of ``values_and_ids`` in blocks, by ascending id.

    The ids of a block are at most ``block_rows`` apart. The order of the ids needs 8 bytes per
    value; strings are read block by block.
    """
    stored, kind = _vocabulary(manifest, field)
    order = np.argsort(stored.ids)
    starts = range(0, stored.num_rows, block_rows)
    bounds = np.searchsorted(stored.ids, [*starts, stored.num_rows], sorter=order)
    for low, high in pairwise(bounds.tolist()):
        places = order[low:high]
        if len(places):
            yield _decoded(stored, kind, places), np.asarray(stored.ids)[places]


def _vocabulary(manifest: Manifest, field: str) -> tuple[Vocabulary, Kind]:
    if any(each.name == field and each.keyed for each in manifest.fields):
        raise ConfigError(
            f"{field}: the data has keys for this column, whose rows change during training; read "
            "tables/TABLE/keys and tables/TABLE of a checkpoint, or use a table of a field with a "
            "vocabulary"
        )
    vocabulary = manifest.content.get("vocabulary") or {"fields": {}}
    schema = schema_from(manifest.content["schema"]) if vocabulary["fields"] else None
    if schema is None:
        raise ConfigError(
            f"{field}: {manifest.path} does not store the values of its ids; {HOW_TO_HAVE_VALUES}"
        )
    if field not in schema.sparse or field not in vocabulary["fields"]:
        known = [name for name in schema.sparse if name in vocabulary["fields"]]
        raise ConfigError(
            f"{field}: crosses, buckets, and hashed columns have no stored values; use a table of "
            f"one of {', '.join(known) or 'no column here'}"
        )
    entry, rows = vocabulary["fields"][field], manifest.field(field).rows
    return read_vocabulary(manifest.path, field, rows, entry), schema.kind(field)


def _decoded(stored: Vocabulary, kind: Kind, places: slice | NDArray[np.int64]) -> NDArray[Any]:
    if kind == "integer":
        return np.asarray(stored.keys)[places].view(np.int64)
    if kind == "hex":
        return np.array([f"{key:08x}" for key in np.asarray(stored.keys)[places]])
    if kind == "string":
        strings = stored.strings(places)
        if strings is None:
            raise ConfigError(
                f"values: not given, but the vocabulary of {stored.name} has only hashes of its "
                f"strings; pass the strings (for example, values=frame[{stored.name!r}]), or "
                'prepare the set with --keep-strings (in sbpflow.fit, prepare={"keep_strings": '
                "True})"
            )
        return np.array(strings, dtype=object)  # fixed width would pad all strings to the longest
    raise unknown_value("kind", kind, Kind)


def keys_of_values(manifest: Manifest, field: str, values: Sequence[str]) -> torch.Tensor:
    """Return the keys int64 of values of a field with keys, written as in the input.

    The values of crosses, and of generated sets, are keys. Raise ConfigError for another value.
    """
    schema = schema_from(manifest.content["schema"]) if manifest.content.get("schema") else None
    cells = pl.Series(field, [value for value in values if value], dtype=pl.String)
    kind = schema.kind(field) if schema is not None and field in schema.sparse else "integer"
    keys = string_keys(cells)[0] if kind == "string" else key_of(cells, kind)
    if keys.null_count():
        wrong = cells.filter(keys.is_null())[0]
        raise ConfigError(f"field {field}: {wrong!r} is not a value of kind {kind}; correct it")
    return torch.from_numpy(keys.to_numpy().astype(np.uint64).view(np.int64))


def values_with_keys(
    fitted: Manifest, keyed: Manifest
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return ids, keys, and counts in train of the values of all fields with keys in ``keyed``.

    The fields have vocabularies in ``fitted``. The missing value is first, and has no count.
    """
    stored = open_vocabularies(fitted)
    result: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for field in keyed.fields:
        if not field.keyed:
            continue
        if field.name not in stored:
            raise ConfigError(
                f"field {field.name}: {fitted.path} has no vocabulary for it; use a set with keys "
                f"for {', '.join(stored) or 'no field'} only"
            )
        own = stored[field.name]
        arrays = (
            np.append(np.int64(MISSING_ID), own.ids.astype(np.int64)),
            np.append(np.int64(MISSING_KEY), own.keys.astype(np.uint64).view(np.int64)),
            np.append(np.int64(0), np.asarray(own.counts, np.int64)),
        )
        ids, keys, counts = (torch.from_numpy(array) for array in arrays)
        result[field.name] = ids, keys, counts
    return result

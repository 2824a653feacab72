"""Finds the values of a field and their ids in the vocabulary of a set."""

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.ids import Keys
from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import NUM_RESERVED_IDS, Kind
from sbpflow.data.format.vocabulary import HOW_TO_HAVE_VALUES, read_vocabulary
from sbpflow.data.prepare.encode import FieldIds
from sbpflow.data.prepare.keys import key_of, string_keys
from sbpflow.data.prepare.schema_file import schema_from
from sbpflow.errors import ConfigError


def values_and_ids(
    manifest: Manifest, field: str, given: pl.Series | None
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return the values [n] of ``field`` that have their own ids, and the ids int32 [n].

    The values are the distinct values of ``given``, or all values in key order. Strings must be
    given, because a vocabulary has only hashes of strings. Raises ConfigError.
    """
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
    kind, rows = schema.kind(field), manifest.field(field).rows
    stored = read_vocabulary(manifest.path, field, rows, vocabulary["fields"][field])
    if given is None:
        return _decoded(stored.keys, kind, field), np.asarray(stored.ids)
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


def _decoded(keys: Keys, kind: Kind, field: str) -> NDArray[Any]:
    if kind == "integer":
        return np.asarray(keys).view(np.int64)
    if kind == "hex":
        return np.array([f"{key:08x}" for key in keys])
    raise ConfigError(
        f"values: not given, but the vocabulary of {field} has only hashes of its strings; pass "
        f"the strings (for example, values=frame[{field!r}])"
    )

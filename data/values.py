"""Finds the values of a field, and their ids, in the vocabulary of a set."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import NUM_RESERVED_IDS, Kind
from sbpflow.data.format.vocabulary import HOW_TO_HAVE_VALUES, Vocabulary, read_vocabulary
from sbpflow.data.prepare.encode import FieldIds
from sbpflow.data.prepare.keys import key_of, string_keys
from sbpflow.data.prepare.schema_file import schema_from
from sbpflow.errors import ConfigError, unknown_value


def values_and_ids(
    manifest: Manifest, field: str, given: pl.Series | None
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return the values [n] of ``field`` that have their own ids, and the ids int32 [n].

    The values are the distinct values of ``given``, or all values in key order. Strings must be
    given unless the set keeps strings, because a vocabulary contains only their hashes. Raises
    ConfigError otherwise.
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

    The ids of a block are at most ``block_rows`` apart. Sorting the ids needs 8 bytes per value;
    strings are read block by block.
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
            f"{field}: the data contains keys for this column, and the rows of keys change during "
            "training; read tables/TABLE/keys and tables/TABLE of a checkpoint, or use a table of "
            "a field with a vocabulary"
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
        # with a fixed width, all strings would be padded to the longest
        return np.array(strings, dtype=object)
    raise unknown_value("kind", kind, Kind)

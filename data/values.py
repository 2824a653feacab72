"""Find the values of a field and their rows in its tables. The rows are the ids of a vocabulary or,
for a growing field, the rows of the keys in a checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.schema import Kind
from sbpflow.data.format.vocabulary import (
    HOW_TO_HAVE_VALUES,
    Vocabulary,
    fetch_vocabularies,
    open_vocabularies,
    read_vocabulary,
)
from sbpflow.data.prepare.encode import FieldIds
from sbpflow.data.prepare.keys import key_of, string_keys
from sbpflow.data.prepare.schema_file import schema_from
from sbpflow.errors import ConfigError, unknown_value
from sbpflow.serving.cells import MISSING_ID, MISSING_KEY, NUM_RESERVED_IDS


def values_and_rows(
    manifest: Manifest,
    field: str,
    given: pl.Series | None,
    saved_keys: NDArray[np.int64] | None = None,
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return the values [n] of ``field`` that have their own rows, and these rows (int32 [n]).

    The values are the distinct values of ``given``, or all values in the order of the vocabulary.
    Strings must be given unless the set stores them, because a vocabulary has only hashes of
    strings. A growing field needs ``saved_keys`` [n], the keys of rows 1 to n; if all values are
    requested, strings are returned as keys. Raises ConfigError if the values are not known.
    """
    known = _known_values(manifest, field, saved_keys)
    if given is None:
        return known.decoded(slice(None)), known.rows(slice(None))
    values = given.drop_nulls().unique(maintain_order=True)
    keys, checks = key_of(values, known.kind), None
    if known.kind == "string":
        keys, checks = string_keys(keys)
        checks = checks.fill_null(0).to_numpy()
    ids = FieldIds(known.stored.table().lookup, known.stored).lookup(
        keys.fill_null(0).to_numpy(), keys.is_null().to_numpy(), checks
    )
    has_own = ids >= NUM_RESERVED_IDS
    return values.to_numpy()[has_own], ids[has_own] - known.shift


def value_blocks(
    manifest: Manifest,
    field: str,
    block_rows: int,
    saved_keys: NDArray[np.int64] | None = None,
) -> Iterator[tuple[NDArray[Any], NDArray[np.int32]]]:
    """Yield all values and rows of ``values_and_rows`` in blocks, by ascending row.

    A block contains the values in ``block_rows`` consecutive rows. Sorting by row needs 8 bytes per
    value; strings are read block by block.
    """
    known = _known_values(manifest, field, saved_keys)
    stored = known.stored
    order = np.argsort(stored.ids)
    starts = range(0, stored.num_rows, block_rows)
    bounds = np.searchsorted(stored.ids, [*starts, stored.num_rows], sorter=order)
    for low, high in pairwise(bounds.tolist()):
        places = order[low:high]
        if len(places):
            yield known.decoded(places), known.rows(places)


@dataclass(frozen=True, slots=True)
class _KnownValues:
    """The values of a field, and their ids. The row of a value is its id minus ``shift``."""

    stored: Vocabulary
    kind: Kind
    shift: int = 0

    def rows(self, places: slice | NDArray[np.int64]) -> NDArray[np.int32]:
        return np.asarray(self.stored.ids)[places] - self.shift

    def decoded(self, places: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Return the values at ``places`` in their original form.

        The strings of growing fields are not stored, so the keys are returned instead of strings.
        """
        is_hash = self.kind == "string" and self.shift > 0
        return decoded(self.stored, "integer" if is_hash else self.kind, places)


def _known_values(
    manifest: Manifest, field: str, saved_keys: NDArray[np.int64] | None
) -> _KnownValues:
    if saved_keys is not None:
        schema, kind = manifest.content.get("schema"), None
        if schema is not None and field in (sparse := schema_from(schema)).sparse:
            kind = sparse.kind(field)
        places = np.flatnonzero(saved_keys != MISSING_KEY)
        ids = (places + NUM_RESERVED_IDS).astype(np.int32)
        keys, counts = saved_keys[places].view(np.uint64), np.zeros(len(places), np.int64)
        stored = Vocabulary(field, len(saved_keys) + NUM_RESERVED_IDS, keys, ids, counts)
        return _KnownValues(stored, kind or "integer", NUM_RESERVED_IDS - 1)
    entries = manifest.vocabularies
    schema = schema_from(manifest.content["schema"]) if entries else None
    if schema is None:
        raise ConfigError(
            f"{field}: {manifest.path} does not store the values of its ids; {HOW_TO_HAVE_VALUES}"
        )
    if field not in schema.sparse or field not in entries:
        known = [name for name in schema.sparse if name in entries]
        raise ConfigError(
            f"{field}: the values of crosses, buckets, and hashed columns are not stored; the "
            f"columns with stored values are: {', '.join(known) or 'none'}"
        )
    fetch_vocabularies(manifest)
    rows = manifest.field(field).rows
    stored = read_vocabulary(manifest.path, field, rows, entries[field])
    return _KnownValues(stored, schema.kind(field))


def decoded(stored: Vocabulary, kind: Kind, places: slice | NDArray[np.int64]) -> NDArray[Any]:
    """Return the values of a vocabulary at ``places`` in their original form. Raises ConfigError
    for strings that are not stored.
    """
    if kind == "integer":
        return np.asarray(stored.keys)[places].view(np.int64)
    if kind == "hex":
        return np.array([f"{key:08x}" for key in np.asarray(stored.keys)[places]])
    if kind == "string":
        strings = stored.strings(places)
        if strings is None:
            raise ConfigError(
                f"values is not given, but the vocabulary of {stored.name} stores only hashes of "
                "its strings; in Python, pass the strings (for example, "
                f"values=frame[{stored.name!r}]), or prepare the set with --keep-strings (in "
                f'sbpflow.fit, prepare={{"keep_strings": True}})'
            )
        # a fixed-width dtype would pad all strings to the length of the longest
        return np.array(strings, dtype=object)
    raise unknown_value("kind", kind, Kind)


def keys_of_values(manifest: Manifest, field: str, values: Sequence[str]) -> torch.Tensor:
    """Return the int64 keys of values that are written as in the input. Values of crosses and of
    generated sets are written as keys. Raises ConfigError for an invalid value, and for the key of
    missing values.
    """
    schema = schema_from(manifest.content["schema"]) if manifest.content.get("schema") else None
    lines = [line for line, value in enumerate(values, 1) if value]
    cells = pl.Series(field, [values[line - 1] for line in lines], dtype=pl.String)
    kind = schema.kind(field) if schema is not None and field in schema.sparse else "integer"
    keys = string_keys(cells)[0] if kind == "string" else key_of(cells, kind)
    if keys.null_count():
        wrong = keys.is_null().arg_max() or 0
        example = "68fd1e64" if kind == "hex" else "-3"
        raise ConfigError(
            f"field {field}, line {lines[wrong]}: {cells[wrong]!r} is not a value of kind {kind}; "
            f"correct it (for example, {example})"
        )
    bits = keys.to_numpy().astype(np.uint64).view(np.int64)
    if (missing := bits == MISSING_KEY).any():
        wrong = int(missing.argmax())
        raise ConfigError(
            f"field {field}, line {lines[wrong]}: {cells[wrong]!r} has the key of missing values, "
            "whose row cannot be erased; remove the line"
        )
    return torch.from_numpy(bits)


def values_with_keys(
    fitted: Manifest, keyed: Manifest
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each field that has keys in the set ``keyed``, return the ids, keys, and train counts of
    all values.

    The fields must have vocabularies in the set ``fitted``. The missing value comes first, without
    a count.
    """
    stored = open_vocabularies(fitted)
    result: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for field in keyed.fields:
        if not field.keyed:
            continue
        if field.name not in stored:
            raise ConfigError(
                f"field {field.name}: {fitted.path} has no vocabulary for this field; use a set "
                + (f"in which only {', '.join(stored)} have keys" if stored else "without keys")
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

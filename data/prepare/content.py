"""Build the manifest of a new set, and take options from the manifest of an existing set."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sbpflow import __version__
from sbpflow.data.format.manifest import SPLITS, Manifest
from sbpflow.data.format.vocabulary import HOW_TO_HAVE_VALUES
from sbpflow.data.prepare.bad_rows import StagedPiece, bad_counts
from sbpflow.data.prepare.encode import Record, length_type
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.pieces import columns_of
from sbpflow.data.prepare.schema_file import schema_from
from sbpflow.data.prepare.source import Input
from sbpflow.errors import ConfigError


def manifest_content(
    options: PrepareOptions,
    inputs: Sequence[Input],
    staged: Sequence[StagedPiece],
    records: Sequence[Record],
    fields: Sequence[dict[str, Any]],
    fitted: Mapping[str, Any],
    like: Manifest | None,
) -> dict[str, Any]:
    """Return the content of the manifest, without the vocabularies and statistics."""
    schema = options.schema
    columns = columns_of(inputs[0], schema, options.is_encode)
    content = {
        "source": "encode" if options.is_encode else "prepare",
        "inputs": [{"name": s.path.name, "bytes": s.num_bytes} for s in inputs],
        "schema": asdict(schema),
        "options": {
            "transform": options.transform,
            "crosses": [list(pair) for pair in options.crosses],
            "hash_sizes": dict(options.hash_sizes),
            "spare": options.spare,
            **({"keys": list(options.keys)} if options.keys else {}),
        },
        "dense": _dense(options, records),
        "fields": [_with_rare(entry, records, staged) for entry in fields],
        "fitted": dict(fitted),
        "splits": {k: [r["shards"][k] for r in records if k in r["shards"]] for k in SPLITS},
        "split": asdict(options.split),
        "min_count": options.min_count,
        "seed": options.seed,
        "lines": sum(piece.num_lines for piece in staged),
        "bad_lines": bad_counts(staged),
        "versions": {"sbpflow": __version__, "polars": pl.__version__, "numpy": np.__version__},
    }
    if side := _side(options, columns):
        content["side"] = side
    if any(not column.fixed for column in schema.many):
        content["length_type"] = length_type(options)
    if schema.label not in columns:
        content["labelled"] = False
    if like is not None:
        content["like"] = like.fingerprint
    return content


def _dense(options: PrepareOptions, records: Sequence[Record]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for column in options.numbers:
        if column.buckets:
            continue
        clamped = sum(record["clamped"].get(column.name, 0) for record in records)
        entry = {"name": column.name, "transform": column.transform, "clamped": clamped}
        entries.append({**entry, **_range(column.name, records)})
        if column.indicator:
            name = f"{column.name}_missing"
            entries.append({"name": name, "transform": "missing", **_range(name, records)})
    return entries


def _range(name: str, records: Sequence[Record]) -> dict[str, list[float]]:
    ranges = [record["ranges"][name] for record in records if name in record["ranges"]]
    if not ranges:
        return {}
    return {"range": [min(low for low, _ in ranges), max(high for _, high in ranges)]}


def _with_rare(
    entry: dict[str, Any], records: Sequence[Record], staged: Sequence[StagedPiece]
) -> dict[str, Any]:
    """Return the field's entry with counts over all splits, where they apply: lookups of the rare
    id, values of buckets that were clipped, and dropped values.
    """
    if entry["name"] in records[0]["rare"] and not entry.get("hashed"):
        entry = {**entry, "rare": sum(record["rare"][entry["name"]] for record in records)}
    if clamped := sum(record["clamped"].get(entry["name"], 0) for record in records):
        entry = {**entry, "clamped": clamped}
    cut = sum(piece.cut.get(entry["name"], 0) for piece in staged)
    return {**entry, "cut": cut} if cut else entry


def _side(options: PrepareOptions, columns: Sequence[str]) -> list[dict[str, str]]:
    schema = options.schema
    side: list[tuple[str, str, str]] = [
        (name, "label", "float32") for name in schema.labels if name in columns
    ]
    if schema.weight:
        side.append((schema.weight, "weight", "float32"))
    if schema.group:
        side.append((schema.group[0], "group", "uint64"))
    if schema.time:
        side.append((schema.time[0], "time", "int64"))
    if schema.row_key:
        kind = {"integer": "int64", "string": "string"}[schema.row_key[1]]
        side.append((schema.row_key[0], "row_key", kind))
    return [{"name": name, "role": role, "type": kind} for name, role, kind in side]


def like_options(manifest: Manifest) -> PrepareOptions:
    """Return the options of the set ``manifest`` that affect ids and values."""
    return options_like(manifest, PrepareOptions(inputs=(), output=Path()))


def options_like(manifest: Manifest, options: PrepareOptions) -> PrepareOptions:
    """Return ``options`` with all options that affect ids and values taken from ``manifest``."""
    content = manifest.content
    if content.get("vocabulary") is None or "schema" not in content:
        raise ConfigError(
            f"--like: the set {manifest.origin} does not store the values of its ids, so new "
            f"values cannot be mapped to them; {HOW_TO_HAVE_VALUES}"
        )
    saved = content["options"]
    return replace(
        options,
        like=manifest.origin,
        schema=schema_from(content["schema"]),
        crosses=tuple((left, right) for left, right in saved["crosses"]),
        hash_sizes=tuple(saved["hash_sizes"].items()),
        keys=tuple(saved.get("keys", ())),
        transform=saved["transform"],
        min_count=content["min_count"],
        seed=content["seed"],
        keep_strings=any("string_ends" in entry for entry in manifest.vocabularies.values()),
    )

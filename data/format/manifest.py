"""Read and write the manifest of a prepared set, which describes the set's shards.

A prepared set is a folder with ``manifest.json`` and ``.npy`` shards of int32 words [rows, 1 +
dense + fixed ids]: the label and the dense values as float32 bit patterns, and the ids of fields
with a fixed number of ids. Keys, lists and non-feature columns (``data.format.parts``) are stored
in files next to each shard, and the files in ``vocabulary/`` map values to ids. The fingerprint is
a digest of the whole manifest, including the checksums of all files, so it identifies one set of
files. The content ID is a digest of the data that does not depend on inputs, versions or shards.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sbpflow.config.data_folder import HOW_TO_MAKE_DATA, data_folder_problem
from sbpflow.data.format.content_id import digest, rows_crc32
from sbpflow.data.format.manifest_check import SPLITS, check_columns, check_files
from sbpflow.data.format.parts import (
    LENGTH_TYPES,
    PLACES_IN_SHARD,
    SIDE_TYPES,
    PartType,
    Role,
    SideColumn,
)
from sbpflow.data.format.rebuild import how_to_rebuild
from sbpflow.data.format.schema import Field
from sbpflow.errors import DataError
from sbpflow.runtime.files.json_file import JsonError, read_json
from sbpflow.runtime.files.local_path import PathError
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath, any_path

if TYPE_CHECKING:
    from sbpflow.config.data_cache import DataCache
    from sbpflow.data.format.shard_cache import ShardCache

FORMAT = "sbpflow-prepared"
VERSION = 2
KEYED_VERSION = 3
"""Format version of sets with keys, which programs for version 2 cannot read"""
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A file next to a shard. ``count`` is the length of its array, if the number of rows does not
    determine the length.
    """

    file: str
    crc32: int
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of a split, stored as a file of words and the files of optional parts.

    ``crc32`` is the checksum of the whole file of words.
    """

    file: str
    rows: int
    crc32: int
    parts: Mapping[str, ShardPart] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bayes:
    """The best possible AUC and logloss for each split of a generated set.

    ``auc`` and ``logloss`` are those of ``split``, the first of test, val, and train that has rows.
    """

    split: str
    auc: float
    logloss: float
    by_split: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An earlier vocabulary whose ids this set keeps: its digest, and its number of rows per
    field.
    """

    digest: str
    rows: Mapping[str, int]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a prepared set. ``content`` is the checked JSON; properties give access to
    it.
    """

    path: Path
    content: Mapping[str, Any]
    cache: "ShardCache | None" = dataclasses.field(default=None, compare=False, repr=False)
    """Downloads the files of a set at a URL to ``path``, a cache folder on this host; None for a
    local set
    """

    @property
    def origin(self) -> AnyPath:
        """Return the folder or the URL of the set."""
        return self.path if self.cache is None else self.cache.url

    def file(self, name: str) -> Path:
        """Return the path of a file of the set, after downloading it if necessary."""
        if self.cache is not None:
            self.cache.get(self.path / name)
        return self.path / name

    @cached_property
    def dense(self) -> tuple[str, ...]:
        """Return the dense column names in the order of ``Batch.dense``."""
        return tuple(entry["name"] for entry in self.content["dense"])

    @property
    def dense_ranges(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and largest value of each dense column that is not empty."""
        entries = (entry for entry in self.content["dense"] if "range" in entry)
        return {entry["name"]: (entry["range"][0], entry["range"][1]) for entry in entries}

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Return the fields, each of which has an embedding table: sparse, then bucketed dense,
        then crosses.
        """
        return tuple(
            Field(
                entry["name"],
                entry.get("rows", 0),
                entry.get("hot", 1),
                entry.get("ragged", False),
                entry.get("weighted", False),
                tuple(entry.get("parts", ())),
                entry.get("vocabulary", ""),
                entry.get("keyed", False),
            )
            for entry in self.content["fields"]
        )

    @property
    def fixed(self) -> tuple[Field, ...]:
        """Return the fields with a fixed number of ids or keys, in the order used in batches."""
        return tuple(field for field in self.fields if not field.ragged)

    @property
    def lists(self) -> tuple[Field, ...]:
        """Return the ragged fields in the order of a row's lists."""
        return tuple(field for field in self.fields if field.ragged)

    @property
    def weighted(self) -> bool:
        """Return True if ids in lists have weights, and False if every id has weight 1."""
        return any(field.weighted for field in self.fields)

    @cached_property
    def side(self) -> tuple[SideColumn, ...]:
        """Return the non-feature columns."""
        return tuple(
            SideColumn(entry["name"], entry["role"], entry["type"])
            for entry in self.content.get("side", ())
        )

    def side_column(self, role: Role) -> SideColumn | None:
        """Return the first non-feature column with this role, or None."""
        return next((column for column in self.side if column.role == role), None)

    @property
    def labelled(self) -> bool:
        """Return True if rows have labels. The labels of unlabeled rows are NaN; such rows can only
        be scored.
        """
        return bool(self.content.get("labelled", True))

    @cached_property
    def part_types(self) -> Mapping[str, PartType]:
        """Return the parts that every shard has in addition to its words, by name."""
        types: dict[str, PartType] = {}
        if num_keys := sum(field.hot for field in self.fixed if field.keyed):
            types["keys"] = PartType("<i8", (num_keys,))
        if lists := self.lists:
            length_type = self.content.get("length_type", LENGTH_TYPES[0])
            types["lengths"] = PartType(length_type, (len(lists),))
            types["starts"] = PartType("<i8", extra=1)
            keyed = any(field.keyed for field in lists)
            types["values"] = PartType("<i8" if keyed else "<i4", counted=True)
            if self.weighted:
                types["value_weights"] = PartType("<f4", counted=True)
        if num_labels := sum(column.role == "label" for column in self.side):
            types["labels"] = PartType("<f4", (num_labels,))
        for column in self.side:
            if column.type == "string":
                types[f"{column.role}_ends"] = PartType("<i8")
                types[f"{column.role}_bytes"] = PartType("|u1", counted=True)
            elif column.role != "label":
                types[column.role] = PartType(SIDE_TYPES[column.type])
        return types

    @property
    def keyed(self) -> bool:
        """Return True if any field has keys, in which case batches contain int64 ids."""
        return any(field.keyed for field in self.fields)

    @property
    def vocabulary_digest(self) -> str | None:
        """Return a digest of all vocabularies, or None for a set without vocabularies."""
        vocabulary = self.content.get("vocabulary")
        return None if vocabulary is None else vocabulary["digest"]

    @property
    def vocabularies(self) -> dict[str, Any]:
        """Return the entry of each vocabulary, by name."""
        return (self.content.get("vocabulary") or {"fields": {}})["fields"]

    @property
    def transforms(self) -> list[Any]:
        """Return the name, transform, constants, and limits of each dense column."""
        fitted, schema = self.content.get("fitted", {}), self.content.get("schema", {})
        clips = {entry["name"]: entry["clip"] for entry in schema.get("numbers", ())}
        return [
            (name := entry["name"], entry.get("transform"), fitted.get(name), clips.get(name))
            for entry in self.content["dense"]
        ]

    @property
    def transforms_digest(self) -> str:
        """Return a digest of the transforms of all dense columns, with their constants."""
        return digest(self.transforms)

    @property
    def ancestors(self) -> tuple[Ancestor, ...]:
        """Return the vocabularies from which this vocabulary grew, nearest first."""
        vocabulary = self.content.get("vocabulary") or {}
        return tuple(Ancestor(**entry) for entry in vocabulary.get("ancestors", ()))

    @property
    def sparse(self) -> tuple[Field, ...]:
        """Return the fields that consist of one column."""
        return tuple(field for field in self.fields if len(field.parts) == 1)

    @property
    def crosses(self) -> tuple[Field, ...]:
        """Return the fields that cross a pair of columns."""
        return tuple(field for field in self.fields if len(field.parts) > 1)

    @property
    def num_words(self) -> int:
        """Return the number of 32-bit words per row."""
        return 1 + len(self.dense) + sum(field.hot for field in self.fixed if not field.keyed)

    @cached_property
    def splits(self) -> Mapping[str, int]:
        """Return the number of rows in train, val, and test."""
        return {name: sum(shard.rows for shard in self.shards(name)) for name in SPLITS}

    @property
    def fingerprint(self) -> str:
        """Return a digest of the manifest. Sets with equal digests have identical files."""
        return cast("str", self.content["fingerprint"])

    @cached_property
    def content_id(self) -> str:
        """Return a digest of all data that a run uses: rows, row order, splits and vocabularies.

        The digest is computed only from the manifest, so older sets have one, too. Inputs, options,
        versions and shard boundaries do not affect the digest. Text row keys enter the digest as
        one concatenated string, without boundaries between keys.
        """
        return digest(
            {
                "dense": [
                    [entry["name"], entry.get("transform")] for entry in self.content["dense"]
                ],
                "fields": [_facts_of(field) for field in self.fields],
                "side": [asdict(column) for column in self.side],
                "labelled": self.labelled,
                "vocabulary": self.vocabulary_digest,
                "splits": {split: self._rows_facts(split) for split in SPLITS},
            }
        )

    def _rows_facts(self, split: str) -> dict[str, int]:
        """Return the number of rows of a split, and the crc32 of its words and of each part other
        than offsets.
        """
        shards = self.shards(split)
        shapes = [(shard.rows, self.num_words) for shard in shards]
        facts = {
            "rows": self.splits[split],
            "words": rows_crc32("<i4", shapes, [shard.crc32 for shard in shards]),
        }
        for name, kind in self.part_types.items():
            if name in PLACES_IN_SHARD:
                continue
            parts = [shard.parts[name] for shard in shards]
            pairs = zip(shards, parts, strict=True)
            shapes = [kind.shape(shard.rows, part.count) for shard, part in pairs]
            facts[name] = rows_crc32(kind.dtype, shapes, [part.crc32 for part in parts])
        return facts

    @property
    def bayes(self) -> Bayes | None:
        """Return the best possible metrics of a generated set, or None for a set of real rows."""
        raw = self.content.get("bayes")
        if raw is None:
            return None
        by_split = {name: (value["auc"], value["logloss"]) for name, value in raw.items()}
        split = next(name for name in reversed(SPLITS) if name in by_split)
        return Bayes(split, *by_split[split], by_split)

    def shards(self, split: str) -> tuple[Shard, ...]:
        """Return the shards of one split in row order."""
        if split not in SPLITS:
            raise DataError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        return tuple(_shard(entry) for entry in self.content["splits"][split])

    def field(self, name: str) -> Field:
        """Return the field ``name``. Raises DataError, with advice, if the field does not exist."""
        for field in self.fields:
            if field.name == name:
                return field
        known = ", ".join(field.name for field in self.fields)
        if "x" in name[1:-1]:
            wanted = ",".join([*(cross.name for cross in self.crosses), name])
            raise DataError(
                f"{self.path}: this set has no cross {name!r} (it has {known}); prepare the set "
                f"again with --crosses {wanted}"
            )
        raise DataError(f"{self.path}: this set has no field {name!r}; it has {known}")


def _facts_of(field: Field) -> dict[str, Any]:
    """Return the field as JSON. ``keyed`` is omitted if it is False, so that the content IDs of
    older sets stay valid.
    """
    return {key: value for key, value in asdict(field).items() if key != "keyed" or value}


def _shard(entry: Mapping[str, Any]) -> Shard:
    parts = {name: ShardPart(**part) for name, part in entry.get("parts", {}).items()}
    return Shard(entry["file"], entry["rows"], entry["crc32"], parts)


def fingerprint_of(content: Mapping[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of ``content`` without its fingerprint."""
    return digest({key: value for key, value in content.items() if key != "fingerprint"})


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` atomically, with the format, version and fingerprint added to
    ``content``.
    """
    is_keyed = any(entry.get("keyed", False) for entry in content["fields"])
    full = {"format": FORMAT, "version": KEYED_VERSION if is_keyed else VERSION, **content}
    full["fingerprint"] = fingerprint_of(full)
    partial = folder / (MANIFEST + ".partial")
    partial.write_text(json.dumps(full, indent=1) + "\n", encoding="ascii")
    partial.replace(folder / MANIFEST)


def load_manifest(
    path: str | AnyPath, key: str = "data.path", cache: "DataCache | None" = None
) -> Manifest:
    """Read and check the manifest of the set at ``path``, a folder or URL.

    ``key`` is the option or configuration key that messages name. ``cache`` contains the settings
    for sets at URLs (``data.cache``). Raises DataError if the manifest is missing or invalid.
    """
    try:
        folder = any_path(path)
    except PathError as error:
        raise DataError(f"{key}: {error}") from error
    if isinstance(folder, RemotePath):
        from sbpflow.data.format.remote_set import open_remote

        return open_remote(folder, key, cache)
    if problem := data_folder_problem(folder, key):
        raise DataError(problem)
    if not (folder / MANIFEST).is_file():
        raise DataError(f"{key}: {folder} has no {MANIFEST}; {HOW_TO_MAKE_DATA}")
    try:
        raw = read_json(folder / MANIFEST)
    except (FileNotFoundError, JsonError) as error:
        raise DataError(f"{error}; restore it, or {HOW_TO_MAKE_DATA}") from error
    return Manifest(folder, checked_content(folder / MANIFEST, raw))


def check_unchanged(manifest: Manifest) -> None:
    """Raise DataError unless the folder still contains the set that ``manifest`` describes. Shards
    are opened by name, so without this check, rows could be read from a set that has replaced this
    one.
    """
    file = manifest.path / MANIFEST
    try:
        raw = read_json(file)
    except (FileNotFoundError, JsonError) as error:
        raise DataError(
            f"{file}: the set has been removed or damaged since it was opened ({error}); restore "
            "the set, or start again with another set"
        ) from error
    content = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    now = content.get("fingerprint")
    if now == manifest.fingerprint and now != fingerprint_of(content):
        raise DataError(
            f"{file}: the set has been damaged since it was opened (its fingerprint does not "
            "match); restore the set, or start again with another set"
        )
    if now != manifest.fingerprint:
        raise DataError(
            f"{manifest.path}: the set has been replaced since it was opened (fingerprint "
            f"{str(now)[:16]}, opened as {manifest.fingerprint[:16]}); load its manifest again and "
            "start a new read, or restore the old set"
        )


class UnchangedSet:
    """Does the same as ``check_unchanged``, but rereads the manifest only if its file has
    changed.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._seen: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise DataError unless the folder still contains the set that was opened."""
        now: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            stat = (self._manifest.path / MANIFEST).stat()
            now = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if not now or now != self._seen:
            check_unchanged(self._manifest)
            self._seen = now


def checked_content(file: AnyPath, raw: object) -> Mapping[str, Any]:
    """Return the content of a manifest's JSON ``raw``; raise DataError if it is not valid."""
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise DataError(f"{file} is not the manifest of a prepared set; {HOW_TO_MAKE_DATA}")
    content = cast("dict[str, Any]", raw)
    if content.get("version") not in (VERSION, KEYED_VERSION):
        raise DataError(
            f"{file}: format version {content.get('version')!r}, but this program reads only "
            f"versions {VERSION} and {KEYED_VERSION}; prepare the set again: "
            f"{how_to_rebuild(file.parent, content)}"
        )
    if content.get("fingerprint") != fingerprint_of(content):
        raise DataError(
            f"{file}: the fingerprint does not match because the file was edited or damaged; "
            "prepare the set again"
        )
    check_columns(file, content)
    check_files(file, content, Manifest(file, content).part_types)
    return content

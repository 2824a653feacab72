"""The manifest of a prepared set: what the shards hold, read and written in one place.

A prepared set is a folder with ``manifest.json`` and ``.npy`` shards of int32 words
[rows, 1 + dense + fields]: label, dense values (both float32 bit patterns), one id per field.
The fingerprint covers everything in the manifest, the checksums of the shards included.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from data.format.manifest_check import SPLITS, check_content
from data.format.schema import Field
from sbpflow.config.checks import HOW_TO_MAKE_DATA, data_folder_problem
from sbpflow.errors import DataError

FORMAT = "sbpflow-prepared"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of consecutive rows of a split; ``crc32`` is over the whole file."""

    file: str
    rows: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Bayes:
    """The best possible AUC and logloss of a generated set, by split.

    ``auc`` and ``logloss`` are of ``split``: test, or val or train where the ones before are empty.
    """

    split: str
    auc: float
    logloss: float
    by_split: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Manifest:
    """A prepared set: ``content`` is the checked JSON, the properties are what readers use."""

    path: Path
    content: Mapping[str, Any]

    @cached_property
    def dense(self) -> tuple[str, ...]:
        """Names of the dense columns, in the order of ``Batch.dense``."""
        return tuple(entry["name"] for entry in self.content["dense"])

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Sparse fields, then crosses, in the order of ``Batch.ids``."""
        return tuple(
            Field(entry["name"], entry["rows"], entry.get("hot", 1))
            for entry in self.content["fields"]
        )

    @property
    def sparse(self) -> tuple[Field, ...]:
        """The fields that are one column."""
        return tuple(field for field in self.fields if len(field.parts) == 1)

    @property
    def crosses(self) -> tuple[Field, ...]:
        """The fields that are a pair of columns."""
        return tuple(field for field in self.fields if len(field.parts) > 1)

    @property
    def num_words(self) -> int:
        """32-bit words per row."""
        return 1 + len(self.dense) + sum(field.hot for field in self.fields)

    @cached_property
    def splits(self) -> Mapping[str, int]:
        """Rows of train, val and test."""
        return {name: sum(shard.rows for shard in self.shards(name)) for name in SPLITS}

    @property
    def fingerprint(self) -> str:
        """A digest of the manifest; equal only for equal sets."""
        return cast("str", self.content["fingerprint"])

    @property
    def bayes(self) -> Bayes | None:
        """The known ceiling of a generated set; None for real rows."""
        raw = self.content.get("bayes")
        if raw is None:
            return None
        by_split = {name: (value["auc"], value["logloss"]) for name, value in raw.items()}
        split = next(name for name in reversed(SPLITS) if name in by_split)
        return Bayes(split, *by_split[split], by_split)

    def shards(self, split: str) -> tuple[Shard, ...]:
        """The files of one split, in row order."""
        if split not in SPLITS:
            raise DataError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        return tuple(Shard(**entry) for entry in self.content["splits"][split])

    def field(self, name: str) -> Field:
        """The field called ``name``, or a DataError that says how to get it."""
        for field in self.fields:
            if field.name == name:
                return field
        have = ", ".join(field.name for field in self.fields)
        if "x" in name:
            wanted = ",".join([*(cross.name for cross in self.crosses), name])
            raise DataError(
                f"{self.path}: no cross {name!r} in this set (it has: {have}); "
                f"prepare it again with --crosses {wanted}"
            )
        raise DataError(f"{self.path}: no field {name!r} in this set; it has: {have}")


def fingerprint_of(content: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of ``content`` without its own fingerprint."""
    rest = {key: value for key, value in content.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` in one step, with format, version and fingerprint added."""
    full = {"format": FORMAT, "version": VERSION, **content}
    full["fingerprint"] = fingerprint_of(full)
    partial = folder / (MANIFEST + ".partial")
    partial.write_text(json.dumps(full, indent=1) + "\n", encoding="ascii")
    partial.replace(folder / MANIFEST)


def load_manifest(path: str | Path) -> Manifest:
    """Read and check the manifest of the set in folder ``path``; DataError says what is wrong."""
    folder = Path(path)
    if problem := data_folder_problem(folder):
        raise DataError(problem)
    if not (folder / MANIFEST).is_file():
        raise DataError(f"data.path: {folder} has no {MANIFEST}; {HOW_TO_MAKE_DATA}")
    try:
        raw: object = json.loads((folder / MANIFEST).read_text(encoding="ascii"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{folder / MANIFEST}: not readable as JSON ({error}); {HOW_TO_MAKE_DATA}"
        ) from error
    return Manifest(folder, _checked(folder / MANIFEST, raw))


def check_unchanged(manifest: Manifest) -> None:
    """DataError unless the set in the folder of ``manifest`` still is the one it describes.

    Shards are opened by name, so a set prepared anew in the same folder would be read as this one.
    """
    file = manifest.path / MANIFEST
    try:
        raw: object = json.loads(file.read_text(encoding="ascii"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: the set was removed or damaged since it was opened ({error}); restore it, "
            "or start again with another"
        ) from error
    now = cast("dict[str, Any]", raw).get("fingerprint") if isinstance(raw, dict) else None
    if now != manifest.fingerprint:
        raise DataError(
            f"{manifest.path}: the set was replaced since it was opened (fingerprint "
            f"{str(now)[:16]}, opened as {manifest.fingerprint[:16]}); load its manifest again and "
            "start a new read, or put the old set back"
        )


def _checked(file: Path, raw: object) -> Mapping[str, Any]:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise DataError(f"{file}: not the manifest of a prepared set; {HOW_TO_MAKE_DATA}")
    content = cast("dict[str, Any]", raw)
    if content.get("version") != VERSION:
        raise DataError(
            f"{file}: format version {content.get('version')!r}, this program reads {VERSION}; "
            "prepare the set again"
        )
    if content.get("fingerprint") != fingerprint_of(content):
        raise DataError(
            f"{file}: the fingerprint does not fit, the file was edited or damaged; "
            "prepare the set again"
        )
    check_content(file, content)
    return content

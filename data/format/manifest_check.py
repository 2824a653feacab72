"""Check the structure of a manifest's JSON, on which readers rely. A correct fingerprint does not
prove that a manifest is valid, because anyone can compute it. Therefore, all keys that readers use
are checked, and file names must not point outside the set's folder.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from sbpflow.data.format.parts import COUNTED_PARTS, LENGTH_TYPES, ROLES, Role
from sbpflow.errors import DataError
from sbpflow.runtime.files.json_file import is_number

SPLITS = ("train", "val", "test")

VOCABULARY_FOLDER = "vocabulary"
SET_FILE = re.compile(rf"manifest\.json|{VOCABULARY_FOLDER}/.+|(?:{'|'.join(SPLITS)})-\d+\..*npy")
KEY_TYPES = ("<u4", "<u8")

_MAX_ROWS = 2**31 - 1
_MAX_HOT = 2**16 - 1
_VOCABULARY_KEYS = {"digest", "seed", "ancestors", "fields"}
_ARRAYS = {"keys", "ids", "counts"}
_MORE_ARRAYS = {"checks", "string_ends", "string_bytes"}
COUNTED_ARRAYS = ("string_bytes",)
_SHARD_KEYS = {"file", "rows", "crc32"}
_BAYES_KEYS = {"auc", "logloss", "ctr"}


def check_columns(file: Path, content: Mapping[str, Any]) -> None:
    """Raise DataError for the first invalid value of the columns; the message names its key, the
    value, and the rule.
    """
    check = _Check(file)
    names = [check.name(f"dense[{i}]", e) for i, e in check.entries(content, "dense")]
    fields = check.entries(content, "fields")
    check.need(bool(fields), "fields", content["fields"], "a list of at least one table")
    for i, entry in fields:
        names.append(check.name(f"fields[{i}]", entry))
        check.field(f"fields[{i}]", entry)
    names += check.side(content)
    check.columns(content)
    repeated = [name for name, number in Counter(names).items() if number > 1]
    check.need(not repeated, "dense and fields", repeated[:1], "a name that occurs only once")


def check_files(file: Path, content: Mapping[str, Any], parts: Collection[str]) -> None:
    """Do the same for everything else, given valid columns; every shard must have ``parts``."""
    check = _Check(file)
    splits = content.get("splits")
    check.need(_has_keys(splits, set(SPLITS)), "splits", splits, "shards of train, val and test")
    files: list[str] = []
    for split in SPLITS:
        for i, shard in check.entries(cast("dict[str, Any]", splits), split, "splits."):
            files += check.shard(f"splits.{split}[{i}]", shard, set(parts))
    repeated = [name for name, number in Counter(files).items() if number > 1]
    check.need(not repeated, "splits", repeated[:1], "a file that occurs only once")
    if (bayes := content.get("bayes")) is not None:
        check.bayes(bayes)
    if (vocabulary := content.get("vocabulary")) is not None:
        check.vocabulary(vocabulary, [entry["name"] for entry in content["fields"]])


class _Check:
    """Checks one manifest file; every error message starts with the file name."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def need(self, fits: bool, key: str, value: object, rule: str) -> None:
        if not fits:
            shown = repr(value)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise DataError(
                f"{self._file}: {key} is {shown} but must be {rule}; prepare the set again"
            )

    def entries(
        self, parent: Mapping[str, Any], key: str, above: str = ""
    ) -> list[tuple[int, dict[str, Any]]]:
        value = parent.get(key)
        fits = isinstance(value, list) and all(
            isinstance(e, dict) for e in cast("list[Any]", value)
        )
        self.need(fits, above + key, value, "a list of mappings")
        return list(enumerate(cast("list[dict[str, Any]]", value)))

    def name(self, key: str, entry: Mapping[str, Any]) -> str:
        value = entry.get("name")
        self.need(isinstance(value, str) and value != "", f"{key}.name", value, "a name like 'C1'")
        return cast("str", value)

    def integer(self, key: str, value: object, least: int, most: int) -> None:
        fits = type(value) is int and least <= value <= most  # True is an instance of int
        self.need(fits, key, value, f"a whole number from {least} to {most}")

    def field(self, key: str, entry: Mapping[str, Any]) -> None:
        keyed = entry.get("keyed", False)
        self.need(isinstance(keyed, bool), f"{key}.keyed", keyed, "true or false")
        if keyed:
            self.need("rows" not in entry, f"{key}.rows", entry.get("rows"), "absent with keys")
        else:
            self.integer(f"{key}.rows", entry.get("rows"), 2, _MAX_ROWS)
        parts = entry.get("parts", [])
        fits = isinstance(parts, list) and len(parts) != 1 and all(type(p) is str for p in parts)
        self.need(fits, f"{key}.parts", parts, "the names of the two columns of a cross")
        shared = entry.get("vocabulary", "")
        self.need(isinstance(shared, str), f"{key}.vocabulary", shared, "the name of a vocabulary")
        ragged, weighted = entry.get("ragged", False), entry.get("weighted", False)
        for name, value in (("ragged", ragged), ("weighted", weighted)):
            self.need(isinstance(value, bool), f"{key}.{name}", value, "true or false")
        self.need(ragged or not weighted, f"{key}.weighted", weighted, "false if not ragged")
        self.integer(f"{key}.hot", entry.get("hot", 1), 1, _MAX_HOT if ragged else _MAX_ROWS)

    def side(self, content: Mapping[str, Any]) -> list[str]:
        """Check the non-feature columns; return the names of those that must not also be
        features.
        """
        names: list[str] = []
        roles: list[str] = []
        for i, entry in self.entries({"side": content.get("side", [])}, "side"):
            name, role, kind = self.name(f"side[{i}]", entry), entry.get("role"), entry.get("type")
            if role in ("label", "weight"):
                names.append(name)
            self.need(role in ROLES, f"side[{i}].role", role, f"one of {', '.join(ROLES)}")
            types = ROLES[cast("Role", role)]
            self.need(kind in types, f"side[{i}].type", kind, f"one of {', '.join(types)}")
            roles.append(cast("str", role))
        repeated = [role for role in roles if role != "label" and roles.count(role) > 1]
        self.need(not repeated, "side", repeated[:1], "a role that occurs only once")
        return names

    def columns(self, content: Mapping[str, Any]) -> None:
        """Check the entries that describe all rows: whether rows have labels, the ranges of values,
        and the type of list lengths.
        """
        labelled = content.get("labelled", True)
        self.need(isinstance(labelled, bool), "labelled", labelled, "true or false")
        kind = content.get("length_type", LENGTH_TYPES[0])
        self.need(kind in LENGTH_TYPES, "length_type", kind, f"one of {', '.join(LENGTH_TYPES)}")
        for i, entry in enumerate(content["dense"]):
            span = entry.get("range")
            fits = span is None or (
                isinstance(span, list) and len(span) == 2 and all(map(is_number, span))
            )
            self.need(fits, f"dense[{i}].range", span, "the smallest and the largest value")

    def shard(self, key: str, shard: Mapping[str, Any], wanted: set[str]) -> list[str]:
        """Check a shard, and return the names of its files."""
        plain = {name: value for name, value in shard.items() if name != "parts"}
        self.need(_has_keys(plain, _SHARD_KEYS), key, shard, "a mapping with file, rows and crc32")
        self.integer(f"{key}.rows", shard["rows"], 0, _MAX_ROWS)
        files = [self.file(key, plain)]
        parts = shard.get("parts", {})
        self.need(_has_keys(parts, wanted), f"{key}.parts", parts, _named(wanted))
        for name, part in cast("dict[str, Any]", parts).items():
            files.append(self.part(f"{key}.parts.{name}", part, name in COUNTED_PARTS))
        return files

    def part(self, key: str, part: Mapping[str, Any], counted: bool, folder: str = "") -> str:
        """Check the entry of a file next to a shard or in ``folder``; return the file's name."""
        keys = {"file", "crc32", "count"} if counted else {"file", "crc32"}
        self.need(_has_keys(part, keys), key, part, _named(keys))
        if counted:
            self.integer(f"{key}.count", part["count"], 0, 2**62)
        return self.file(key, part, folder)

    def file(self, key: str, entry: Mapping[str, Any], folder: str = "") -> str:
        self.integer(f"{key}.crc32", entry["crc32"], 0, 2**32 - 1)
        file = entry["file"]
        plain = isinstance(file, str) and file.endswith(".npy") and file.startswith(folder)
        plain = plain and not set(file[len(folder) :]) & set("/\\\0")
        where = f"in {folder}" if folder else "next to the manifest"
        self.need(plain, f"{key}.file", file, f"the name of an .npy file {where}")
        return cast("str", file)

    def bayes(self, raw: object) -> None:
        fits = isinstance(raw, dict) and raw != {} and set(cast("dict[str, Any]", raw)) <= {*SPLITS}
        self.need(fits, "bayes", raw, "auc, logloss and ctr by split")
        for split, pair in cast("dict[str, Any]", raw).items():
            fits = _has_keys(pair, _BAYES_KEYS) and all(map(is_number, pair.values()))
            self.need(fits, f"bayes.{split}", pair, "numbers for auc, logloss and ctr")

    def vocabulary(self, raw: object, fields: list[str]) -> None:
        self.need(_has_keys(raw, _VOCABULARY_KEYS), "vocabulary", raw, _named(_VOCABULARY_KEYS))
        content = cast("dict[str, Any]", raw)
        self.integer("vocabulary.seed", content["seed"], 0, 2**63 - 1)
        self.digest("vocabulary.digest", content["digest"])
        for i, entry in self.entries(content, "ancestors", "vocabulary."):
            key = f"vocabulary.ancestors[{i}]"
            self.need(_has_keys(entry, {"digest", "rows"}), key, entry, "digest and rows")
            self.digest(f"{key}.digest", entry["digest"])
            rows = entry["rows"]
            fits = isinstance(rows, dict) and all(type(n) is int and n > 1 for n in rows.values())
            self.need(fits, f"{key}.rows", rows, "table rows by field")
        values = content["fields"]
        fits = isinstance(values, dict) and set(values) <= set(fields)
        self.need(fits, "vocabulary.fields", values, "arrays by field name")
        for name, entry in cast("dict[str, Any]", values).items():
            key = f"vocabulary.fields.{name}"
            arrays = set(cast("dict[str, Any]", entry)) - {"values", "key"} if entry else set()
            fits = isinstance(entry, dict) and _ARRAYS <= arrays <= _ARRAYS | _MORE_ARRAYS
            self.need(fits, key, entry, "values, key, keys, ids and counts")
            self.integer(f"{key}.values", entry.get("values"), 0, _MAX_ROWS)
            self.need(entry.get("key") in KEY_TYPES, f"{key}.key", entry.get("key"), "<u4 or <u8")
            for array in sorted(arrays):
                counted, folder = array in COUNTED_ARRAYS, VOCABULARY_FOLDER + "/"
                self.part(f"{key}.{array}", entry[array], counted, folder)

    def digest(self, key: str, value: object) -> None:
        fits = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
        self.need(fits, key, value, "a sha256 in hex")


def _named(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "empty"


def _has_keys(value: object, keys: set[str]) -> bool:
    return isinstance(value, dict) and set(cast("dict[str, Any]", value)) == keys

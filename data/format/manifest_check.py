"""Whether the JSON of a manifest has the form that readers rely on.

A right fingerprint is no proof: anybody can write a manifest with one that fits. Every key that is
read is checked here, so that a wrong one is a message, and so that nothing but a shard beside the
manifest is ever opened.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from sbpflow.errors import DataError

SPLITS = ("train", "val", "test")

_MAX_ROWS = 2**31 - 1
_SHARD_KEYS = {"file", "rows", "crc32"}
_BAYES_KEYS = {"auc", "logloss", "ctr"}


def check_content(file: Path, content: Mapping[str, Any]) -> None:
    """Raise DataError naming the key, the value and the rule of the first thing that is wrong."""
    check = _Check(file)
    names = [check.name(f"dense[{i}]", e) for i, e in check.entries(content, "dense")]
    fields = check.entries(content, "fields")
    check.need(bool(fields), "fields", content["fields"], "a list of at least one table")
    for i, entry in fields:
        names.append(check.name(f"fields[{i}]", entry))
        check.integer(f"fields[{i}].rows", entry.get("rows"), 2, _MAX_ROWS)
        check.integer(f"fields[{i}].hot", entry.get("hot", 1), 1, _MAX_ROWS)
    twice = [name for name, number in Counter(names).items() if number > 1]
    check.need(not twice, "dense and fields", twice[:1], "free of a name that is there twice")
    splits = content.get("splits")
    check.need(_has_keys(splits, set(SPLITS)), "splits", splits, "shards of train, val and test")
    files: list[str] = []
    for split in SPLITS:
        for i, shard in check.entries(cast("dict[str, Any]", splits), split, "splits."):
            files.append(check.shard(f"splits.{split}[{i}]", shard))
    twice = [name for name, number in Counter(files).items() if number > 1]
    check.need(not twice, "splits", twice[:1], "free of a file that is there twice")
    if (bayes := content.get("bayes")) is not None:
        check.bayes(bayes)


class _Check:
    def __init__(self, file: Path) -> None:
        self._file = file

    def need(self, fits: bool, key: str, value: object, rule: str) -> None:
        if not fits:
            shown = repr(value)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise DataError(
                f"{self._file}: {key} is {shown} and must be {rule}; make the set again"
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
        fits = type(value) is int and least <= value <= most  # True is an int, too
        self.need(fits, key, value, f"a whole number from {least} to {most}")

    def shard(self, key: str, shard: Mapping[str, Any]) -> str:
        self.need(_has_keys(shard, _SHARD_KEYS), key, shard, "file, rows and crc32 of a shard")
        self.integer(f"{key}.rows", shard["rows"], 0, _MAX_ROWS)
        self.integer(f"{key}.crc32", shard["crc32"], 0, 2**32 - 1)
        file = shard["file"]
        plain = isinstance(file, str) and file.endswith(".npy") and not set(file) & set("/\\\0")
        self.need(plain, f"{key}.file", file, "the name of an .npy file beside the manifest")
        return cast("str", file)

    def bayes(self, raw: object) -> None:
        fits = isinstance(raw, dict) and raw != {} and set(cast("dict[str, Any]", raw)) <= {*SPLITS}
        self.need(fits, "bayes", raw, "auc and logloss by split")
        for split, pair in cast("dict[str, Any]", raw).items():
            fits = _has_keys(pair, _BAYES_KEYS) and all(map(_is_number, pair.values()))
            self.need(fits, f"bayes.{split}", pair, "numbers for auc, logloss and ctr")


def _has_keys(value: object, keys: set[str]) -> bool:
    return isinstance(value, dict) and set(cast("dict[str, Any]", value)) == keys


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast("float", value))

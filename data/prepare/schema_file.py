"""A schema as YAML: which columns a table has, and what each of them is."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from sbpflow.config.yaml_text import load_yaml
from sbpflow.data.format.schema import BEYOND, KINDS, Kind, Many, Number, Schema
from sbpflow.data.prepare.transforms import TRANSFORMS
from sbpflow.errors import ConfigError

_KEYS = (
    *("label", "labels", "columns", "dense", "sparse", "separator", "header", "quote"),
    *("weight", "group", "time", "row_key"),
)
_DENSE_KEYS = ("kind", "transform", "clip", "buckets", "missing")
_SPARSE_KEYS = ("kind", "separator", "max", "width", "beyond", "weights", "vocabulary")
_MOST_VALUES = 2**16 - 1
_MOST_BUCKETS = 4096
_LARGEST = float(np.finfo(np.float32).max)


def read_schema(path: Path) -> Schema:
    """Read a YAML schema; docs/data.md says what can be in it.

    ``columns`` is the order in the file and defaults to the columns used, in the order label,
    dense, sparse, others; columns not used are skipped. ConfigError names key, value and rule.
    """
    try:
        raw: object = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--schema {path}: cannot be read as YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--schema {path}: must be a mapping with the keys {', '.join(_KEYS)}")
    reader = _Reader(f"--schema {path}")
    schema = reader.schema(cast("dict[str, Any]", raw))
    schema.check(reader.key)
    return schema


class _Reader:
    def __init__(self, key: str) -> None:
        self.key = key

    def schema(self, raw: dict[str, Any]) -> Schema:
        self.known("", raw, _KEYS)
        for key in ("columns", "labels"):
            value = raw.get(key, [])
            if not isinstance(value, list):
                raise ConfigError(f"{self.key}: {key} is {value!r}; write a list of names")
            self.names(key, value)
        numbers = self.dense(raw.get("dense", []))
        kinds, many, shared = self.sparse(raw.get("sparse", {}))
        label = self.name("label", raw.get("label", "label"))
        side: dict[str, Any] = {
            "labels": tuple(map(str, raw.get("labels", ()))),
            "weight": self.name("weight", raw["weight"]) if "weight" in raw else None,
            "group": self.pair(raw, "group", KINDS, "string"),
            "time": self.pair(raw, "time", ("date", "integer"), "date"),
            "row_key": self.pair(raw, "row_key", ("string", "integer"), "string"),
        }
        dense = tuple(number.name for number in numbers)
        own = Schema(columns=(), label=label, dense=dense, sparse=tuple(kinds),
                     kinds=tuple(kinds.values()), many=many, **side)  # fmt: skip
        return Schema(
            columns=tuple(map(str, raw.get("columns", own.used))),
            label=label,
            dense=dense,
            sparse=own.sparse,
            kinds=own.kinds,
            separator=str(raw.get("separator", "\t")),
            header=self.flag("header", raw.get("header", False)),
            quote=None if raw.get("quote") is None else str(raw["quote"]),
            many=many,
            vocabularies=shared,
            numbers=numbers,
            **side,
        )

    def known(self, place: str, raw: Mapping[str, Any], keys: Collection[str]) -> None:
        if unknown := sorted(set(map(str, raw)) - set(keys)):
            what = f"unknown key {unknown[0]!r}"
            raise ConfigError(f"{self.key}: {place}{what}; the keys are {', '.join(keys)}")

    def names(self, key: str, values: Collection[object]) -> None:
        if nested := [entry for entry in values if not isinstance(entry, str | int)]:
            raise ConfigError(f"{self.key}: {key} has {nested[0]!r}, which is no name")

    def name(self, key: str, value: object) -> str:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ConfigError(f"{self.key}: {key} is {value!r}; write the name of a column")
        return str(value)

    def flag(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{self.key}: {key} is {value!r}; write true or false")
        return value

    def count(self, key: str, value: object, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"{self.key}: {key} is {value!r}; write {least} to {most}")
        return value

    def choice(self, key: str, value: object, known: Collection[str]) -> str:
        if value not in known:
            raise ConfigError(f"{self.key}: {key} {value} must be one of {', '.join(known)}")
        return cast("str", value)

    def pair(
        self, raw: Mapping[str, Any], key: str, kinds: Collection[str], default: str
    ) -> tuple[str, str] | None:
        """``NAME`` or ``{NAME: KIND}``: the name, and its kind of the kinds given."""
        value = raw.get(key)
        if value is None:
            return None
        if isinstance(value, dict):
            if len(value) != 1:
                raise ConfigError(f"{self.key}: {key} is {value!r}; write NAME or {{NAME: KIND}}")
            ((name, kind),) = value.items()
            return self.name(key, name), self.choice(f"{key} {name}:", kind, kinds)
        return self.name(key, value), default

    def dense(self, raw: object) -> tuple[Number, ...]:
        if isinstance(raw, list):
            self.names("dense", raw)
            return tuple(Number(name=str(name)) for name in raw)
        if not isinstance(raw, dict):
            raise ConfigError(f"{self.key}: dense is {raw!r}; write a list of names, or name: how")
        self.names("dense", raw)
        return tuple(self.number(str(name), how) for name, how in raw.items())

    def number(self, name: str, how: object) -> Number:
        place = f"dense {name}: "
        if how is None:
            return Number(name=name)
        if isinstance(how, str):
            how = {"transform": how}
        if not isinstance(how, dict):
            raise ConfigError(f"{self.key}: {place}{how!r} is no transform; {_known()}")
        self.known(place, how, _DENSE_KEYS)
        transform, clip = how.get("transform"), how.get("clip")
        if transform is not None:
            self.choice(f"{place}transform", transform, tuple(TRANSFORMS))
        if clip is not None:
            fits = isinstance(clip, list) and len(clip) == 2 and all(map(_is_float32, clip))
            if not fits or clip[0] >= clip[1]:
                raise ConfigError(
                    f"{self.key}: {place}clip is {clip!r}; write [LEAST, GREATEST], two numbers "
                    f"within float32, {-_LARGEST:g} to {_LARGEST:g}"
                )
        buckets = how.get("buckets", 0)
        if buckets:
            self.count(f"{place}buckets", buckets, 2, _MOST_BUCKETS)
            if transform is not None:
                raise ConfigError(
                    f"{self.key}: {place}has both transform and buckets; quantiles need no "
                    "transform, leave it out"
                )
        kind = self.choice(f"{place}kind", how.get("kind", "real"), ("real", "integer"))
        missing = self.choice(f"{place}missing", how.get("missing", "zero"), ("zero", "indicator"))
        return Number(
            name=name,
            whole=kind == "integer",
            transform=transform,
            clip=(float(clip[0]), float(clip[1])) if clip else None,
            buckets=buckets,
            indicator=missing == "indicator",
        )

    def sparse(
        self, raw: object
    ) -> tuple[dict[str, Kind], tuple[Many, ...], tuple[tuple[str, str], ...]]:
        if not isinstance(raw, dict | list):
            raise ConfigError(f"{self.key}: sparse is {raw!r}; write names or name: kind")
        self.names("sparse", raw)
        if isinstance(raw, list):
            return {str(name): "hex" for name in raw}, (), ()
        kinds: dict[str, Kind] = {}
        many: list[Many] = []
        shared: list[tuple[str, str]] = []
        for name, how in raw.items():
            if isinstance(how, dict):
                self.known(f"sparse {name}: ", how, _SPARSE_KEYS)
                kind = how.get("kind", "string")
                if "vocabulary" in how:
                    place = f"sparse {name}: vocabulary"
                    shared.append((str(name), self.name(place, how["vocabulary"])))
                if set(how) - {"kind", "vocabulary"}:
                    many.append(self.several(str(name), how))
            else:
                kind = how
            self.choice(f"sparse {name}:", kind, KINDS)
            kinds[str(name)] = cast("Kind", kind)
        return kinds, tuple(many), tuple(shared)

    def several(self, name: str, how: Mapping[str, Any]) -> Many:
        place = f"sparse {name}: "
        if "max" in how and "width" in how:
            raise ConfigError(
                f"{self.key}: {place}has max and width; width is for a fixed number of ids, max "
                "for lists, write one of them"
            )
        key = "width" if "width" in how else "max"
        weights, inline = how.get("weights"), None
        if isinstance(weights, dict):
            if set(weights) != {"after"}:
                raise ConfigError(
                    f"{self.key}: {place}weights is {weights!r}; write the name of a column, or "
                    "{after: ':'} where values and weights stand in one cell, like a:0.5|b:1"
                )
            weights, inline = None, str(weights["after"])
        if "weights" in how and "width" in how:
            raise ConfigError(f"{self.key}: {place}weights need lists; write max instead of width")
        return Many(
            name=name,
            separator=str(how.get("separator", "|")),
            most=self.count(f"{place}{key}", how.get(key, 64), 1, _MOST_VALUES),
            fixed="width" in how,
            beyond=cast("Any", self.choice(f"{place}beyond", how.get("beyond", "error"), BEYOND)),
            weights=None if weights is None else self.name(f"{place}weights", weights),
            inline=inline,
        )


def _known() -> str:
    return f"write one of {', '.join(TRANSFORMS)}, or a mapping with {', '.join(_DENSE_KEYS)}"


def _is_float32(value: object) -> bool:
    return type(value) in (int, float) and abs(cast("float", value)) <= _LARGEST


def schema_from(content: Mapping[str, Any]) -> Schema:
    """The schema that a manifest holds, as ``asdict`` wrote it."""
    raw = dict(content)
    many = tuple(Many(**entry) for entry in raw.pop("many", ()))
    numbers = tuple(
        Number(**{**entry, "clip": tuple(entry["clip"]) if entry["clip"] else None})
        for entry in raw.pop("numbers", ())
    )
    shared = tuple((name, vocabulary) for name, vocabulary in raw.pop("vocabularies", ()))
    pairs = {key: tuple(raw[key]) if raw.get(key) else None for key in ("group", "time", "row_key")}
    lists = {key: tuple(raw[key]) for key in ("columns", "dense", "sparse", "kinds", "labels")}
    return Schema(**{**raw, **pairs, **lists}, many=many, numbers=numbers, vocabularies=shared)


def parse_crosses(text: str, sparse: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Read ``C1xC2,C3xC4`` (or ``none``) against the sparse columns there are."""
    if text.strip() in ("", "none"):
        return ()
    pairs = [_pair(item.strip(), sparse) for item in text.split(",")]
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ConfigError(
                f"--crosses: {'x'.join(pair)!r} must be two different columns, like C1xC2"
            )
        if absent := [name for name in pair if name not in sparse]:
            raise ConfigError(
                f"--crosses: {absent[0]!r} is not a sparse column; there are {', '.join(sparse)}"
            )
    if len({frozenset(pair) for pair in pairs}) < len(pairs):
        raise ConfigError(f"--crosses: {text!r} names a cross twice; AxB and BxA are the same")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _pair(text: str, sparse: tuple[str, ...]) -> tuple[str, ...]:
    """The two columns that ``AxB`` names, whatever letters are in their names."""
    known = [(left, right) for left in sparse for right in sparse if f"{left}x{right}" == text]
    if len(known) > 1:
        ways = " or ".join(f"{left} with {right}" for left, right in known)
        raise ConfigError(f"--crosses: {text!r} can be {ways}; rename one of the columns")
    return known[0] if known else tuple(text.split("x"))

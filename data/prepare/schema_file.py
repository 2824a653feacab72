"""Read a schema, which describes the input columns, from a YAML file."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from sbpflow.config.yaml_text import load_yaml
from sbpflow.data.format.schema import (
    BEYOND,
    KINDS,
    NUMBER,
    DenseColumn,
    Kind,
    LabelRule,
    ListColumn,
    Schema,
    TimeKind,
    comparison,
    is_wrong_comparison,
)
from sbpflow.data.prepare.cells import reads_times
from sbpflow.errors import ConfigError, choices
from sbpflow.serving.cells import FLOAT32_MAX, TRANSFORMS

_KEYS = (
    *("label", "labels", "columns", "dense", "sparse", "separator", "header", "quote"),
    *("missing_values", "weight", "group", "time", "row_key"),
)
_DENSE_KEYS = ("kind", "transform", "clip", "buckets", "missing", "decimal")
_SPARSE_KEYS = ("kind", "separator", "max", "width", "beyond", "weights", "vocabulary")
MAX_VALUES = 2**16 - 1
_MAX_BUCKETS = 4096


def read_schema(source: Path | Mapping[str, Any]) -> Schema:
    """Read a schema from a YAML file or a mapping; docs/data.md documents the keys.

    ``columns`` lists the columns in file order (by default: label, dense, sparse, and other
    columns); columns without a use are skipped. Raises ConfigError for an invalid value; the
    message names its key, the value, and the rule.
    """
    key, raw = "schema", cast("object", source)
    if isinstance(source, Path):
        key = f"--schema {source}"
        try:
            raw = load_yaml(source.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{key} does not exist; use the path of a YAML file, or write one with "
                "`sbpflow schema INPUT > schema.yaml`"
            ) from error
        except OSError as error:
            raise ConfigError(f"{key} cannot be read: {error.strerror or error}") from error
        except (UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{key} cannot be parsed as YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{key} must be a mapping with any of the keys {', '.join(_KEYS)}")
    reader = _Reader(key)
    schema = reader.schema(cast("dict[str, Any]", raw))
    schema.check(reader.key)
    return schema


class _Reader:
    """Checks the values of a schema file; every error message starts with ``key``."""

    def __init__(self, key: str) -> None:
        self.key = key

    def schema(self, raw: dict[str, Any]) -> Schema:
        self.known("", raw, _KEYS)
        for key in ("columns", "labels"):
            value = raw.get(key, [])
            self.need(isinstance(value, list), key, value, "a list of names")
            self.names(key, value)
        absent = raw.get("missing_values", [])
        fits = isinstance(absent, list) and all(type(each) in (str, int) for each in absent)
        self.need(fits, "missing_values", absent, "a list of cells in quotes, such as ['NA', '?']")
        numbers = self.dense(raw.get("dense", []))
        kinds, many, shared = self.sparse(raw.get("sparse", {}))
        label, label_rule = self.label(raw.get("label", "label"))
        schema = Schema(
            columns=(),
            label=label,
            label_rule=label_rule,
            dense=tuple(column.name for column in numbers),
            sparse=tuple(kinds),
            kinds=tuple(kinds.values()),
            separator=str(raw.get("separator", "\t")),
            header=self.flag("header", raw.get("header", False)),
            quote=None if raw.get("quote") is None else str(raw["quote"]),
            missing_values=tuple(map(str, absent)),
            many=many,
            vocabularies=shared,
            numbers=numbers,
            labels=tuple(map(str, raw.get("labels", ()))),
            weight=self.weight("weight", raw["weight"]) if "weight" in raw else None,
            group=cast("Any", self.pair(raw, "group", KINDS, "string")),
            time=self.time(raw),
            row_key=cast("Any", self.pair(raw, "row_key", ("string", "integer"), "string")),
        )
        return replace(schema, columns=tuple(map(str, raw.get("columns", schema.used))))

    def need(self, fits: bool, key: str, value: object, rule: str) -> None:
        if not fits:
            raise ConfigError(f"{self.key}: {key} is {value!r}; write {rule}")

    def known(self, place: str, raw: Mapping[str, Any], keys: Collection[str]) -> None:
        if unknown := sorted(set(map(str, raw)) - set(keys)):
            raise ConfigError(
                f"{self.key}: {place}unknown key {unknown[0]!r}; the valid keys are "
                f"{', '.join(keys)}"
            )

    def names(self, key: str, values: Collection[object]) -> None:
        if flags := [entry for entry in values if isinstance(entry, bool)]:
            raise ConfigError(
                f"{self.key}: {key} contains the boolean {flags[0]}, because YAML reads yes, no, "
                "on, off, true, and false as booleans; put column names like these in quotes "
                '(for example, "on")'
            )
        if nested := [entry for entry in values if not isinstance(entry, str | int)]:
            raise ConfigError(
                f"{self.key}: {key} must list column names, but contains {nested[0]!r}"
            )

    def name(self, key: str, value: object) -> str:
        fits = isinstance(value, str | int) and not isinstance(value, bool)
        self.need(fits, key, value, "a column name")
        return str(value)

    def weight(self, key: str, value: object) -> str:
        """Parse the name of a column of weights, which must not be empty, unlike other names."""
        self.need(value != "", key, value, "a column name")
        return self.name(key, value)

    def label(self, value: object) -> tuple[str, LabelRule | None]:
        """Parse a name, ``{NAME: VALUE}``, ``{NAME: [VALUE, ...]}`` or ``{NAME: ">= 4"}``."""
        if not isinstance(value, dict):
            return self.name("label", value), None
        self.need(len(value) == 1, "label", value, "NAME or {NAME: VALUE}")
        ((name, positive),) = value.items()
        name = self.name("label", name)
        if isinstance(positive, str) and (rule := comparison(positive)):
            return name, rule
        if isinstance(positive, str):
            limit = (re.findall(NUMBER, positive) or ["4"])[0]
            self.need(
                not is_wrong_comparison(positive),
                f"label {name}",
                positive,
                f'a comparison with a number, such as ">= {limit}" (the signs are >=, >, <= and '
                f"<), or a list, {json.dumps([positive])}, if the column contains this text",
            )
        values = positive if isinstance(positive, list) else [positive]
        fits = bool(values) and all(type(one) in (str, int, float) for one in values)
        self.need(
            fits,
            f"label {name}",
            positive,
            "the value that means 1 (in quotes), a list of such values, or a comparison such as "
            "'>= 4'; columns of 0 and 1 or true and false need only the name",
        )
        return name, LabelRule(compare="in", values=tuple(map(str, values)))

    def flag(self, key: str, value: object) -> bool:
        self.need(isinstance(value, bool), key, value, "true or false")
        return cast("bool", value)

    def count(self, key: str, value: object, least: int, most: int) -> int:
        fits = type(value) is int and least <= value <= most  # True is an instance of int
        self.need(fits, key, value, f"{least} to {most}")
        return cast("int", value)

    def choice(self, key: str, value: object, known: Collection[str]) -> str:
        if value not in known:
            raise ConfigError(f"{self.key}: {key} must be one of {', '.join(known)}, got {value}")
        return cast("str", value)

    def pair(
        self, raw: Mapping[str, Any], key: str, kinds: Collection[str], default: str
    ) -> tuple[str, str] | None:
        """Parse a column name, alone or with a kind as in ``{user: string}``; return the name and
        the kind, which must be in ``kinds``.
        """
        value = raw.get(key)
        if value is None:
            return None
        if isinstance(value, dict):
            self.need(len(value) == 1, key, value, "NAME or {NAME: KIND}")
            ((name, kind),) = value.items()
            return self.name(key, name), self.choice(f"{key} {name}:", kind, kinds)
        return self.name(key, value), default

    def time(self, raw: Mapping[str, Any]) -> tuple[str, TimeKind] | None:
        """Parse NAME, ``{NAME: integer}``, or a name with the format of its dates, ``{NAME:
        "%d/%m/%Y"}``.
        """
        value = raw.get("time")
        form = next(iter(value.values()), None) if isinstance(value, dict) else None
        forms = (form,) if isinstance(form, str) and "%" in form else ('"%d/%m/%Y"',)
        time = self.pair(raw, "time", ("date", "integer", *forms), "date")
        if time is not None and "%" in time[1]:
            rule = (
                "a format with codes of Python's strptime that contains the year, the month, and "
                'the day, such as "%d/%m/%Y %H:%M"; %f must follow a point'
            )
            self.need(reads_times(time[1]), f"time {time[0]}", time[1], rule)
        return time

    def dense(self, raw: object) -> tuple[DenseColumn, ...]:
        self.need(isinstance(raw, dict | list), "dense", raw, "names, or name: transform")
        self.names("dense", raw)
        settings = raw.items() if isinstance(raw, dict) else ((name, None) for name in raw)
        return tuple(self.dense_column(str(name), how) for name, how in settings)

    def dense_column(self, name: str, how: object) -> DenseColumn:
        place = f"dense {name}: "
        if how is None:
            return DenseColumn(name=name)
        if isinstance(how, str):
            how = {"transform": how}
        known = (
            f"one of {', '.join(TRANSFORMS)}, or a mapping with any of the keys "
            f"{', '.join(_DENSE_KEYS)}"
        )
        self.need(isinstance(how, dict), f"dense {name}", how, known)
        self.known(place, how, _DENSE_KEYS)
        transform, clip = how.get("transform"), how.get("clip")
        if transform is not None:
            self.choice(f"{place}transform", transform, tuple(TRANSFORMS))
        if clip is not None:
            fits = isinstance(clip, list) and len(clip) == 2 and all(map(_is_float32, clip))
            low, high = f"{-FLOAT32_MAX:g}", f"{FLOAT32_MAX:g}"
            rule = f"[LOW, HIGH], two numbers in the float32 range, {low} to {high}"
            self.need(fits and clip[0] < clip[1], f"{place}clip", clip, rule)
        buckets = how.get("buckets", 0)
        if buckets:
            self.count(f"{place}buckets", buckets, 2, _MAX_BUCKETS)
            if transform is not None:
                raise ConfigError(
                    f"{self.key}: {place}has both transform and buckets; remove transform, "
                    "because buckets use the original values"
                )
        kind = self.choice(f"{place}kind", how.get("kind", "real"), ("real", "integer"))
        missing = self.choice(f"{place}missing", how.get("missing", "zero"), ("zero", "indicator"))
        decimal = how.get("decimal", ".")
        self.need(decimal in (".", ","), f"{place}decimal", decimal, "'.' or ','")
        if decimal == "," and kind == "integer":
            raise ConfigError(
                f"{self.key}: {place}integers cannot have a decimal comma; remove `decimal`"
            )
        return DenseColumn(
            name=name,
            whole=kind == "integer",
            transform=transform,
            clip=(float(clip[0]), float(clip[1])) if clip else None,
            buckets=buckets,
            indicator=missing == "indicator",
            decimal=decimal,
        )

    def sparse(
        self, raw: object
    ) -> tuple[dict[str, Kind], tuple[ListColumn, ...], tuple[tuple[str, str], ...]]:
        self.need(isinstance(raw, dict | list), "sparse", raw, "names, or name: kind")
        self.names("sparse", raw)
        if isinstance(raw, list):
            return {str(name): "hex" for name in raw}, (), ()
        kinds: dict[str, Kind] = {}
        many: list[ListColumn] = []
        shared: list[tuple[str, str]] = []
        for name, how in raw.items():
            if isinstance(how, dict):
                self.known(f"sparse {name}: ", how, _SPARSE_KEYS)
                kind = how.get("kind", "string")
                if "vocabulary" in how:
                    place = f"sparse {name}: vocabulary"
                    shared.append((str(name), self.name(place, how["vocabulary"])))
                if set(how) - {"kind", "vocabulary"}:
                    many.append(self.list_column(str(name), how))
            else:
                kind = how
            self.choice(f"sparse {name}:", kind, KINDS)
            kinds[str(name)] = cast("Kind", kind)
        return kinds, tuple(many), tuple(shared)

    def list_column(self, name: str, how: Mapping[str, Any]) -> ListColumn:
        place = f"sparse {name}: "
        if "max" in how and "width" in how:
            raise ConfigError(
                f"{self.key}: {place}has both max and width; use max for lists of any length, or "
                "width for a fixed number of ids"
            )
        key = "width" if "width" in how else "max"
        weights, inline = how.get("weights"), None
        if isinstance(weights, dict):
            rule = "a column name, or {after: ':'} if values and weights share a cell, "
            self.need(
                set(weights) == {"after"}, f"{place}weights", weights, rule + "like a:0.5|b:1"
            )
            weights, inline = None, str(weights["after"])
        if "weights" in how and "width" in how:
            raise ConfigError(
                f"{self.key}: {place}has both weights and width; use max instead of width"
            )
        return ListColumn(
            name=name,
            separator=str(how.get("separator", "|")),
            most=self.count(f"{place}{key}", how.get(key, 64), 1, MAX_VALUES),
            fixed="width" in how,
            beyond=cast("Any", self.choice(f"{place}beyond", how.get("beyond", "error"), BEYOND)),
            weights=None if weights is None else self.weight(f"{place}weights", weights),
            inline=inline,
        )


def _is_float32(value: object) -> bool:
    return type(value) in (int, float) and abs(cast("float", value)) <= FLOAT32_MAX


def schema_from(content: Mapping[str, Any]) -> Schema:
    """Return the schema that ``asdict`` has written to a manifest."""
    raw = dict(content)
    many = tuple(ListColumn(**entry) for entry in raw.pop("many", ()))
    numbers = tuple(
        DenseColumn(**{**entry, "clip": tuple(entry["clip"]) if entry["clip"] else None})
        for entry in raw.pop("numbers", ())
    )
    shared = tuple((name, vocabulary) for name, vocabulary in raw.pop("vocabularies", ()))
    pairs = {key: tuple(raw[key]) if raw.get(key) else None for key in ("group", "time", "row_key")}
    lists = {key: tuple(raw[key]) for key in ("columns", "dense", "sparse", "kinds", "labels")}
    lists["missing_values"] = tuple(raw.get("missing_values", ()))
    if rule := raw.get("label_rule"):
        raw["label_rule"] = LabelRule(compare=rule["compare"], values=tuple(rule["values"]))
    return Schema(**{**raw, **pairs, **lists}, many=many, numbers=numbers, vocabularies=shared)


def parse_crosses(text: str, sparse: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Parse ``none``, or pairs of sparse columns such as ``C1xC2,C3xC4``."""
    if text.strip() in ("", "none"):
        return ()
    pairs = [_pair(item.strip(), sparse) for item in text.split(",")]
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ConfigError(
                "--crosses: each cross must combine two columns, such as C1xC2, got "
                f"{'x'.join(pair)!r}"
            )
        if absent := [name for name in pair if name not in sparse]:
            raise ConfigError(
                f"--crosses: {absent[0]!r} is not a sparse column; use one of "
                f"{choices(absent[0], sparse)}"
            )
    if len({frozenset(pair) for pair in pairs}) < len(pairs):
        raise ConfigError(
            f"--crosses: {text!r} lists one cross twice (AxB and BxA are the same cross); remove "
            "one of them"
        )
    return tuple((pair[0], pair[1]) for pair in pairs)


def _pair(text: str, sparse: tuple[str, ...]) -> tuple[str, ...]:
    """Return the two columns that ``AxB`` names. Column names may contain an x."""
    known = [(left, right) for left in sparse for right in sparse if f"{left}x{right}" == text]
    if len(known) > 1:
        ways = " or ".join(f"{left} with {right}" for left, right in known)
        raise ConfigError(f"--crosses: {text!r} can be read as {ways}; rename one of the columns")
    return known[0] if known else tuple(text.split("x"))

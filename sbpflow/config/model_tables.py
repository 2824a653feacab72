"""Defines a model's table settings in the configuration: ``model.fields`` and ``model.tables``.

Both groups map patterns to rules, like ``parallel.tables``, but rules combine key by key: the last
matching pattern that sets a key determines its value. If no pattern sets a key, the key's default
is used.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable

from sbpflow.embedding.plan.growth import MIN_ROWS, AdmitCount, Eviction, Growth
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import Count, NonNegative, Range

Rule = TypeVar("Rule", "FieldRule", "TableShape")

InitialRange = Annotated[
    NonNegative | None,
    Example(0.01),
    Key("results", "Initial values are uniform in [-initial_range, initial_range]."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """Configures the tables of the fields that match a pattern.

    Fields with the same ``table`` must share a vocabulary; otherwise, an ID would mean a different
    value in each field. Tables of fields with keys (``vocabulary: dynamic``) grow during training.
    """

    table: Annotated[
        str | None, Example("shop"), Key("results", "Name of the table that these fields share.")
    ] = None
    vocabulary: Annotated[
        Literal["fitted", "dynamic"] | None,
        Example("dynamic"),
        Key(
            "results",
            "dynamic: training assigns rows to 64-bit keys (`sbpflow prepare --keys`). "
            "fitted (the default): IDs come from the data set.",
        ),
    ] = None
    admit_count: Annotated[
        AdmitCount | None,
        Example(3),
        Key("results", "Number of occurrences at which a key gets a row. The default is 1."),
    ] = None
    forget_after_samples: Annotated[
        Count | None,
        Example(200_000),
        Key(
            "results",
            "Restart the count of a key without a row if the key does not occur within this"
            " many samples. By default, counts never restart.",
        ),
    ] = None
    evict: Annotated[Eviction | None, Example({"max_rows": 50_000_000})] = None

    def __post_init__(self) -> None:
        if self.vocabulary == "fitted" and (given := _growth_keys(self)):
            raise ConfigError(
                f"{given[0]} has no effect with vocabulary: fitted; remove it, or use vocabulary: "
                "dynamic"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """Sets the dimension, pooling, and initial values of the tables that match a pattern."""

    dim: Annotated[
        Annotated[int, Range(low=1, below=2**24)] | None,
        Example(8),
        Key("results", "Number of columns of the table. The default is the model's value."),
    ] = None
    pooling: Annotated[
        Literal["sum", "mean"] | None,
        Example("mean"),
        Key("results", "How the rows of a sample are pooled. The default is sum."),
    ] = None
    initial_range: InitialRange = None


@runtime_checkable
class TableRules(Protocol):
    """The interface of a model configuration with settings for fields and tables by pattern."""

    @property
    def fields(self) -> Mapping[str, FieldRule]:
        """Return rules by field name pattern."""
        ...

    @property
    def tables(self) -> Mapping[str, TableShape]:
        """Return shapes by table name pattern; table names are OUTPUT.FIELD or OUTPUT.TABLE."""
        ...


def shape_of(rules: TableRules, name: str) -> tuple[TableShape, str]:
    """Return the settings of table ``name``, and the last matching pattern that sets ``dim``."""
    dims = [p for p, shape in rules.tables.items() if fnmatchcase(name, p) and shape.dim]
    return TableShape(**_combined(rules.tables, name)), dims[-1] if dims else ""


def table_of(rules: TableRules, field: str) -> str | None:
    """Return the name of a field's shared table, which is set by the last matching pattern that
    sets ``table``; return None if no pattern does.
    """
    return _combined(rules.fields, field).get("table")


def growth_of(rules: TableRules | None, field: str, *, keyed: bool) -> Growth | None:
    """Return how the tables of a field grow, or None for a field with ids.

    ``keyed`` is True if the data has keys for the field. Raises ConfigError if ``keyed``
    contradicts ``rules``.
    """
    given = _combined({} if rules is None else rules.fields, field)
    key, growing = f"model.fields.{field}", given.get("vocabulary") == "dynamic"
    example = f"{{vocabulary: dynamic, evict: {{max_rows: {16 * MIN_ROWS}}}}}"
    if keyed and not growing:
        raise ConfigError(
            f"{key}: the data has 64-bit keys for this field, and training assigns rows to the "
            f"keys; use, for example, {key}: {example}"
        )
    if growing and not keyed and field.startswith(HASHED):
        raise ConfigError(
            f"{key}.vocabulary is dynamic, but a hashed cross cannot grow, because its ids are "
            f"hashes; after the other patterns, add {HASHED}*: {{vocabulary: fitted}}"
        )
    if growing and not keyed:
        raise ConfigError(
            f"{key}.vocabulary is dynamic, but the data has ids of a fitted vocabulary; prepare "
            f"the data with `--keys {field}`, or use {key}.vocabulary: fitted"
        )
    settings = {name: given[name] for name in _GROWTH if name in given}
    if not growing:
        if settings and "vocabulary" not in given:
            raise ConfigError(
                f"{key}.{min(settings)} has no effect without vocabulary: dynamic; add "
                f"vocabulary: dynamic, or remove {min(settings)}"
            )
        return None
    if "evict" not in settings:
        raise ConfigError(
            f"{key}.evict is not given, but a growing table needs a row limit; use, for example, "
            f"evict: {{max_rows: {16 * MIN_ROWS}}}"
        )
    return Growth(**settings)


HASHED = "hashed."  # the prefix of columns that the loader computes by hashing
_GROWTH = ("admit_count", "forget_after_samples", "evict")


def _growth_keys(rule: FieldRule) -> list[str]:
    return [name for name in _GROWTH if getattr(rule, name) is not None]


def _combined(rules: Mapping[str, Rule], name: str) -> dict[str, Any]:
    """Return the settings for ``name`` from all matching patterns.

    Later patterns override earlier ones, key by key.
    """
    settings: dict[str, Any] = {}
    for pattern, rule in rules.items():
        if fnmatchcase(name, pattern):
            given = {key: getattr(rule, key) for key in rule.__dataclass_fields__}
            settings |= {key: value for key, value in given.items() if value is not None}
    return settings


def check_matches(key: str, patterns: Iterable[str], names: Iterable[str], kind: str) -> None:
    """Raise ConfigError for a pattern that matches none of ``names``, which are the names of a
    ``kind`` such as "table".
    """
    known = list(names)
    plain = set(known)
    for pattern in patterns:
        if pattern in plain and _is_plain(pattern):
            continue
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, known, 3, cutoff=0.5) or known[:5]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there is no {kind}"
            raise ConfigError(f"{key}.{pattern} matches no {kind}; {hint}")


def last_matches(patterns: Sequence[str], names: Iterable[str]) -> dict[str, int]:
    """Return, for each name that a pattern matches, the place of the last such pattern."""
    # A scheme or a plan can have a pattern per table. Comparing all of them with all names would
    # take seconds for 1,000 tables, so patterns without special characters are looked up.
    plain = {pattern: place for place, pattern in enumerate(patterns) if _is_plain(pattern)}
    others = [(place, p) for place, p in enumerate(patterns) if not _is_plain(p)]
    places: dict[str, int] = {}
    for name in names:
        last = plain.get(name, -1)
        for place, pattern in others:
            if place > last and fnmatchcase(name, pattern):
                last = place
        if last >= 0:
            places[name] = last
    return places


def _is_plain(pattern: str) -> bool:
    """Return True if a pattern has no special characters, so it matches only its own text."""
    return not any(character in pattern for character in "*?[")

"""What a configuration may say of a model's tables: ``model.fields`` and ``model.tables``.

Both map patterns to rules, as ``parallel.tables`` does, but key by key: where several match
one name, the last that gives a key decides it; what none gives is as the model has it.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Protocol, runtime_checkable

from sbpflow.config.parse import Example
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.fields.ranges import NonNegative, Range

InitialRange = Annotated[
    NonNegative | None,
    Example(0.01),
    Key("results", "Initial values are uniform in [-initial_range, initial_range]."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """The fields that a pattern matches share a table called ``table`` in each output.

    They must share a vocabulary, or an id would be another value in each of them.
    """

    table: Annotated[str, Example("shop"), Key("results", "Name of the table they share.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """Shape, pooling, and initial values of the tables that a pattern matches."""

    dim: Annotated[
        Annotated[int, Range(low=1, below=2**24)] | None,
        Example(8),
        Key("results", "Columns; those of the model if not given."),
    ] = None
    pooling: Annotated[
        Literal["sum", "mean"] | None,
        Example("mean"),
        Key("results", "How the rows of one sample are combined; sum if not given."),
    ] = None
    initial_range: InitialRange = None


@runtime_checkable
class TableRules(Protocol):
    """A model's configuration that lets its tables be set by pattern."""

    @property
    def fields(self) -> Mapping[str, FieldRule]:
        """By patterns of field names."""
        ...

    @property
    def tables(self) -> Mapping[str, TableShape]:
        """By patterns of table names, which are OUTPUT.FIELD or OUTPUT.TABLE."""
        ...


def shape_of(rules: TableRules, name: str) -> tuple[TableShape, str]:
    """What the patterns say of table ``name``, and the last pattern that says its ``dim``."""
    found: dict[str, object] = {}
    said = ""
    for pattern, shape in rules.tables.items():
        if fnmatchcase(name, pattern):
            given = {key: getattr(shape, key) for key in shape.__dataclass_fields__}
            found |= {key: value for key, value in given.items() if value is not None}
            said = pattern if shape.dim is not None else said
    return TableShape(**found), said  # pyright: ignore[reportArgumentType]


def table_of(rules: TableRules, field: str) -> str | None:
    """The shared table of a field, by the last pattern that matches it; None for its own."""
    found = [rule.table for pattern, rule in rules.fields.items() if fnmatchcase(field, pattern)]
    return found[-1] if found else None


def check_matches(key: str, patterns: Iterable[str], names: Iterable[str], what: str) -> None:
    """ConfigError for a pattern that matches none of ``names``."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, known, 3, cutoff=0.5) or known[:5]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there is no {what}"
            raise ConfigError(f"{key}.{pattern}: matches no {what}; {hint}")

"""Defines a model's table settings in the configuration: ``model.fields`` and ``model.tables``.

Both groups map patterns to rules, like ``parallel.tables``, but rules combine key by key: the last
matching pattern with a key sets the key. A key that no pattern has keeps the model's value.
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
    """Lets the fields that a pattern matches share one table, named ``table``, in each output.

    The fields must share a vocabulary: otherwise one id would mean a different value in each field.
    """

    table: Annotated[str, Example("shop"), Key("results", "Name of the shared table.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """Sets dimension, pooling, and initial values of the tables that a pattern matches."""

    dim: Annotated[
        Annotated[int, Range(low=1, below=2**24)] | None,
        Example(8),
        Key("results", "Columns of the table. The default is the model's value."),
    ] = None
    pooling: Annotated[
        Literal["sum", "mean"] | None,
        Example("mean"),
        Key("results", "How the rows of one sample are pooled. The default is sum."),
    ] = None
    initial_range: InitialRange = None


@runtime_checkable
class TableRules(Protocol):
    """Describes a model configuration whose tables can be set by pattern."""

    @property
    def fields(self) -> Mapping[str, FieldRule]:
        """Return rules by pattern of field names."""
        ...

    @property
    def tables(self) -> Mapping[str, TableShape]:
        """Return shapes by pattern of table names, which are OUTPUT.FIELD or OUTPUT.TABLE."""
        ...


def shape_of(rules: TableRules, name: str) -> tuple[TableShape, str]:
    """Return the settings of table ``name`` by its patterns, and the last one that set ``dim``."""
    settings: dict[str, object] = {}
    dim_pattern = ""
    for pattern, shape in rules.tables.items():
        if fnmatchcase(name, pattern):
            given = {key: getattr(shape, key) for key in shape.__dataclass_fields__}
            settings |= {key: value for key, value in given.items() if value is not None}
            dim_pattern = pattern if shape.dim is not None else dim_pattern
    return TableShape(**settings), dim_pattern  # pyright: ignore[reportArgumentType]


def table_of(rules: TableRules, field: str) -> str | None:
    """Return a field's shared table, from the last matching pattern; None without one."""
    tables = [rule.table for pattern, rule in rules.fields.items() if fnmatchcase(field, pattern)]
    return tables[-1] if tables else None


def check_matches(key: str, patterns: Iterable[str], names: Iterable[str], kind: str) -> None:
    """Raise ConfigError for a pattern that matches none of ``names`` (each a ``kind``)."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, known, 3, cutoff=0.5) or known[:5]
            hint = f"did you mean {' or '.join(near)}?" if near else f"there is no {kind}"
            raise ConfigError(f"{key}.{pattern}: matches no {kind}; {hint}")

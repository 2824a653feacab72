"""Write docs/configuration.md, a list of all configuration keys, from the configuration classes.

PYTHONPATH=. python .ci/configuration.py
"""

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal

from sbpflow.config.parse import Aliases, MaxEntries, PathOr, Tagged, show
from sbpflow.config.schema import Config
from sbpflow.models.registry import MODELS
from sbpflow.runtime.fields.keys import key_of
from sbpflow.runtime.fields.ranges import Range
from sbpflow.runtime.files.remote_path import RemotePath

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration: every key

Set a key in the YAML file or after the command, as in `train.stop.patience=3`. PATTERN stands for a
[pattern](layouts.md#table-rules) of names, such as `"*.C1"`. If several patterns match a name, the
last pattern wins.

The last column states what a key affects, and thus whether an unfinished run may resume with a
different value (`checkpoint.resume: auto`):
* **results**: the key affects losses, so the value must not change.
* **scores**: the key affects only evaluations. The value may change unless `train.stop` or
  `train.plateau` is set.
* **execution**: the key affects where, how, or for how long a run executes. The value may change;
  losses then change only by rounding.

The fields of a [custom model or sparse optimizer](embeddings.md) are also keys, and affect results.

`PYTHONPATH=. python .ci/configuration.py` generates this page from the code.
"""
TABLE = "\n| key | value | default | description | affects |\n|---|---|---|---|---|\n"
SCALARS = {
    Path: "path",
    RemotePath: "URL",
    str: "text",
    int: "integer",
    float: "number",
    bool: "true, false",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A table row for one key, with each column as text."""

    name: str
    value: str
    default: str
    line: str
    affects: str


@dataclasses.dataclass
class Section:
    """A section of the page: groups of keys with the same rows, and the docstring of their
    class.
    """

    paths: list[str]
    condition: str
    text: str
    rows: list[Row]


def page() -> str:
    """Return the content of the page."""
    parts = [HEAD]
    for section in merged(sections()):
        title = ", ".join(f"`{path}`" for path in section.paths) + section.condition
        parts += [f"\n## {title}\n{section.text}\n", TABLE]
        group = f"{section.paths[0]}." if len(section.paths) == 1 else ""
        parts += [
            f"| `{group}{row.name}` | {row.value} | {row.default} | {row.line} | {row.affects} |\n"
            for row in section.rows
        ]
    return "".join(parts)


def merged(found: Iterator[Section]) -> list[Section]:
    """Merge sections with equal rows."""
    by_rows: dict[tuple[Row, ...], Section] = {}
    for section in found:
        first = by_rows.setdefault(tuple(section.rows), section)
        first.paths += [path for path in section.paths if path not in first.paths]
    return [section for rows, section in by_rows.items() if rows]


def sections() -> Iterator[Section]:
    """Yield a section for every group, in the order of the classes."""
    hints = typing.get_type_hints(Config, include_extras=True)
    for field in dataclasses.fields(Config):
        if field.name != "model":
            yield from sections_of(groups(hints[field.name])[""], field.name)
            continue
        tag = row_of(Config, field, hints["model"], MODELS)
        first, *others = [rows_of(kind) for kind in MODELS.values()]
        shared = [row for row in first if all(row in other for other in others)]
        text = "These keys are common to all built-in models."
        yield Section(["model"], "", text, [dataclasses.replace(tag, name="name"), *shared])
        for name, kind in MODELS.items():
            yield from sections_of(kind, "model", f" with `name: {name}`", but=shared)


def sections_of(
    kind: type[Any], path: str, condition: str = "", but: Sequence[Row] = ()
) -> Iterator[Section]:
    """Yield the section of the group at ``path``, without the rows in ``but``, and then the
    sections of its subgroups.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    text = inspect.cleandoc(kind.__doc__ or "").replace("``", "`")
    yield Section([path], condition, text, [row for row in rows_of(kind) if row not in but])
    for field in dataclasses.fields(kind):
        hint, below = hints[field.name], f"{path}.{field.name}"
        for name, group in groups(hint).items():
            condition = f" with `name: {name}`" if name else ""
            if name == "same":
                condition = " without `name`"
            elif field.default is None:
                condition = " (not given by default)"
            at = f"{below}.PATTERN" if is_mapping(hint) else below
            yield from sections_of(group, at, condition)


def rows_of(kind: type[Any]) -> list[Row]:
    """Return the rows of a group's own keys. Raise LookupError for a key without a description."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        row_of(kind, field, hints[field.name], groups(hints[field.name]))
        for field in dataclasses.fields(kind)
        if field.name != "name"
        if is_mapping(hints[field.name]) or "" not in groups(hints[field.name])
    ]


def row_of(
    kind: type[Any], field: "dataclasses.Field[Any]", hint: object, kinds: Mapping[str, type[Any]]
) -> Row:
    """Return the row of a field, or of the key ``name`` that selects among ``kinds``."""
    mark = key_of(kind, field.name)
    if mark is None:
        raise LookupError(f"{kind.__name__}.{field.name}: add Annotated[..., Key(affects, line)]")
    name, value, default = field.name, value_of(hint), default_of(field)
    if kinds and not is_mapping(hint):
        chosen = getattr(default_value(field), "name", next(iter(kinds)))
        name, default = f"{name}.name", f"`{chosen}`"
        value = ", ".join(f"`{kind}`" for kind in kinds)
    return Row(name, value, default, mark.line, mark.affects)


def groups(hint: object) -> dict[str, type[Any]]:
    """Return the possible groups of a field by name, with "" for a group without a name."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        tagged = [mark.kinds(None) for mark in args[1:] if isinstance(mark, Tagged)]
        return dict(tagged[0]) if tagged else groups(args[0])
    if origin in (typing.Union, types.UnionType):
        return {name: kind for arg in args for name, kind in groups(arg).items()}
    if origin is Mapping:
        return groups(args[1])
    if not dataclasses.is_dataclass(hint):
        return {}
    tags = [field.default for field in dataclasses.fields(hint) if field.name == "name"]
    return {tags[0] if tags else "": typing.cast("type[Any]", hint)}


def is_mapping(hint: object) -> bool:
    """Return whether a field maps patterns to values."""
    if typing.get_origin(hint) is typing.Annotated:
        return is_mapping(typing.get_args(hint)[0])
    return typing.get_origin(hint) is Mapping


def value_of(hint: object) -> str:
    """Describe the values that a type allows."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _marked(value_of(args[0]), args[1:])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(value_of(arg) for arg in args if arg is not types.NoneType)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        count = "" if args[-1] is Ellipsis else f"of {len(args)} "
        return f"list {count}({value_of(args[0])})"
    if origin is Mapping:
        return "groups by pattern" if groups(args[1]) else f"by pattern: {value_of(args[1])}"
    return SCALARS.get(hint, "group")


def _marked(text: str, marks: tuple[Any, ...]) -> str:
    for mark in marks:
        if isinstance(mark, Range):
            text += f" {_range_text(mark)}"
        if isinstance(mark, Aliases):
            text += "".join(f"; `{word}` is `{value}`" for word, value in mark.words.items())
        if isinstance(mark, MaxEntries):
            text += f", at most {mark.count}"
        if isinstance(mark, PathOr):
            text = f"{', '.join(f'`{word}`' for word in mark.words)}, or a path"
    return text


def _range_text(mark: Range) -> str:
    """Format a range, with large powers of two written as 2^n."""
    parts = [(">=", mark.low), (">", mark.above), ("<=", mark.high), ("<", mark.below)]
    return " and ".join(f"{sign} {_bound(bound)}" for sign, bound in parts if bound is not None)


def _bound(bound: float) -> str:
    power = math.frexp(bound)
    return f"2^{power[1] - 1}" if bound >= 2**20 and power[0] == 0.5 else f"{bound:,.15g}"


def default_value(field: "dataclasses.Field[Any]") -> object:
    """Return the default of a field, or None if the field has no default."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def default_of(field: "dataclasses.Field[Any]") -> str:
    """Return the default in YAML form."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    default = default_value(field)
    return "not given" if default is None else f"`{show(default)}`"


if __name__ == "__main__":
    PAGE.write_text(page())

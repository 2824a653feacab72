"""Converts a YAML tree to frozen dataclasses, and rejects unknown keys and invalid values. Checks
types and ranges, and suggests near matches. The classes in ``schema`` define the keys through
annotations, defaults, and marks (``Range``, ...).
"""

import dataclasses
import difflib
import functools
import itertools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import yaml

from sbpflow.config.renamed import RENAMED
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example
from sbpflow.runtime.fields.ranges import Range
from sbpflow.runtime.files.local_path import PathError, local_path
from sbpflow.runtime.files.remote_path import RemotePath, any_path

Choices = Mapping[str, Mapping[str, type[Any]]]
C = TypeVar("C")
MAX_INT = 2**63 - 1
MAX_ENTRIES = 10_000  # Maximum number of entries in a list or group.
_MAX_SHOWN = 200  # Maximum length of a value in a message.


@dataclass(frozen=True, slots=True)
class PathOr:
    """Marks a string that is one of ``words`` or a path; if ``urls``, the path may be a URL."""

    words: tuple[str, ...]
    urls: bool = False


@dataclass(frozen=True, slots=True)
class Aliases:
    """Alternative words for some values: {word: value}."""

    words: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Tagged:
    """Marks a group whose key ``name`` selects one of the dataclasses ``kinds(name)``. Without an
    example value, the default of ``name`` is ``default``.
    """

    kinds: Callable[[object], Mapping[str, type[Any]]]
    default: str | None = None


@dataclass(frozen=True, slots=True)
class MaxEntries:
    """The maximum number of entries in a list."""

    count: int


def build(
    cls: type[C],
    tree: object,
    choices: Choices = MappingProxyType({}),
    split: Callable[[str], list[str]] = lambda key: key.split("."),
) -> C:
    """Return an instance of the dataclass ``cls`` from a mapping; nested groups are dataclasses
    too.

    For fields of ``cls`` whose key ``name`` selects a dataclass, ``choices`` maps each value of
    ``name`` to its dataclass. The first value is the default. ``split`` splits dotted keys, for the
    message about a key with dots. Raises ConfigError.
    """
    try:
        return _build(cls, tree, "", choices)
    except _UnknownKeyError as error:
        all_keys = _all_keys(cls, "")
        for name, kinds in choices.items():
            all_keys += [key for kind in kinds.values() for key in _all_keys(kind, name)]
        raise ConfigError(error.message(all_keys, split)) from None


class _UnknownKeyError(ConfigError):
    def __init__(self, group: str, name: str, siblings: list[str], value: object) -> None:
        super().__init__(_join(group, name))
        self.group, self.name, self.siblings, self.value = group, name, siblings, value

    def message(self, all_keys: list[str], split: Callable[[str], list[str]]) -> str:
        """Return a message with the new name of a renamed key, with the groups of a key with dots,
        or with similar keys: those of the same group or, failing that, of other groups.
        """
        group, name, key = self.group, self.name, _join(self.group, self.name)
        if (current := RENAMED.get(name)) in self.siblings:
            return f"{key} was renamed to {current}; write {_join(group, current)}"
        if "." in name and name.partition(".")[0] in self.siblings:
            nested = _head(self.value)
            for part in reversed(split(key)[len(split(group)) if group else 0 :]):
                nested = {part: nested}
            return (
                f"{key}: a key must not contain dots; nest the groups (for example, "
                f"{_shown(nested)})"
            )
        near = [_join(group, match) for match in difflib.get_close_matches(name, self.siblings, 3)]
        if not near:
            leaves = {key.rpartition(".")[2] for key in all_keys}
            matches = difflib.get_close_matches(name.rpartition(".")[2], leaves, 1)
            # Models and optimizers share some keys, but each key is suggested only once.
            near = list(dict.fromkeys(k for k in all_keys if k.rpartition(".")[2] in matches))
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        known = f"{group or 'the top level'} has the keys {', '.join(self.siblings)}"
        return f"{key}: unknown key; {hint}{known}"


def _build(cls: type[C], tree: object, key: str, choices: Choices = MappingProxyType({})) -> C:
    if not isinstance(tree, Mapping):
        _refuse(key, tree, "a group of keys", _first_key(cls))
    hints = _hints(cls)
    fields = _fields(cls)
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in fields:
            raise _UnknownKeyError(key, str(name)[:_MAX_SHOWN], list(fields), value)
        if name in choices:
            values[name] = _parse_tagged(value, choices[name], name, next(iter(choices[name])))
            continue
        example = _example(fields[name], hints[name])
        values[name] = parse(value, hints[name], _join(key, name), example)
    for name, kinds in choices.items():
        if name not in values:
            values[name] = _parse_tagged({}, kinds, name, next(iter(kinds)))
    for name, field in fields.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            example = show(_example(field, hints[name]))
            raise ConfigError(
                f"{_join(key, name)} is not given; use, for example, {name}: {example}"
            )
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_full_key(str(error), key, fields)) from error


def _full_key(message: str, key: str, fields: Mapping[str, object]) -> str:
    """Return the error message of a class, with the full dotted key instead of the relative key."""
    group, _, name = key.rpartition(".")
    first = re.match(r"\w*", message)
    if key and first is not None and first[0] in fields:
        return f"{key}.{message}"
    return f"{group}.{message}" if group and message.startswith(f"{name}.") else message


def parse(value: object, kind: Any, key: str, example: object) -> Any:
    """Return ``value`` as type ``kind``; otherwise raise a ConfigError with ``example``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _parse_marked(value, args, key, example)
    if origin in (typing.Union, types.UnionType):
        return _parse_union(value, args, key, example)
    if origin is Literal and all(isinstance(arg, str) for arg in args):
        return _parse_literal(value, args, key)
    if origin is tuple and args:
        return _parse_tuple(value, kind, key, example)
    if origin in (Mapping, dict) and args:
        return _parse_mapping(value, args[1], key, example)
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast("type[Any]", kind), value, key)
    if kind not in _SCALARS:
        raise ConfigError(
            f"{key}: a configuration cannot have fields of type {kind}; use bool, int, float, str, "
            "Path, a Literal of strings, tuple[T, ...], Mapping[str, T], a dataclass, or T | None"
        )
    return _SCALARS[kind](value, key, example)


def _parse_marked(value: object, args: tuple[Any, ...], key: str, example: object) -> Any:
    for mark in args[1:]:
        if isinstance(mark, Tagged):
            given: object = value.get("name") if isinstance(value, Mapping) else None
            default = mark.default if example is None else _tag(type(example))
            return _parse_tagged(value, mark.kinds(given), key, default)
    for mark in args[1:]:
        if isinstance(mark, Aliases) and isinstance(value, str):
            value = mark.words.get(value, value)
    parsed: Any = parse(value, args[0], key, example)
    if parsed is None:
        return None
    for mark in args[1:]:
        if isinstance(mark, Range) and not mark.holds(parsed):
            raise ConfigError(f"{key} must be {mark}, got {brief(value)}{_eg(key, example)}")
        if isinstance(mark, MaxEntries) and len(parsed) > mark.count:
            raise ConfigError(
                f"{key}: the list has {len(parsed):,} entries, but at most {mark.count} are "
                f"supported{_eg(key, example)}"
            )
        if isinstance(mark, PathOr) and parsed not in mark.words:
            parsed = str(_parse_path(parsed, key, example, any_path if mark.urls else local_path))
    return parsed


def _parse_union(value: object, args: tuple[Any, ...], key: str, example: object) -> Any:
    """Parse a value of type ``T | None``, ``int | tuple``, ``int | Literal``, a path, or a class
    with a ``name``."""
    kinds = [arg for arg in args if arg is not types.NoneType]
    if value is None and len(kinds) < len(args):
        return None
    words = [kind for kind in kinds if typing.get_origin(kind) is Literal]
    if len(kinds) > 1 and words:
        if isinstance(value, str):
            also = ("true", "false") if bool in kinds else ()
            return _parse_literal(value, typing.get_args(words[0]), key, also)
        kinds = [kind for kind in kinds if kind not in words]
    if len(kinds) == 1:
        return parse(value, kinds[0], key, example)
    if RemotePath in kinds:
        return _parse_path(value, key, example, any_path)
    if all(_is_group(kind) and "name" in _fields(kind) for kind in kinds):
        name = None if example is None else _tag(type(example))
        return _parse_tagged(value, {_tag(kind): kind for kind in kinds}, key, name)
    is_list = isinstance(value, list | tuple)
    fitting = (kind for kind in kinds if (typing.get_origin(kind) is tuple) == is_list)
    return parse(value, next(fitting, kinds[0]), key, example)


def _parse_tagged(
    value: object, by_name: Mapping[str, type[Any]], key: str, default: str | None
) -> Any:
    """Return an instance of the dataclass that the key ``name``, or else ``default``, selects."""
    if not isinstance(value, Mapping):
        _refuse(key, value, "a group of keys", by_name[default or next(iter(by_name))]())
    name: object = value.get("name", default)
    if name is None:
        raise ConfigError(
            f"{key}.name is not given; use one of {', '.join(by_name)} (for example, name: "
            f"{next(iter(by_name))})"
        )
    if not isinstance(name, str) or name not in by_name:
        near = difflib.get_close_matches(str(_head(name)), by_name, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{key}.name: {brief(name)} is unknown; use one of {', '.join(by_name)}{hint}"
        )
    for other in value:
        users = [tag for tag, kind in by_name.items() if other in _fields(kind)]
        if users and name not in users:
            raise ConfigError(
                f"{key}.{other} is a setting of {', '.join(users)}, not of {name}; remove it, or "
                f"give the whole group (for example, {key}: {show({'name': name})})"
            )
    kind = by_name[name]
    if name == _tag(kind):
        return _build(kind, value, key)
    others = {other: item for other, item in value.items() if other != "name"}
    return dataclasses.replace(_build(kind, others, key), name=name)


def _parse_literal(
    value: object, choices: tuple[str, ...], key: str, also: tuple[str, ...] = ()
) -> str:
    """Return ``value`` as one of ``choices``. Error messages also list ``also``, the legal values
    that are not strings.
    """
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if text in choices:
        return text
    near = difflib.get_close_matches(str(_head(value)), choices, 1)
    raise ConfigError(
        f"{key}: {brief(value)} is not one of {', '.join((*also, *choices))}"
        f"{_eg(key, (near or choices)[0])}"
    )


def _parse_tuple(value: object, kind: Any, key: str, example: object) -> tuple[Any, ...]:
    args = typing.get_args(kind)
    if not isinstance(value, list | tuple):
        _refuse(key, value, _kind_name(kind), example)
    items = typing.cast("Sequence[object]", value)
    if len(items) > MAX_ENTRIES:
        raise ConfigError(
            f"{key}: the list has {len(items):,} entries, but at most {MAX_ENTRIES:,} are "
            f"supported{_eg(key, example)}"
        )
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
    if len(items) != len(kinds):
        _refuse(key, value, _kind_name(kind), example)
    shown = example[0] if isinstance(example, tuple) and example else _example_of(args[0])
    return tuple(
        parse(item, kinds[index], f"{key}[{index}]", shown) for index, item in enumerate(items)
    )


def _parse_mapping(value: object, kind: Any, key: str, example: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(key, value, "a group of keys", example)
    if len(value) > MAX_ENTRIES:
        raise ConfigError(
            f"{key}: the group has {len(value):,} keys, but at most {MAX_ENTRIES:,} are "
            "supported; use patterns that match several names"
        )
    return {str(name): parse(item, kind, f"{key}.{name}", None) for name, item in value.items()}


def _parse_exactly(kind: type[Any]) -> Callable[[object, str, object], Any]:
    def parse_exactly(value: object, key: str, example: object) -> object:
        return value if isinstance(value, kind) else _refuse(key, value, _NAMES[kind], example)

    return parse_exactly


def _parse_int(value: object, key: str, example: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) <= MAX_INT:
            return value
        raise ConfigError(
            f"{key}: {brief(value)} exceeds 64 bits; use a whole number up to {MAX_INT}"
            f"{_eg(key, example)}"
        )
    _refuse(key, value, _kind_name(int), example)


def _parse_float(value: object, key: str, example: object) -> float:
    """Return a number, which may be given as a string, because YAML 1.1 reads ``1e-3``, which has
    no dot, as a string.
    """
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    _refuse(key, value, _kind_name(float), example)


def _parse_path(
    value: object, key: str, example: object, read: Callable[[str], Any] = local_path
) -> Any:
    if not isinstance(value, str) or not value:
        _refuse(key, value, _kind_name(Path), example)
    try:
        return read(value)
    except PathError as error:
        raise ConfigError(f"{key}: {error}") from error


_SCALARS: dict[Any, Callable[[object, str, object], Any]] = {
    bool: _parse_exactly(bool),
    int: _parse_int,
    float: _parse_float,
    str: _parse_exactly(str),
    Path: _parse_path,
}
_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string (put quotes around it)",
    Path: "a path (a string)",
}


def _kind_name(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _kind_name(args[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind_name(arg) for arg in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list in which each entry is {_kind_name(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)} entries, each of which is {_kind_name(args[0])}"
    return _NAMES.get(kind, "a group of keys")


def _refuse(key: str, value: object, expected: str, example: object) -> NoReturn:
    given = "nothing" if value is None else f"{_shown(_head(value))} ({type(value).__name__})"
    raise ConfigError(f"{key or 'config'}: {given} is not {expected}{_eg(key, example)}")


def _eg(key: str, example: object) -> str:
    if example is None:
        return ""
    return f" (for example, {key.rpartition('.')[2]}: {_shown(example)})"


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    """Return annotations with their marks; cached, because resolving annotations is slow."""
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _fields(cls: Any) -> "dict[str, dataclasses.Field[Any]]":
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def _all_keys(kind: Any, prefix: str) -> list[str]:
    """Return every dotted key under ``kind``, including keys of alternative classes."""
    if typing.get_origin(kind) is typing.Annotated:
        inside, *marks = typing.get_args(kind)
        tagged = [each for m in marks if isinstance(m, Tagged) for each in m.kinds(None).values()]
        keys = {key for each in tagged or [inside] for key in _all_keys(each, prefix)}
        return sorted(keys)
    if _is_group(kind):
        hints = _hints(kind)
        return [key for n, hint in hints.items() for key in _all_keys(hint, _join(prefix, n))]
    groups = [arg for arg in typing.get_args(kind) if _is_group(arg)]
    return sorted({key for group in groups for key in _all_keys(group, prefix)}) or [prefix]


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _tag(kind: Any) -> str:
    return str(_fields(kind)["name"].default)


def _example(field: "dataclasses.Field[Any]", hint: Any) -> object:
    if field.default is not MISSING and field.default not in (None, ()):
        return field.default
    marked = _example_of(hint)
    if marked is None and field.default_factory is not MISSING:
        return field.default_factory()
    return marked


def _example_of(hint: Any) -> object:
    marks = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    return next((mark.value for mark in marks if isinstance(mark, Example)), None)


def _first_key(cls: type[Any]) -> object:
    hints = _hints(cls)
    name, field = next(iter(_fields(cls).items()))
    return {name: _example(field, hints[name])}


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def plain(value: Any) -> Any:
    """Return the YAML form of a config value: dicts, lists, strings, and numbers, also of numpy."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path | RemotePath) else value


def show(value: object) -> str:
    """Return ``value`` as one line of YAML."""
    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def _shown(value: object) -> str:
    """Return ``value`` as one line of YAML or, if it contains an object, as its ``repr``."""
    try:
        return show(value)
    except yaml.representer.RepresenterError:  # an object, given in Python
        return brief(value)


def brief(value: object) -> str:
    """Return the ``repr`` of a value, cut to a length that fits in a message."""
    text = repr(_head(value))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}.. ({len(text):,} characters)"


def _head(value: object, depth: int = 4) -> object:
    """Return ``value`` cut to a maximum number of entries, levels, and characters."""
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return f"{value[:_MAX_SHOWN]}.. ({len(value):,} characters)"
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not depth:
        return "..."
    if isinstance(value, Mapping):
        items = list(itertools.islice(typing.cast("Mapping[Any, object]", value).items(), 9))
        shown: dict[Any, object] = {name: _head(item, depth - 1) for name, item in items[:8]}
        return {**shown, **({"...": "..."} if len(items) > 8 else {})}
    listed = typing.cast("Sequence[object]", value)
    return [*(_head(item, depth - 1) for item in listed[:8]), *(["..."] if len(listed) > 8 else [])]

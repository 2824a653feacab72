"""Lists every configuration key by its dotted name, read from the annotations of its classes."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from sbpflow.config.parse import Tagged
from sbpflow.config.schema import Config
from sbpflow.models.registry import MODELS
from sbpflow.runtime.files.remote_path import RemotePath

SCALARS = {
    Path: "path",
    RemotePath: "path",
    str: "text",
    int: "number",
    float: "number",
    bool: "flag",
}


@dataclasses.dataclass(frozen=True)
class Key:
    """A configuration key; ``kind`` is path, text, number, flag, choice, list, or group.

    ``needs`` contains the overrides that the key depends on.
    """

    kind: str
    needs: tuple[str, ...] = ()


def keys_of(kind: Any, key: str, needs: tuple[str, ...] = ()) -> Iterator[tuple[str, Key]]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        yield from _keys_of_marked(args, key, needs)
    elif dataclasses.is_dataclass(kind):
        yield from _keys_of_group(kind, key, needs)
    elif origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in args if arg is not types.NoneType]
        tagged = len(kinds) > 1 and dataclasses.is_dataclass(kinds[0])
        for each in kinds:
            tag = each.__dataclass_fields__["name"].default if tagged else ""
            yield from keys_of(each, key, (*needs, f"{key}.name={tag}") if tag else needs)
    elif origin is Literal:
        yield key, Key("choice", needs)
    elif origin is tuple:
        texts = str in typing.get_args(args[0]) or args[0] is str
        yield key, Key("text" if texts else "list", needs)
    elif origin in (Mapping, dict):
        yield key, Key("group", needs)
        more = (f"{key}.*.sbp=B",) if "sbp" in getattr(args[1], "__dataclass_fields__", ()) else ()
        yield from keys_of(args[1], f"{key}.*", (*needs, *more))
    elif kind in SCALARS:
        yield key, Key(SCALARS[kind], needs)
    else:
        raise TypeError(f"{key}: {kind} is not a known kind")


def _keys_of_marked(
    args: tuple[Any, ...], key: str, needs: tuple[str, ...]
) -> Iterator[tuple[str, Key]]:
    tagged = next((mark.kinds(None) for mark in args[1:] if isinstance(mark, Tagged)), None)
    if tagged is None:
        yield from keys_of(args[0], key, needs)
    for tag, cls in (tagged or {}).items():
        yield from keys_of(cls, key, (*needs, f"{key}.name={tag}"))


def _keys_of_group(kind: Any, key: str, needs: tuple[str, ...]) -> Iterator[tuple[str, Key]]:
    yield key, Key("group", needs)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        yield from keys_of(hints[field.name], f"{key}.{field.name}", needs)


def _all() -> Iterator[tuple[str, Key]]:
    hints = typing.get_type_hints(Config, include_extras=True)
    for name, hint in hints.items():
        if name != "model":
            yield from keys_of(hint, name)
    for name, kind in MODELS.items():
        yield from keys_of(kind, "model", (f"model.name={name}",))


KEYS: Mapping[str, Key] = dict(_all())

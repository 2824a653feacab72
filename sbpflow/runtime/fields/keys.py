"""Defines ``Key``, which annotates a configuration field with its effect and description."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_type_hints

Affects = Literal["results", "scores", "execution"]


@dataclass(frozen=True, slots=True)
class Key:
    """Annotates a key with its effect and its description in docs/configuration.md.

    * ``results``: the key affects the loss, so its value must not change when a run resumes.
    * ``scores``: the key affects only evaluations. Its value may change unless ``train.stop`` or
      ``train.plateau`` is set.
    * ``execution``: the key affects where, how, or how long a run executes. Its value may change:
      losses then differ only by rounding, because sums may be computed in another order.

    If ``device`` is given, the value may suit only one type of device, and a saved value is dropped
    on another type; ``device`` is the reason why CPUs do not support the key, or "" if they do.

    A field without a Key inherits the effect of its group. Fields of users' own classes have the
    effect ``results``.
    """

    affects: Affects
    line: str
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """An example value, for a key whose default is not a useful example."""

    value: Any


def key_of(kind: type, name: str) -> Key | None:
    """Return a dataclass field's Key, or None if there is none."""
    field = getattr(kind, "__dataclass_fields__", {}).get(name)
    if field is None:
        return None
    # With ``from __future__ import annotations``, the annotations of a user's class are strings.
    hint = _hints(kind).get(name) if isinstance(field.type, str) else field.type
    marks = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Key)), None)


def device_keys(kind: type) -> dict[str, str]:
    """Return the ``device`` of each key of a dataclass that depends on the type of device."""
    keys = ((name, key_of(kind, name)) for name in getattr(kind, "__dataclass_fields__", {}))
    return {name: key.device for name, key in keys if key is not None and key.device is not None}


@cache
def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:  # a name that is imported only under ``TYPE_CHECKING``, or local
        return {}

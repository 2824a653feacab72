"""What an event of ``metrics.jsonl`` must have for a report page to show it."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from sbpflow.config.parse import brief
from sbpflow.runtime.files.json_file import JsonError, is_count, is_number, object_of

Event = Mapping[str, Any]
MOST = 1e100  # of any number: charts take differences and products of them


def is_value(value: object) -> bool:
    """Whether it can be on a chart."""
    return is_number(value) and abs(value) < MOST  # pyright: ignore[reportArgumentType]


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))  # pyright: ignore


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_FIGURE = _or_none(is_value)
_NAMED: Mapping[str, Callable[[Any], bool]] = {
    "step": is_count,
    "steps": is_count,
    "num_rows": is_count,
    "split": _is_text,
    "column": _is_text,
    "rows": _list_of(is_count),
    "observed": _list_of(is_value),
    "value": _or_none(is_count),
    "peak_memory_bytes": _list_of(is_count),
}
# {event: the keys that it always has}; further ones are numbers or null.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "loss", "samples_per_s"),
    "eval": ("step", "split", "num_rows"),
    "calibration": ("step", "split", "rows", "predicted", "observed"),
    "slice": (
        "step",
        "split",
        "column",
        "num_rows",
        "value",
        "auc",
        "logloss",
        "calibration_ratio",
    ),
    "final": ("steps", "samples_per_s"),
}


def check_event(given: object) -> Event:
    """The event, if it is one; JsonError naming the key that is wrong."""
    event = object_of(given, "it")
    kind = event.get("event")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise JsonError(f"event is {brief(kind)}, not one of {', '.join(_KEYS)}")
    time_of(event)
    if missing := [key for key in _KEYS[kind] if key not in event]:
        raise JsonError(f"it has no {missing[0]}")
    together: list[str] = []  # numbers that are there if others are
    if kind == "step" and event.get("move_forward_ms") is not None:
        together = ["step_ms", "data_ms", *(key for key in event if key.startswith("move_"))]
    if kind == "final" and event.get("predicted") is not None:
        together = ["positives"]
    if missing := [key for key in together if event.get(key) is None]:
        raise JsonError(f"it has no number for {missing[0]}")
    for key, value in event.items():
        fits = _NAMED.get(key, _FIGURE)
        if kind == "calibration" and key == "predicted":
            fits = _list_of(is_value)
        if key not in ("event", "time") and not fits(value):
            raise JsonError(f"{key} is {brief(value)}, which it cannot be")
    lists = ("rows", "predicted", "observed")
    if kind == "calibration" and len({len(event[key]) for key in lists}) > 1:
        raise JsonError(f"{', '.join(lists)} are not of one length")
    return event


def time_of(event: Event) -> datetime:
    """When it was written; JsonError for what is no time with its zone."""
    given: object = event.get("time")
    try:
        found = datetime.fromisoformat(given) if isinstance(given, str) else None
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise JsonError(f"time is {brief(given)}, not such as 2026-03-01T12:00:00+00:00")
    return found

"""Validates the events of ``metrics.jsonl`` for a report page."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from sbpflow.config.parse import brief
from sbpflow.runtime.files.json_file import JsonError, is_count, is_number, object_of

Event = Mapping[str, Any]
MAX_VALUE = 1e100  # limit for chart values, so that their differences and products stay finite


def is_value(value: object) -> bool:
    """Return whether the value can be drawn in a chart."""
    return is_number(value) and abs(value) < MAX_VALUE  # pyright: ignore[reportArgumentType]


def _or_none(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or valid(value)


def _list_of(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(valid, value))  # pyright: ignore


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_id(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


_FIGURE = _or_none(is_value)
_NAMED: Mapping[str, Callable[[Any], bool]] = {
    "step": is_count,
    "steps": is_count,
    "best_step": is_count,
    "num_rows": is_count,
    "split": _is_text,
    "column": _is_text,
    "rows": _list_of(is_count),
    "observed": _list_of(is_value),
    "value": _or_none(_is_id),
    "peak_memory_bytes": _list_of(is_count),
    "rank_step_ms": _list_of(is_value),
    "rank_data_ms": _list_of(is_value),
    "rank_wait_ms": _list_of(is_value),
    "slow_rank": is_count,
    "slow_host": _is_text,
}
# The required keys of each event. Values of keys outside ``_NAMED`` are numbers or null, except
# ``predicted`` of calibration events, which is a list.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "loss", "samples_per_s"),
    "ranks": ("step", "rank_step_ms", "rank_data_ms", "rank_wait_ms"),
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
    """Return the event if it is valid; else raise a JsonError that names the invalid key."""
    event = object_of(given, "it")
    kind = event.get("event")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise JsonError(f"event must be one of {', '.join(_KEYS)}, got {brief(kind)}")
    time_of(event)
    if missing := [key for key in _KEYS[kind] if key not in event]:
        raise JsonError(f"it has no {missing[0]}")
    dependent: list[str] = []  # required if another key is present
    if kind == "step" and event.get("move_forward_ms") is not None:
        dependent = ["step_ms", "data_ms", *(key for key in event if key.startswith("move_"))]
    if kind == "final" and event.get("predicted") is not None:
        dependent = ["positives"]
    if missing := [key for key in dependent if event.get(key) is None]:
        raise JsonError(f"it has no number for {missing[0]}")
    for key, value in event.items():
        valid = _NAMED.get(key, _FIGURE)
        if kind == "calibration" and key == "predicted":
            valid = _list_of(is_value)
        if key not in ("event", "time") and not valid(value):
            raise JsonError(f"{key} cannot be {brief(value)}")
    lists = ("rows", "predicted", "observed")
    if kind == "calibration" and len({len(event[key]) for key in lists}) > 1:
        raise JsonError(f"{', '.join(lists)} have different lengths")
    return event


def time_of(event: Event) -> datetime:
    """Return the time of an event; raise JsonError if it is not a time with a time zone."""
    given: object = event.get("time")
    try:
        time = datetime.fromisoformat(given) if isinstance(given, str) else None
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise JsonError(
            f"time must have a form such as 2026-03-01T12:00:00+00:00, got {brief(given)}"
        )
    return time

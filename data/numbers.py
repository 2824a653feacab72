"""Check the ranges of numeric options, and parse options with values by column."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from sbpflow.errors import ConfigError, choices

MAX_SEED = 2**63 - 1
MAX_WORKERS = 256
Value = TypeVar("Value")


def check_ranges(*checks: tuple[str, float, float, float]) -> None:
    """Raise ConfigError for the first (key, value, min, max) whose value is out of range or NaN."""
    for key, value, least, most in checks:
        if not least <= value <= most:
            raise ConfigError(f"{key} must be between {least} and {most}, got {value}")


def by_column(
    key: str,
    text: str,
    number: Callable[[str], Value],
    example: str,
    columns: Sequence[str],
    *,
    takes_one: bool = True,
) -> tuple[tuple[str, Value], ...]:
    """Parse ``C1=3,C20=12`` or, with ``takes_one``, a single number for all ``columns``.

    Raises ConfigError for any other text, an unknown column, or a column with two values.
    """
    try:
        if takes_one and "=" not in text:
            return tuple((name, number(text)) for name in columns)
        pairs = [item.split("=") for item in text.split(",")]
        values = tuple((name.strip(), number(value)) for name, value in pairs)
    except ValueError as error:
        raise ConfigError(f"{key} must be {example}, got {text!r}") from error
    names = [name for name, _ in values]
    if unknown := [name for name in names if name not in columns]:
        known = choices(unknown[0], columns)
        raise ConfigError(f"{key}: {unknown[0]!r} is not a column; use one of {known}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{key}: {text!r} contains {twice[0]} twice; give each column one value")
    return values


def epoch_unit(low: float, high: float) -> float | None:
    """Return the number of time units per second if the range from ``low`` to ``high`` looks like
    times since 1970 (years 1998 to 2039), or else None.
    """
    units = (1.0, 1e3, 1e6)
    return next((unit for unit in units if 9e8 * unit <= low and high <= 2.2e9 * unit), None)


def minute_text(seconds: float) -> str:
    """Return a time since 1970 as text such as ``2024-05-01 12:30``. Unlike ``datetime``, numpy
    supports all years.
    """
    moment = np.datetime64(int(seconds // 1), "s")
    return str(np.datetime_as_string(moment, unit="m")).replace("T", " ")

"""Numbers in options: checks of their ranges, and values by column."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from sbpflow.errors import ConfigError

MAX_SEED = 2**63 - 1
MAX_WORKERS = 256
Value = TypeVar("Value")


def check_ranges(*checks: tuple[str, float, float, float]) -> None:
    """Raise ConfigError for the first (key, value, least, most) that is out of range or NaN."""
    for key, value, least, most in checks:
        if not least <= value <= most:
            raise ConfigError(f"{key}: {value} must be from {least} to {most}")


def by_column(
    key: str, text: str, number: Callable[[str], Value], example: str, every: Sequence[str] = ()
) -> tuple[tuple[str, Value], ...]:
    """Parse ``C1=3,C20=12``, or one number for the columns ``every``.

    ConfigError for other forms and for a column with two values.
    """
    try:
        if every and "=" not in text:
            return tuple((name, number(text)) for name in every)
        pairs = [item.split("=") for item in text.split(",")]
        values = tuple((name.strip(), number(value)) for name, value in pairs)
    except ValueError as error:
        raise ConfigError(f"{key}: {text!r} must be {example}") from error
    names = [name for name, _ in values]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{key}: {text!r} has {twice[0]} twice; give each column one value")
    return values

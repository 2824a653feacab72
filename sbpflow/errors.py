"""Defines exception classes, separated by what a caller should do about them.

A message names the key or row, the given value, the rule and a value that would pass.
"""

from typing import Never, get_args


class _OneLineError(ValueError):
    """An error whose message is one line, plus one line for each of its ``details``.

    Messages quote keys, values, paths and column names, which may contain anything. So newlines
    and other unprintable characters are escaped.
    """

    def __init__(self, message: str = "", *details: str) -> None:
        super().__init__("\n  ".join(map(_printable, (message, *details))))
        self._lines = (message, *details)

    def __reduce__(self) -> tuple[type["_OneLineError"], tuple[str, ...]]:
        return type(self), self._lines  # pickle the lines, because the text escapes newlines


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ConfigError(_OneLineError):
    """A configuration key, a command-line value or the environment is invalid."""


class SbpError(ValueError):
    """A layout or an operation on laid-out tensors is not legal."""


class DataError(_OneLineError):
    """Input rows or a prepared set are invalid."""


class PlanError(ValueError):
    """No placement of the tables satisfies the given limits."""


class MetricError(ValueError):
    """A metric is undefined for the given predictions or labels."""


class TrainingError(ValueError):
    """A run cannot continue: its loss is not a number, or replicas differ."""


class CheckpointError(_OneLineError):
    """A checkpoint cannot be written, or is invalid."""


class StoreError(OSError):
    """Requests to a store of objects fail; the message has no credentials."""


class ReplicaError(RuntimeError):
    """Replicas differ although they must be equal; this is a bug in the program."""


class AbsentError(RuntimeError):
    """Some ranks did not join at startup; the message names these ranks."""


class ServerLostError(AbsentError):
    """An embedding server died, does not answer, or serves another launch; the message names it."""


class PeerLostError(RuntimeError):
    """A collective or a store operation failed because its peer is gone or does not respond."""


class PeerStoppedError(RuntimeError):
    """Another rank received a stop signal, so this rank ends, too."""


def unknown_value(what: str, value: Never, legal: object) -> ValueError:
    """Return the error for the end of a chain of branches over ``legal``.

    ``legal`` is a Literal or a union of classes. Because ``value`` has type Never, pyright reports
    branches that do not cover all of ``legal``.
    """
    names = [getattr(choice, "__name__", str(choice)) for choice in get_args(legal)]
    return ValueError(f"{what}: {value!r} is not supported; use {' or '.join(names)}")


# These errors are shown without a traceback, because their messages are complete. An SbpError
# has a traceback, because it is a mistake in a program, whose line matters.
MESSAGE_ERRORS = (
    ConfigError,
    DataError,
    PlanError,
    MetricError,
    TrainingError,
    CheckpointError,
    StoreError,
)

"""Defines the exception classes, one for each way in which a caller should react.

A message names the key or row, the given value, the rule, and a value that would pass.
"""

import difflib
from collections.abc import Collection
from typing import Never, get_args

_MOST_CHOICES = 50  # Messages list at most this many names in full.


class _OneLineError(ValueError):
    """An error with a one-line message, followed by one line for each of its ``details``.

    Messages quote keys, values, paths, and column names, which may contain any character. Newlines
    and other unprintable characters are therefore escaped.
    """

    def __init__(self, message: str = "", *details: str) -> None:
        super().__init__("\n  ".join(map(_printable, (message, *details))))
        self._lines = (message, *details)

    def __reduce__(self) -> tuple[type["_OneLineError"], tuple[str, ...]]:
        # Pickle the original lines, because newlines are escaped in the text.
        return type(self), self._lines


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ConfigError(_OneLineError):
    """A configuration key, a command-line value, or the environment is invalid."""


class SbpError(ValueError):
    """A layout or an operation on laid-out tensors is not legal."""


class DataError(_OneLineError):
    """Input rows or a prepared set are invalid."""


class PlanError(ValueError):
    """No placement of the tables satisfies the given limits."""


class MetricError(ValueError):
    """A metric is undefined for the given predictions or labels."""


class TrainingError(ValueError):
    """A run cannot continue, for example because its loss is NaN."""


class CheckpointError(_OneLineError):
    """A checkpoint is missing or invalid, or cannot be written."""


class StoreError(OSError):
    """A request to an object store failed. The message never contains credentials."""


class ReplicaError(RuntimeError):
    """Replicas of a tensor differ between ranks, which indicates a bug in the program."""


class AbsentError(RuntimeError):
    """Some ranks did not join at startup. The message lists them."""


class ServerLostError(AbsentError):
    """An embedding server has died, does not respond, or serves another launch. The message names
    the server.
    """


class PeerLostError(RuntimeError):
    """A collective, or an operation on the key-value store of the ranks, failed because a peer is
    gone or does not respond.
    """


class PeerStoppedError(RuntimeError):
    """Another rank received a stop signal, so this rank stops too."""


def choices(name: str, known: Collection[str]) -> str:
    """List ``known`` for a message about the unknown ``name``: all names, or, if there are many,
    the most similar ones.
    """
    if len(known) <= _MOST_CHOICES:
        return ", ".join(known)
    near = difflib.get_close_matches(name, known, 5, cutoff=0.0)
    return f"{', '.join(near)}, and {len(known) - len(near):,} others"


def unknown_value(what: str, value: Never, legal: object) -> ValueError:
    """Return the error to raise in the last ``else`` of a chain of branches over ``legal``.

    ``legal`` is a Literal or a union of classes. Because ``value`` has type Never, pyright reports
    any chain that does not handle all of ``legal``.
    """
    names = [getattr(choice, "__name__", str(choice)) for choice in get_args(legal)]
    return ValueError(f"{what}: {value!r} is not supported; use {' or '.join(names)}")


# The commands print these errors without a traceback, because their messages say what to do. An
# SbpError is printed with its traceback, because it reports a mistake in a program, and the line
# number helps to find that mistake.
MESSAGE_ERRORS = (
    ConfigError,
    DataError,
    PlanError,
    MetricError,
    TrainingError,
    CheckpointError,
    StoreError,
)

"""The errors that callers tell apart, by what should be done about them.

A message names the key or row, the value given, the rule and a value that would pass.
"""

from typing import Never, get_args


class _OneLineError(ValueError):
    """Its message is one line, and one for each of ``details``.

    A newline or another character in them that is not printable is escaped: keys, values, paths and
    names of columns are quoted in messages, and may hold anything.
    """

    def __init__(self, message: str = "", *details: str) -> None:
        super().__init__("\n  ".join(map(_printable, (message, *details))))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ConfigError(_OneLineError):
    """A configuration key, command-line value or environment does not fit."""


class SbpError(ValueError):
    """A layout or an operation on laid-out tensors is not legal."""


class DataError(_OneLineError):
    """Input rows or a prepared set cannot be used as they are."""


class PlanError(ValueError):
    """No placement of the tables satisfies the limits given."""


class MetricError(ValueError):
    """A metric is not defined for the predictions or labels given."""


class TrainingError(ValueError):
    """A run cannot go on: its loss is not a number, or copies that must agree do not."""


class CheckpointError(_OneLineError):
    """A checkpoint cannot be written, or cannot be used as it is."""


class ReplicaError(RuntimeError):
    """Copies that must agree do not: a fault of the program."""


class AbsentError(RuntimeError):
    """Ranks did not come to the start; the message names them."""


class PeerLostError(RuntimeError):
    """A collective or the store failed because its other end is gone or does not answer."""


class PeerStoppedError(RuntimeError):
    """Another rank was told to stop, and this one ends with it."""


def unknown_value(what: str, value: Never, legal: object) -> ValueError:
    """The error at the end of branches over ``legal``, a Literal or a union of classes.

    ``value`` is of type Never: pyright refuses branches that leave one of ``legal`` out.
    """
    names = [getattr(one, "__name__", str(one)) for one in get_args(legal)]
    return ValueError(f"{what}: {value!r} is not known here; use {' or '.join(names)}")


# One message says it all; where they were raised does not matter to who reads it. An SbpError is a
# mistake in a program, whose line does matter.
MESSAGE_ERRORS = (
    ConfigError,
    DataError,
    PlanError,
    MetricError,
    TrainingError,
    CheckpointError,
)

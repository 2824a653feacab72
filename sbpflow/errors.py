"""The errors a user can cause, and nothing else.

Each message names the key or row, the value given, the rule and a value that would pass.
"""


class ConfigError(ValueError):
    """A configuration key, command-line value or environment does not fit."""


class SbpError(ValueError):
    """A layout or an operation on laid-out tensors is not legal."""


class DataError(ValueError):
    """Input rows or a prepared set cannot be used as they are."""


class PlanError(ValueError):
    """No placement of the tables satisfies the limits given."""


class MetricError(ValueError):
    """A metric is not defined for the predictions or labels given."""


class TrainingError(ValueError):
    """A run cannot go on: its loss is not a number, or copies that must agree do not."""


USER_ERRORS = (ConfigError, SbpError, DataError, PlanError, MetricError, TrainingError)

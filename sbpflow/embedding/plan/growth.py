"""Describes tables that grow during training: when keys are assigned rows, and when keys are
evicted.

The key space is always divided into ``NUM_BUCKETS`` buckets. A rank owns a range of buckets, and
every bucket has an equal share of the rows (up to rounding). All keys without a row share row 0.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_type_hints

from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import Count, Range, Rate, broken_rule

NUM_BUCKETS = 2**14
# with fewer rows per bucket, some buckets fill up long before the table does
MIN_ROWS = 4 * NUM_BUCKETS
MAX_COUNT = 2**30  # Occurrences are counted up to this number.
SWEPT_BUCKETS = 16  # Every batch removes the idle keys of this many buckets.
# A key map may need 1.6 slots per key, and must have fewer than 2^31 slots.
MAX_ROWS_OF_PART = 2**30
Policy = Literal["lru", "lfu"]
AdmitCount = Annotated[int, Range(low=1, high=MAX_COUNT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Sets when keys are evicted: after a time without use, or when their bucket has no free row
    for a new key.
    """

    max_rows: Annotated[
        int,
        Example(16 * MIN_ROWS),
        Key("results", "Number of rows of each of the field's tables; at least 65536."),
    ]
    policy: Annotated[
        Policy,
        Key("results", "Evict the least recently (`lru`) or least frequently (`lfu`) used key."),
    ] = "lru"
    idle_samples: Annotated[
        Count | None,
        Key(
            "results",
            "Evict keys that have not occurred for this many samples. By default, keys are not "
            "evicted for being idle.",
        ),
    ] = None
    idle_time: Annotated[
        Rate | None,
        Key(
            "results",
            "Evict keys that have not occurred for this much event time, in units of the set's "
            "time column (microseconds for dates). By default, keys are not evicted for being "
            "idle.",
        ),
    ] = None

    def __post_init__(self) -> None:
        _check(self, "evict.")
        if self.max_rows < MIN_ROWS:
            raise ConfigError(
                f"evict.max_rows must be {MIN_ROWS} or more, because the rows are divided evenly "
                f"over {NUM_BUCKETS} buckets of keys, got {self.max_rows}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a table assigns its rows to 64-bit keys.

    A key is assigned a row at its ``admit_count``-th occurrence. Earlier occurrences are forgotten
    if the key does not occur again within ``forget_after_samples`` samples.
    ``TableConfig.num_rows`` equals ``evict.max_rows``.
    """

    evict: Eviction
    admit_count: Annotated[
        AdmitCount, Key("results", "Number of occurrences after which a key gets a row.")
    ] = 1
    forget_after_samples: Annotated[
        Count | None,
        Key(
            "results",
            "Forget keys without rows that have not occurred for this many samples; null means "
            "never.",
        ),
    ] = None

    def __post_init__(self) -> None:
        _check(self, "")


@dataclass(slots=True)
class Totals:
    """The counts of a growing field as of the last completed batch.

    ``live`` keys have rows; ``pending`` keys have occurred, but not often enough to be assigned a
    row. ``admitted``, ``evicted``, ``forgotten``, and the lookups are totals since the table was
    created. ``pending_lookups`` and ``refused_lookups`` count lookups that read the shared row.
    Pending keys had not occurred often enough to be assigned a row. Refused keys had occurred often
    enough, but the batch used all rows of their bucket for other keys.
    """

    live: int = 0
    pending: int = 0
    admitted: int = 0
    evicted: int = 0
    forgotten: int = 0
    lookups: int = 0
    pending_lookups: int = 0
    refused_lookups: int = 0

    def add(self, other: "Totals") -> None:
        for name in TOTALS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


TOTALS = tuple(field.name for field in fields(Totals))


@dataclass(slots=True, kw_only=True)
class GrowthCounts(Totals):
    """The counts of a growing field over all ranks, and the number of live keys of each rank."""

    max_rows: int
    rows_per_rank: tuple[int, ...] = ()

    @property
    def load_factor(self) -> float:
        """Return the fraction of rows that are assigned to keys."""
        return self.live / self.max_rows


def has_idle_time(growth: Growth | None) -> bool:
    """Return True if keys are evicted by event time."""
    return growth is not None and growth.evict.idle_time is not None


def most_freed(growth: Growth, num_rows: int) -> int:
    """Return the maximum number of rows that a batch frees because their keys are idle."""
    if growth.evict.idle_samples is None and growth.evict.idle_time is None:
        return 0
    return -(-num_rows * SWEPT_BUCKETS // NUM_BUCKETS)


def _check(value: Eviction | Growth, prefix: str) -> None:
    hints = get_type_hints(type(value), include_extras=True)
    for field in fields(value):
        given = getattr(value, field.name)
        if rule := broken_rule(given, hints[field.name]):
            raise ConfigError(f"{prefix}{field.name} must be {rule}, got {given}")


def first_row_of(bucket: int, num_rows: int) -> int:
    """Return the first row of a bucket in a table of ``num_rows`` rows."""
    return num_rows * bucket // NUM_BUCKETS


def first_address(bucket: int) -> int:
    """Return the first address of a bucket. The end of the last bucket is 2^63, one more than int64
    can represent.
    """
    return (bucket - NUM_BUCKETS // 2) * (2**64 // NUM_BUCKETS)

"""Assign rows to train, val and test: by order, by date, by seeded ratio, or by file name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatch
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.manifest import SPLITS
from sbpflow.errors import ConfigError, unknown_value

_EXAMPLES = (
    "time:0.8,0.1,0.1 or time:ts<2024-05-01,ts<2024-05-08 or ratio:0.8,0.1,0.1 or "
    "file:val=day_22*,test=day_23*"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INTEGER = re.compile(r"-?[0-9]{1,19}")


SplitKind = Literal["time", "date", "ratio", "file", "test"]


@dataclass(frozen=True, slots=True)
class SplitRule:
    """A rule that assigns rows to splits.

    The kinds ``time`` and ``ratio`` use the fractions of train, val and test, and ``file`` uses
    file name patterns. ``date`` uses a column and two times: rows before the first time belong to
    train, rows from the first time on belong to val, and rows from the second time on belong to
    test. ``test`` makes all rows test rows.
    """

    kind: SplitKind
    fractions: tuple[float, float, float] = (0.0, 0.0, 0.0)
    patterns: tuple[tuple[str, str], ...] = ()
    column: str = ""
    times: tuple[str, str] = ("", "")
    """The two times as strings: ``2024-05-01``, ``2024-05-01 12:00:00`` or an integer"""

    def check_column(self, time: tuple[str, str] | None) -> None:
        """Raise ConfigError if the column is not the time column of the schema, or if the times do
        not fit the column's kind.
        """
        if self.kind != "date":
            return
        if time is None or time[0] != self.column:
            given = f"its time is {time[0]!r}" if time else "it has no time"
            raise ConfigError(
                f"--split: {self.column!r} is not the time column of the schema ({given}); set "
                f"`time: {self.column}` in the schema"
            )
        train, val = self._moments(time[1])
        if train > val:
            raise ConfigError(f"--split: {self.times[0]} is after {self.times[1]}; swap them")

    def of_times(self, times: NDArray[np.int64], kind: str) -> NDArray[np.uint8]:
        """Return the splits of ``times`` (int64 [n]) as uint8 [n]: 0 train, 1 val, 2 test."""
        return np.searchsorted(self._moments(kind), times, side="right").astype(np.uint8)

    def _moments(self, kind: str) -> tuple[int, int]:
        train, val = (_moment(text, kind) for text in self.times)
        return train, val

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """Return the numbers of the first rows of val and test if ``num_rows`` rows are split in
        order.
        """
        train, val, _ = self.fractions
        return round(num_rows * train), round(num_rows * (train + val))

    def check_files(self, names: Sequence[str]) -> None:
        """Raise ConfigError if no file is assigned to one of the patterns, or if no file remains
        for train.
        """
        used = {self._pattern_of(name) for name in names}
        if idle := [f"{split}={pattern}" for split, pattern in self.patterns
                    if (split, pattern) not in used]:  # fmt: skip
            raise ConfigError(
                f"--split: no file goes to {idle[0]} (the files include {', '.join(names[:8])}, "
                f"and each goes to the first pattern that matches it); write {_EXAMPLES}"
            )
        if self.patterns and None not in used:
            raise ConfigError(
                f"--split: val and test take all files and leave none for train; write {_EXAMPLES}"
            )

    def check_train(self, num_rows: int, num_train: int | None = None) -> None:
        """Raise ConfigError if none of ``num_rows`` rows are in train. ``num_train`` is needed
        unless the split is by ``time``.
        """
        if (self.bounds(num_rows)[0] if num_train is None else num_train) == 0:
            raise ConfigError(
                f"--split: no row goes to train (rows: {num_rows}), but ids and vocabularies "
                "are made from train rows; write, for example, time:1,0,0"
            )

    def of_piece(self, file_name: str, key: tuple[int, ...], num_rows: int) -> NDArray[np.uint8]:
        """Return the split of each of a piece's rows (uint8 [num_rows]): 0 train, 1 val, 2 test.
        For a split by ``time``, which is decided later, the result is 0 for all rows.
        """
        if self.kind == "ratio":
            draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(num_rows) / 2.0**64
            bounds = np.cumsum(self.fractions)[:2]
            return np.searchsorted(bounds, draws, side="right").astype(np.uint8)
        if self.kind == "test":
            return np.full(num_rows, SPLITS.index("test"), dtype=np.uint8)
        if self.kind == "time":
            return np.zeros(num_rows, dtype=np.uint8)
        if self.kind == "file":
            place = self._pattern_of(file_name)
            return np.full(num_rows, SPLITS.index(place[0]) if place else 0, dtype=np.uint8)
        if self.kind == "date":
            raise RuntimeError("of_piece cannot split by date; use of_times")
        raise unknown_value("--split", self.kind, SplitKind)

    def _pattern_of(self, file_name: str) -> tuple[str, str] | None:
        """Return the split of a file, and the first pattern that matches the file's name; return
        None if no pattern matches, in which case the file belongs to train.
        """
        fits = (place for place in self.patterns if fnmatch(file_name, place[1]))
        return next(fits, None)


def parse_split(text: str) -> SplitRule:
    """Parse ``time:0.8,0.1,0.1``, ``time:ts<A,ts<B``, ``ratio:...`` or
    ``file:val=PATTERN,test=PATTERN``.
    """
    kind, _, rest = text.partition(":")
    if kind == "file":
        return SplitRule("file", patterns=_patterns(text, rest))
    if kind == "time" and "<" in rest:
        return _by_date(text, rest)
    if kind not in ("time", "ratio"):
        raise ConfigError(f"--split: {text!r} is not a kind of split; write {_EXAMPLES}")
    try:
        train, val, test = (float(part) for part in rest.split(","))
    except ValueError as error:
        raise ConfigError(f"--split: {text!r} needs three fractions; write {_EXAMPLES}") from error
    if not (train > 0 and val >= 0 and test >= 0 and abs(train + val + test - 1) < 1e-6):
        raise ConfigError(
            "--split: the fractions must be 0 or more and add up to 1, and the fraction of train "
            f"must be above 0, got {text!r}; write, for example, time:0.8,0.1,0.1"
        )
    return SplitRule(cast("SplitKind", kind), (train, val, test))


def _by_date(text: str, rest: str) -> SplitRule:
    """Parse ``ts<A,ts<B`` or ``ts<A``. With a single time, rows from this time on belong to
    test.
    """
    pairs = [item.strip().rpartition("<") for item in rest.split(",")]
    names = {name.strip() for name, _, _ in pairs if name}
    times = tuple(time.strip() for _, _, time in pairs)
    if len(names) != 1 or not pairs[0][0] or not 1 <= len(times) <= 2 or not all(times):
        raise ConfigError(
            f"--split must name one column and one or two times, got {text!r}; write {_EXAMPLES}"
        )
    (name,) = names
    for time in times:
        if not _INTEGER.fullmatch(time):
            _moment(time, "date")
    return SplitRule("date", column=name, times=(times[0], times[-1]))


def _moment(text: str, kind: str) -> int:
    """Return a time as it is stored: an integer unchanged, or a date as microseconds since 1970
    (UTC).
    """
    if kind == "integer":
        if not _INTEGER.fullmatch(text):
            raise ConfigError(
                f"--split: the time must be an integer, like the values of the column, got {text!r}"
            )
        return int(text)
    if kind != "date" and "%" not in kind:
        raise ValueError(
            f"the kind of time must be date, integer, or a format such as %d/%m/%Y, got {kind!r}"
        )
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            "--split: the time must be a date (for example, 2024-05-01 or 2024-05-01T12:00:00), "
            f"got {text!r}"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _patterns(text: str, rest: str) -> tuple[tuple[str, str], ...]:
    pairs = [item.partition("=") for item in rest.split(",")]
    if any(split not in ("val", "test") or not pattern for split, _, pattern in pairs):
        raise ConfigError(
            f"--split must assign files to val or test, got {text!r}; write {_EXAMPLES}"
        )
    return tuple((split, pattern) for split, _, pattern in pairs)

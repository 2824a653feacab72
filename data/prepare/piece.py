"""A parsed piece of the input: its good rows, their lists, and the bad lines."""

from dataclasses import dataclass, field

import polars as pl

BLANK = "blank line"
"""Counted as a reason, but blank lines are not bad lines: no row is lost."""
_SHOWN_CHARS = 80
_SHOWN_LINES = 5


@dataclass
class BadLines:
    """How many lines of a piece were left out, by reason, and the first few of them."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of lines that were left out and may have been rows."""
        return sum(self.counts.values()) - self.blank

    @property
    def blank(self) -> int:
        """Number of blank lines."""
        return self.counts.get(BLANK, 0)

    def add(self, number: int, reason: str, line: bytes) -> None:
        """Count line ``number`` of the piece."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if reason != BLANK and len(self.examples) < _SHOWN_LINES:
            shown = line[:_SHOWN_CHARS].decode("ascii", "backslashreplace")
            self.examples.append((number, reason, shown))


@dataclass(frozen=True)
class Piece:
    """The good rows of a number of lines, how many lines there were, and the bad lines."""

    frame: pl.DataFrame
    num_lines: int
    bad: BadLines
    lists: dict[str, pl.DataFrame] = field(default_factory=dict)
    """By list column: rows of ``row`` uint32, ``key`` (null for an empty element), and ``check``
    and ``weight`` if any. The column of that name in the frame has the number of values per row."""
    cut: dict[str, int] = field(default_factory=dict)
    """By list column: values dropped because a row had more than the maximum."""

"""A piece of the input, parsed: its good rows, the lists in them, and the lines left out."""

from dataclasses import dataclass, field

import polars as pl

BLANK = "blank line"
"""Counted like a reason for a bad line, and not as one: nothing is lost with it."""
_SHOWN_CHARS = 80
_SHOWN_LINES = 5


@dataclass
class BadLines:
    """How many lines of a piece were left out and why, with the first few of them."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Lines left out that may have been rows."""
        return sum(self.counts.values()) - self.blank

    @property
    def blank(self) -> int:
        """Lines without anything in them."""
        return self.counts.get(BLANK, 0)

    def add(self, number: int, reason: str, line: bytes) -> None:
        """Count line ``number`` of the piece."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if reason != BLANK and len(self.examples) < _SHOWN_LINES:
            shown = line[:_SHOWN_CHARS].decode("ascii", "backslashreplace")
            self.examples.append((number, reason, shown))


@dataclass(frozen=True)
class Piece:
    """The good rows of some lines, how many lines there were, and the bad ones."""

    frame: pl.DataFrame
    num_lines: int
    bad: BadLines
    lists: dict[str, pl.DataFrame] = field(default_factory=dict)
    """By sparse column with several values: ``row`` uint32, ``key`` (null: an empty element),
    ``check`` and ``weight`` where there are; the frame has the number of values of each row."""
    cut: dict[str, int] = field(default_factory=dict)
    """By the same columns: values left out beyond the most that a row may have."""

"""Define a parsed piece of the input: good rows, their lists, and bad lines."""

from dataclasses import dataclass, field

import polars as pl

BLANK = "blank line"
"""The reason for skipping blank lines, which do not count as bad lines because no row is lost"""
_SHOWN_CHARS = 80
_SHOWN_LINES = 5


@dataclass
class BadLines:
    """Counts the skipped lines of a piece by reason, and stores the first few bad lines."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[int, str, str, str]] = field(default_factory=list)
    """Line number, reason, text, and bad cell of the first few bad lines; the cell may be unknown
    ("")
    """

    @property
    def total(self) -> int:
        """Return the number of skipped lines that are not blank."""
        return sum(self.counts.values()) - self.blank

    @property
    def blank(self) -> int:
        """Return the number of blank lines."""
        return self.counts.get(BLANK, 0)

    def add(self, number: int, reason: str, line: bytes, cell: str = "") -> None:
        """Count line ``number`` of the piece as skipped for ``reason``. ``cell`` is the bad cell,
        if it is known.
        """
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if reason != BLANK and len(self.examples) < _SHOWN_LINES:
            shown = line.decode("utf-8", "backslashreplace")[:_SHOWN_CHARS]
            self.examples.append((number, reason, shown, cell[:_SHOWN_CHARS]))


@dataclass(frozen=True)
class Piece:
    """The good rows of consecutive lines of the input, the number of lines, and the bad lines."""

    frame: pl.DataFrame
    num_lines: int
    bad: BadLines
    lists: dict[str, pl.DataFrame] = field(default_factory=dict)
    """The elements of each list column, as a frame with the columns ``row`` (uint32), ``key`` (null
    for an empty element), and, if needed, ``check`` and ``weight``. The column with the list's name
    in ``frame`` contains the number of values in each row.
    """
    cut: dict[str, int] = field(default_factory=dict)
    """Number of values dropped because a row had more than the maximum, by list column"""
    num_extra: int = 0
    """Number of lines of the text beyond one per record and one for a header"""
    label_cells: list[str] = field(default_factory=list)
    """Some cells of the label column, if the schema has a label rule or a label is bad"""
    strings: dict[str, pl.DataFrame] = field(default_factory=dict)
    """Distinct ``key``, ``check`` and ``text`` by sparse column; empty unless strings are kept"""

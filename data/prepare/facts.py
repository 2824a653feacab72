"""Describe the columns of a sample: their types, ranges, distinct values and missing cells."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from sbpflow.data.prepare.cells import LABELS, REAL_PATTERN, times

ColumnKind = Literal["empty", "integer", "real", "boolean", "date", "list", "text", "other"]

_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
_LIST_MARKS = ("|", ";")
_MIN_LISTS = 0.2
"""Minimum fraction of cells with a separator in a text column of lists"""
_SHOWN_CHARS = 24


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """Describes one column of a sample."""

    name: str
    kind: ColumnKind
    values: pl.Series
    """Values without missing cells: numbers, text, or microseconds since 1970 for dates"""
    missing: float
    """Fraction of missing cells"""
    distinct: int
    mark: str = ""
    """Separator of the values in a text cell of a list column"""
    longest: int = 0
    """Number of values of the longest list"""
    is_number_text: bool = False
    """True for real numbers in text, where 3.0 is not an integer"""

    @property
    def words(self) -> set[str]:
        """Return the words of the name in lower case, such as user and id for ``userId``."""
        return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", self.name)}

    @property
    def is_unique(self) -> bool:
        """Return True if all rows have different values."""
        return self.missing == 0 and self.distinct == len(self.values) >= 20

    @property
    def is_sorted(self) -> bool:
        """Return True if the values are in ascending order."""
        return self.values.is_sorted()

    def shown(self) -> str:
        """Return a comment that describes the column."""
        parts = [f"{self.distinct:,} values"]
        if self.kind in ("integer", "real"):
            parts.append(f"{self.values.min():g} to {self.values.max():g}")
        if self.kind in ("text", "boolean") and self.distinct <= 4:
            texts = [_brief(value) for value in self.values.unique().sort().to_list()]
            parts = [" or ".join(texts) if self.distinct <= 2 else ", ".join(texts)]
        if self.kind == "list":
            parts.append(f"lists of up to {self.longest}")
        if self.missing:
            parts.append(f"{100 * self.missing:.1f}% missing")
        return ", ".join(parts)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 4] + "...'"


def column_facts(frame: pl.DataFrame) -> list[ColumnFacts]:
    """Return the facts of every column."""
    return [_facts(frame[name]) for name in frame.columns]


def _facts(cells: pl.Series) -> ColumnFacts:
    if isinstance(cells.dtype, pl.Categorical | pl.Enum):
        cells = cells.cast(pl.String)
    values = cells.drop_nulls()
    missing = 1 - len(values) / max(len(cells), 1)
    kind, values, mark = _kind(values)
    longest = int(values.list.len().max() or 0) if kind == "list" else 0
    distinct = (values.explode() if kind == "list" else values).n_unique() if len(values) else 0
    return ColumnFacts(
        name=cells.name,
        kind=kind,
        values=values,
        missing=missing,
        distinct=distinct,
        mark=mark,
        longest=longest,
        is_number_text=cells.dtype == pl.String and kind == "real",
    )


def _kind(values: pl.Series) -> tuple[ColumnKind, pl.Series, str]:
    """Return the kind, the converted values, and the separator of lists in text."""
    kind = values.dtype
    if len(values) == 0 or kind == pl.Null:
        return "empty", values, ""
    if kind == pl.String:
        return _text_kind(values)
    if kind == pl.Boolean:
        return "boolean", values.cast(pl.String), ""
    if kind.is_integer():
        return "integer", values, ""
    if kind.is_float():
        whole = bool((values == values.floor()).all())
        return ("integer", values.cast(pl.Int64, strict=False), "") if whole else (
            "real", values, ""
        )  # fmt: skip
    if kind == pl.Date or isinstance(kind, pl.Datetime):
        return "date", values.cast(pl.Datetime("us")).cast(pl.Int64), ""
    if isinstance(kind, pl.List) and not kind.inner.is_nested():
        return "list", values, ""
    return "other", values, ""


def _text_kind(texts: pl.Series) -> tuple[ColumnKind, pl.Series, str]:
    def all_match(pattern: str) -> bool:
        return bool(texts.str.contains(pattern).all())

    if all_match(_INTEGER):
        return "integer", texts.cast(pl.Int64), ""
    is_code = bool(texts.str.contains("^0[0-9]+$").any())  # 00501 and 501 may differ
    if not is_code and all_match(f"^{REAL_PATTERN}$|(?i)^nan$"):
        numbers = texts.str.strip_chars(" +").cast(pl.Float64, strict=False)
        return "real", numbers.fill_nan(None).drop_nulls(), ""
    if texts.is_in(tuple(LABELS)).all():
        return "boolean", texts, ""
    moments = times(texts, "date")
    if moments.null_count() == 0:
        return "date", moments, ""
    for mark in _LIST_MARKS:
        lists = texts.str.split(mark)
        shares = float(texts.str.contains(mark, literal=True).mean() or 0)
        if shares >= _MIN_LISTS and lists.explode().n_unique() < texts.n_unique():
            return "list", lists, mark
    return "text", texts, ""


def of_words(columns: Sequence[ColumnFacts], words: str) -> list[ColumnFacts]:
    """Return the columns whose names contain one of these words."""
    wanted = set(words.split())
    return [column for column in columns if column.words & wanted]

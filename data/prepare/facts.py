"""Find facts about the columns of a sample: type, range, distinct values, and missing cells."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import polars as pl

from sbpflow.data.prepare.cells import LABELS, REAL_PATTERN, times
from sbpflow.data.prepare.tables import COLUMN_TYPES

ColumnKind = Literal["empty", "integer", "real", "boolean", "date", "list", "text", "other"]

_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
_LIST_MARKS = ("|", ";")
_MIN_LISTS = 0.2
"""Minimum fraction of cells with a separator for a text column to be treated as lists"""
_SHOWN_CHARS = 24
_MISSING = ("NA", "N/A", "n/a", "NULL", "Null", "null", "None", "?", "-", "--")
"""Strings that mark a cell as missing if all other cells of the column are numbers or dates"""
_COMMA = r"^[+-]?[0-9]+(,[0-9]+)?$"
_THOUSANDS = r"^[+-]?[0-9]{1,3}(,[0-9]{3})?$"
_LIKE_NUMBER = r"^[(+-]? ?\p{Sc}? ?[0-9][0-9.,' ]* ?(%|\p{Sc})?\)?$"
"""Pattern of numbers with currency symbols, percent signs, thousands separators, or parentheses"""
_DATES = ("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d")
_TIMES = ("", " %H:%M", " %H:%M:%S")


@dataclass(frozen=True)
class ColumnFacts:
    """The facts about one column of a sample."""

    kind: ColumnKind
    values: pl.Series
    """Values that are not missing: numbers, text, lists, or microseconds since 1970 for dates"""
    mark: str = ""
    """Separator of the values in a text cell of a list column"""
    decimal: str = "."
    """Decimal separator of numbers in text"""
    forms: tuple[str, ...] = ()
    """Formats of dates in text, if they differ from 2024-05-01; several formats if the dates are
    ambiguous
    """
    odd: str = ""
    """A cell that is not a plain number, if at least half of a text column looks like numbers"""
    name: str = ""
    missing: float = 0.0
    """Fraction of missing cells"""

    @cached_property
    def distinct(self) -> int:
        """Return the number of distinct values or, for lists, of distinct values in them."""
        values = self.values.explode() if self.kind == "list" else self.values
        return values.n_unique() if len(self.values) else 0

    @property
    def longest(self) -> int:
        """Return the number of values in the longest list, or 0 for a column without lists."""
        return int(self.values.list.len().max() or 0) if self.kind == "list" else 0

    @property
    def words(self) -> set[str]:
        """Return the words of the name in lowercase, such as user and id for ``userId``."""
        return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", self.name)}

    @property
    def is_unique(self) -> bool:
        """Return True if the sample has 20 or more rows, all with different values."""
        return self.missing == 0 and self.distinct == len(self.values) >= 20

    @property
    def is_sorted(self) -> bool:
        """Return True if the values are in ascending order."""
        return self.values.is_sorted()

    def shown(self) -> str:
        """Return the text of a comment that describes the column."""
        parts = [f"{self.distinct:,} values"]
        if self.kind in ("integer", "real"):
            form = ",d" if self.kind == "integer" else "g"
            parts.append(f"{self.values.min():{form}} to {self.values.max():{form}}")
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
    """Return the facts about every column."""
    return [_facts(frame[name]) for name in frame.columns]


def _facts(cells: pl.Series) -> ColumnFacts:
    values = cells.alias("").drop_nulls()  # Polars would read a name such as ^a$ as a pattern
    missing = 1 - len(values) / max(len(cells), 1)
    return replace(_facts_of(values), name=cells.name, missing=missing)


def _facts_of(values: pl.Series) -> ColumnFacts:
    """Return the facts about values that are not missing."""
    kind = values.dtype
    if len(values) == 0 or kind == pl.Null:
        return ColumnFacts("empty", values)
    if kind == pl.String:
        return _text_facts(values)
    if kind == pl.Boolean:
        return ColumnFacts("boolean", values.cast(pl.String))
    if kind.is_integer() and kind in COLUMN_TYPES:
        if kind == pl.Int128 and not values.is_between(-(2**63), 2**64 - 1).all():
            # no kind of category can hold these
            return ColumnFacts("real", values.cast(pl.Float64))
        if _is_large(values):
            return ColumnFacts("text", values.cast(pl.String))
        return ColumnFacts("integer", values)
    if kind.is_float() and kind in COLUMN_TYPES:
        whole = values.cast(pl.Int64, strict=False)
        if whole.null_count() == 0 and bool((whole == values).all()):
            return ColumnFacts("integer", whole)
        return ColumnFacts("real", values)
    if kind == pl.Date or isinstance(kind, pl.Datetime):
        return ColumnFacts("date", values.cast(pl.Datetime("us")).cast(pl.Int64))
    if isinstance(kind, pl.List | pl.Array) and _can_be_listed(kind.inner):
        values = values.arr.to_list() if isinstance(kind, pl.Array) else values
        if _is_large(values.explode()):
            values = values.cast(pl.List(pl.String))
        return ColumnFacts("list" if values.list.len().max() else "empty", values)
    return ColumnFacts("other", values)


def _can_be_listed(kind: pl.DataType) -> bool:
    return kind in COLUMN_TYPES and not kind.is_float()


def _is_large(values: pl.Series) -> bool:
    """Return whether integers exceed the range of int64, so that only strings can hold them."""
    return values.dtype in (pl.UInt64, pl.Int128) and int(values.max() or 0) >= 2**63


def _text_facts(texts: pl.Series) -> ColumnFacts:
    def all_match(pattern: str) -> bool:
        return bool(texts.str.contains(pattern).all())

    if all_match(_INTEGER):
        return ColumnFacts("integer", texts.cast(pl.Int64))
    is_code = bool(texts.str.contains("^0[0-9]+$").any())  # 00501 and 501 may be different values
    if not is_code and all_match(f"^{REAL_PATTERN}$|(?i)^nan$"):
        numbers = texts.str.strip_chars(" +").cast(pl.Float64, strict=False)
        return ColumnFacts("real", numbers.fill_nan(None).drop_nulls())
    if not is_code and all_match(_COMMA) and not all_match(_THOUSANDS):  # 1,234 may mean 1234
        numbers = texts.str.replace(",", ".", literal=True).cast(pl.Float64)
        return ColumnFacts("real", numbers, decimal=",")
    if texts.is_in(tuple(LABELS)).all():
        return ColumnFacts("boolean", texts)
    moments = times(texts, "date")
    if moments.null_count() == 0:
        return ColumnFacts("date", moments)
    forms = tuple(form + time for form in _DATES for time in _TIMES if _fits(texts, form + time))
    if forms:
        return ColumnFacts("date", times(texts, forms[0]), forms=forms)
    for mark in _LIST_MARKS:
        lists = texts.str.split(mark)
        shares = float(texts.str.contains(mark, literal=True).mean() or 0)
        if shares >= _MIN_LISTS and lists.explode().n_unique() < texts.n_unique():
            return ColumnFacts("list", lists, mark)
    odd = texts.filter(~texts.str.contains(f"^{REAL_PATTERN}$"))
    is_number = 2 * int(texts.str.contains(_LIKE_NUMBER).sum()) >= len(texts)
    return ColumnFacts("text", texts, odd=odd[0] if is_number and len(odd) else "")


def _fits(texts: pl.Series, form: str) -> bool:
    """Return whether all strings have the date format.

    A few strings are checked before all others, to save time.
    """
    return all(times(part, form).null_count() == 0 for part in (texts.head(100), texts))


def missing_texts(frame: pl.DataFrame) -> list[str]:
    """Return the strings that mark missing cells, such as NA, in columns of numbers or dates."""
    found: dict[str, None] = {}
    for cells in frame.select(pl.col(pl.String)).get_columns():
        texts = cells.alias("").drop_nulls()
        is_missing = texts.is_in(_MISSING)
        others = texts.filter(~is_missing)
        if len(others) < len(texts) and _facts_of(others).kind in ("integer", "real", "date"):
            found |= dict.fromkeys(texts.filter(is_missing).unique(maintain_order=True))
    return list(found)


def of_words(columns: Sequence[ColumnFacts], words: str) -> list[ColumnFacts]:
    """Return the columns whose names contain one of these words."""
    wanted = set(words.split())
    return [column for column in columns if column.words & wanted]

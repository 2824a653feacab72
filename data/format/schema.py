"""Which columns a set has: the label, the dense and sparse columns, and the crosses of a wide part.

Values only; reads no rows. ``CRITEO`` is the layout of both Criteo releases (Kaggle and 1TB):
label, I1..I13 integers, C1..C26 eight hex digits, tab separated, empty = missing, no header.
"""

import re
from dataclasses import dataclass
from typing import Literal

from sbpflow.errors import ConfigError

Kind = Literal["hex", "string", "integer"]
Beyond = Literal["error", "first", "last"]
TimeKind = Literal["date", "integer"]

MISSING_ID = 0
RARE_ID = 1
NUM_RESERVED_IDS = 2

SPLIT_COLUMN = "__split"
SEPARATORS = ("\t", ",", ";", "|", " ", ":", "\x01")
"""Characters that no number has; \\x01 is Hive's."""

_FIELD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_PATTERN = re.compile(r"\*|\^.*\$", re.DOTALL)
KINDS: tuple[Kind, ...] = ("hex", "string", "integer")
BEYOND: tuple[Beyond, ...] = ("error", "first", "last")
CHECK = "__check"
"""Ends the name of a staged column with the further bits of string keys."""


@dataclass(frozen=True, slots=True)
class Field:
    """One embedding table; ``rows`` includes the reserved ids 0 (missing) and 1 (rare)."""

    name: str
    rows: int
    hot: int = 1
    """Ids per row of data; of a ragged field the most that a row has."""
    ragged: bool = False
    """Whether rows have any number of ids, 0 to ``hot``: a list instead of columns of the words."""
    weighted: bool = False
    """Whether every id of a ragged field has a weight."""

    crossed: tuple[str, ...] = ()
    """The columns of a cross."""
    vocabulary: str = ""
    """What fields have in common whose values have the same ids; "" for ids of its own."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The columns a field is made of: one, or two for a cross."""
        return self.crossed or (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListColumn:
    """A sparse column with several values in a cell: ``a|b|c``, or a list in Parquet."""

    name: str
    separator: str = "|"
    """Between the values of a cell of text, and between their weights."""
    most: int = 64
    """Values of a row; the width where it is fixed."""
    fixed: bool = False
    """Always ``most`` ids, the missing id where a row has fewer; else a list of its length."""
    beyond: Beyond = "error"
    """What happens to a row with more: it is a bad line, or its first or last ``most`` stay."""
    weights: str | None = None
    """The column with one weight per value."""
    inline: str | None = None
    """What stands between a value and its weight in the same cell, as in ``a:0.5|b:1``; in Parquet
    the values may be structs of both."""

    @property
    def weighted(self) -> bool:
        """Whether every value has a weight."""
        return self.weights is not None or self.inline is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """How a dense column is read, and what becomes of its values."""

    name: str
    whole: bool = False
    """Whether only integers of 32 bits are values; else real numbers."""
    transform: str | None = None
    """A name of ``data.prepare.transforms``; the one of ``--dense`` where it is None."""
    clip: tuple[float, float] | None = None
    """Least and greatest value; those beyond are taken as these, and counted."""
    buckets: int = 0
    """An id field of so many quantiles instead of a dense column; 0: a dense column."""
    indicator: bool = False
    """A further dense column ``NAME_missing``, 1 where the value is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of a text or Parquet input, in file order, and which of them are used."""

    columns: tuple[str, ...]
    label: str
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    kinds: tuple[Kind, ...]
    separator: str = "\t"
    header: bool = False
    """Whether every text file starts with a line of names; ``columns`` then needs no order."""
    quote: str | None = None
    """What cells of text with separators or line ends in them stand in; None: nothing does."""
    many: tuple[ListColumn, ...] = ()
    vocabularies: tuple[tuple[str, str], ...] = ()
    """Sparse columns that share the vocabulary of the name beside them."""
    numbers: tuple[DenseColumn, ...] = ()
    """Dense columns that are not whole numbers under the transform of ``--dense``."""
    labels: tuple[str, ...] = ()
    """Further labels."""
    weight: str | None = None
    group: tuple[str, Kind] | None = None
    time: tuple[str, TimeKind] | None = None
    row_key: tuple[str, Kind] | None = None

    @property
    def is_plain(self) -> bool:
        """One value per cell, whole numbers, nothing beside the features: the fast way of text."""
        beside = (self.labels, self.weight, self.group, self.time, self.row_key)
        return not (self.header or self.quote or self.many or any(beside)) and all(
            self.dense_column(name).whole for name in self.dense
        )

    def dense_column(self, name: str) -> DenseColumn:
        """How dense column ``name`` is read."""
        plain = DenseColumn(name=name, whole=True)
        return next((number for number in self.numbers if number.name == name), plain)

    def list_column(self, name: str) -> ListColumn | None:
        """How a sparse column holds several values; None where it holds one."""
        return next((many for many in self.many if many.name == name), None)

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of the columns that are no features and not the label."""
        pairs = (self.group, self.time, self.row_key)
        named = (self.weight, *(pair[0] for pair in pairs if pair))
        return (*(name for name in named if name), *self.labels)

    @property
    def used(self) -> tuple[str, ...]:
        """Every column that is read."""
        weights = (many.weights for many in self.many if many.weights)
        return (self.label, *self.dense, *self.sparse, *self.beside, *weights)

    @property
    def buckets(self) -> tuple[DenseColumn, ...]:
        """The dense columns that become id fields."""
        return tuple(
            self.dense_column(name) for name in self.dense if self.dense_column(name).buckets
        )

    def kind(self, name: str) -> Kind:
        """How the cells of sparse column ``name`` are written."""
        return self.kinds[self.sparse.index(name)]

    def vocabulary(self, name: str) -> str:
        """The vocabulary of field ``name``: one that it shares, or its own of the same name."""
        return dict(self.vocabularies).get(name, name)

    def check(self, key: str) -> None:
        """Raise ConfigError unless names are unique, listed in ``columns`` and usable."""
        used = self.used
        if repeated := sorted({name for name in used if used.count(name) > 1}):
            raise ConfigError(f"{key}: column {repeated[0]!r} is used twice; name each column once")
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ConfigError(f"{key}: columns names {twice[0]!r} twice; name each column once")
        if unknown := [name for name in used if name not in self.columns]:
            raise ConfigError(f"{key}: {unknown[0]!r} is not one of columns {list(self.columns)}")
        fields = (*self.sparse, *(number.name for number in self.buckets))
        if odd := [name for name in fields if not _FIELD_NAME.fullmatch(name)]:
            raise ConfigError(
                f"{key}: sparse column {odd[0]!r} must be letters, digits, '_', '-' and '.', a "
                "letter or digit first: files and options are named after it"
            )
        if patterns := [name for name in used if _PATTERN.fullmatch(name)]:
            raise ConfigError(
                f"{key}: {patterns[0]!r} is a pattern and no name to Polars, which reads the "
                "columns; rename it, for example to 'd1'"
            )
        if own := [n for n in self.columns if n == SPLIT_COLUMN or n.endswith(CHECK)]:
            raise ConfigError(f"{key}: {own[0]!r} is a name of prepare's own; rename it")
        if not fields:
            raise ConfigError(f"{key}: sparse names no column; an embedding needs one")
        self._check_vocabularies(key, fields)
        self._check_text(key)

    def _check_vocabularies(self, key: str, fields: tuple[str, ...]) -> None:
        first: dict[str, str] = {}
        for name, shared in self.vocabularies:
            own = f"{key}: sparse {name}: vocabulary {shared!r}"
            if not _FIELD_NAME.fullmatch(shared):
                raise ConfigError(f"{own} must be letters, digits, '_', '-' and '.'")
            if shared in fields and dict(self.vocabularies).get(shared) != shared:
                raise ConfigError(f"{own} is the name of a column that has another; rename it")
            other = first.setdefault(shared, name)
            if self.kind(other) != self.kind(name):
                raise ConfigError(
                    f"{own} is of {other}, too, which is {self.kind(other)} and not "
                    f"{self.kind(name)}; write the same kind for both"
                )

    def _check_text(self, key: str) -> None:
        if self.separator not in SEPARATORS:
            known = " ".join(repr(separator) for separator in SEPARATORS)
            raise ConfigError(f"{key}: separator {self.separator!r} must be one of {known}")
        if self.quote not in (None, '"', "'"):
            raise ConfigError(
                f"{key}: quote {self.quote!r} must be '\"' or \"'\"; none if left out"
            )
        for many in self.many:
            own = f"{key}: sparse {many.name}"
            if len(many.separator) != 1 or many.separator in "\n\r" or not many.separator.isascii():
                raise ConfigError(f"{own}: separator {many.separator!r} must be one character: '|'")
            inline = many.inline
            if inline is not None and (
                len(inline) != 1
                or not inline.isascii()
                or inline.isalnum()
                or inline in "\n\r.+-" + many.separator
                or (inline == self.separator and self.quote is None)
            ):
                raise ConfigError(
                    f"{own}: weights after {inline!r} must be one character that no number has, "
                    "and no other separator: ':'"
                )
            if many.separator == self.separator and self.quote is None:
                raise ConfigError(
                    f"{own}: separator {many.separator!r} also separates columns; use another, "
                    "or say which quote the cells stand in"
                )
        for number in self.numbers:
            if number.indicator and number.buckets:
                raise ConfigError(
                    f"{key}: dense {number.name}: a missing value has an id of its own in buckets; "
                    "leave out missing: indicator"
                )
            if number.indicator and f"{number.name}_missing" in self.used:
                raise ConfigError(f"{key}: '{number.name}_missing' is another column; rename it")


_DENSE = tuple(f"I{i}" for i in range(1, 14))
_SPARSE = tuple(f"C{i}" for i in range(1, 27))

CRITEO = Schema(
    columns=("label", *_DENSE, *_SPARSE),
    label="label",
    dense=_DENSE,
    sparse=_SPARSE,
    kinds=("hex",) * len(_SPARSE),
)

"""Define the input columns of a set and their use, such as label, dense, sparse, group and time.

``CRITEO`` is the schema of both Criteo releases (Kaggle and 1TB), which are tab-separated text
without a header: the label, integers I1..I13, and categories C1..C26 of eight hex digits. An empty
cell is a missing value.
"""

import re
from dataclasses import dataclass
from typing import Literal, cast

from sbpflow.errors import ConfigError

Kind = Literal["hex", "string", "integer"]
Beyond = Literal["error", "first", "last"]
TimeKind = str
"""``date``, ``integer``, or a date format for strptime, such as ``%d/%m/%Y``"""
Compare = Literal["in", ">", ">=", "<", "<="]

SPLIT_COLUMN = "__split"
SEPARATORS = ("\t", ",", ";", "|", " ", ":", "\x01")
"""Supported separators of cells; \\x01 is Hive's default separator"""
CSV_SEPARATORS = (",", ";")
"""Separators of CSV files, whose cells may need quotes"""

FIELD_NAME = re.compile(r"(?=.{1,100}$)\w[^\x00-\x1f\x7f/\\*?\[\]=,\"'`]*")
"""The allowed form of field names, which are used in file names, options, and patterns"""
NAME_RULE = (
    "must start with a letter, digit or '_', must not contain control characters or any of "
    "/ \\ * ? [ ] = , \" ' `, and must have at most 100 characters"
)
PATTERN = re.compile(r"\*|\^.*\$", re.DOTALL)
KINDS: tuple[Kind, ...] = ("hex", "string", "integer")
BEYOND: tuple[Beyond, ...] = ("error", "first", "last")
CHECK = "__check"
"""Suffix of the name of a staged column that contains the check values of string keys"""
GROUP, TIME, ROW_KEY = "__group", "__time", "__row_key"
"""Names of the staged copies of non-feature columns that may also be features"""
_RESERVED = (SPLIT_COLUMN, GROUP, TIME, ROW_KEY)
NUMBER = r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"


@dataclass(frozen=True, slots=True)
class Field:
    """A field with an embedding table. ``rows`` includes ids 0 (missing) and 1 (rare)."""

    name: str
    rows: int
    hot: int = 1
    """Number of ids per row of data; for a ragged field, the maximum"""
    ragged: bool = False
    """True if rows have 0 to ``hot`` ids, which are stored as lists instead of as columns of the
    matrix of words
    """
    weighted: bool = False
    """True if every id of a ragged field has a weight"""

    crossed: tuple[str, ...] = ()
    """The two columns of a cross"""
    vocabulary: str = ""
    """Name of a vocabulary shared with other fields, or "" for the field's own vocabulary"""
    keyed: bool = False
    """True if rows contain 64-bit keys instead of ids; the field then has no vocabulary, and
    ``rows`` is 0
    """

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the field's columns: one column, or two for a cross."""
        return self.crossed or (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListColumn:
    """A sparse column with several values per cell, such as ``a|b|c`` or a Parquet list."""

    name: str
    separator: str = "|"
    """Separator of the values or weights in a text cell"""
    most: int = 64
    """Maximum number of values per row or, with ``fixed``, the exact number of ids"""
    fixed: bool = False
    """True to store ``most`` ids per row, padded with the missing id, instead of a list"""
    beyond: Beyond = "error"
    """What to do if a row has too many values: reject the line, or keep the first or last ``most``
    values
    """
    weights: str | None = None
    """Column with one weight per value, or None"""
    inline: str | None = None
    """Separator of a value and its weight in the same cell, as in ``a:0.5|b:1``, or None; lists in
    Parquet may contain structs of a value and a weight
    """

    @property
    def weighted(self) -> bool:
        """Return True if values have weights."""
        return self.weights is not None or self.inline is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRule:
    """Defines which cells of the label column count as 1; all other cells count as 0."""

    compare: Compare
    values: tuple[str, ...]
    """The values for ``in``, or a single number for a comparison"""

    @property
    def numbers(self) -> list[float] | None:
        """Return the values as numbers, or None if the values are compared as text."""
        fits = all(re.fullmatch(NUMBER, value) for value in self.values)
        return [float(value) for value in self.values] if fits else None

    def __str__(self) -> str:
        shown = self.values if self.numbers else [repr(value) for value in self.values]
        return f"{'is' if self.compare == 'in' else f'is {self.compare}'} {' or '.join(shown)}"


def comparison(text: str) -> LabelRule | None:
    """Return the rule for a comparison such as ``>= 4``, or None for any other text."""
    match = re.fullmatch(rf" *(>=|<=|>|<) *({NUMBER}) *", text)
    return LabelRule(compare=cast("Compare", match[1]), values=(match[2],)) if match else None


def is_wrong_comparison(text: str) -> bool:
    """Return True for text such as ``=> 15`` or ``>15 min``, which looks like a comparison but is
    not one. The result is False for ``>50K``, because tables contain such values.
    """
    wrong_sign = re.match(rf" *(?:[=!]=?[<>]?|<>|<<|>>) *{NUMBER}", text)
    more_than_number = re.match(rf" *[<>]=? *{NUMBER}[ ,]+[^ ]", text)
    return bool(wrong_sign or more_than_number)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """Options for reading and transforming a dense column."""

    name: str
    whole: bool = False
    """True to require 32-bit integers instead of real numbers"""
    transform: str | None = None
    """Name of a transform in ``sbpflow.serving.cells``, or None for the transform that ``--dense``
    selects
    """
    clip: tuple[float, float] | None = None
    """Lower and upper limit; values outside the limits are clipped and counted"""
    buckets: int = 0
    """Number of quantile buckets if the column becomes an id field; otherwise 0"""
    indicator: bool = False
    """True to add a dense column ``NAME_missing`` that is 1 where the value is missing"""
    decimal: str = "."
    """Decimal separator of numbers in text: a point or a comma"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of a text, Parquet or Arrow input, in file order, and their use."""

    columns: tuple[str, ...]
    label: str
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    kinds: tuple[Kind, ...]
    separator: str = "\t"
    header: bool = False
    """True if every text file starts with a line of column names; the order of ``columns`` then
    does not matter
    """
    quote: str | None = None
    """Quote character of text cells that contain separators or newlines, or None"""
    missing_values: tuple[str, ...] = ()
    """Strings that mark a cell as missing, such as NA; an empty cell is always missing"""
    many: tuple[ListColumn, ...] = ()
    vocabularies: tuple[tuple[str, str], ...] = ()
    """Pairs of a sparse column and the name of its shared vocabulary"""
    numbers: tuple[DenseColumn, ...] = ()
    """Options of dense columns that differ from the default (integers with the transform of
    ``--dense``)
    """
    label_rule: LabelRule | None = None
    """Values of the label column that count as 1, or None for a column of 0s and 1s"""
    labels: tuple[str, ...] = ()
    """Columns of additional labels"""
    weight: str | None = None
    group: tuple[str, Kind] | None = None
    time: tuple[str, TimeKind] | None = None
    row_key: tuple[str, Kind] | None = None

    @property
    def is_plain(self) -> bool:
        """Return True if the fast text parser (``data.prepare.parse``) supports the schema."""
        side = (self.labels, self.weight, self.group, self.time, self.row_key, self.label_rule)
        other = (self.header, self.quote, self.missing_values, self.many, *side)
        return not any(other) and all(self.dense_column(name).whole for name in self.dense)

    def dense_column(self, name: str) -> DenseColumn:
        """Return the options of dense column ``name``."""
        plain = DenseColumn(name=name, whole=True)
        return next((column for column in self.numbers if column.name == name), plain)

    def list_column(self, name: str) -> ListColumn | None:
        """Return the list options of sparse column ``name``, or None for single values."""
        return next((column for column in self.many if column.name == name), None)

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of all feature columns."""
        return (*self.dense, *self.sparse)

    @property
    def shareable(self) -> tuple[str, ...]:
        """Return the group, time and row key columns, which are the non-feature columns that may
        also be features.
        """
        return tuple(pair[0] for pair in (self.group, self.time, self.row_key) if pair)

    @property
    def _exclusive(self) -> tuple[str, ...]:
        """Return the columns that must not have more than one use."""
        weights = (column.weights for column in self.many if column.weights)
        weight = (self.weight,) if self.weight else ()
        return (self.label, *self.features, *weight, *self.labels, *weights)

    @property
    def used(self) -> tuple[str, ...]:
        """Return the distinct names of all columns that are read."""
        return tuple(dict.fromkeys((*self._exclusive, *self.shareable)))

    @property
    def buckets(self) -> tuple[DenseColumn, ...]:
        """Return the dense columns that become id fields."""
        columns = map(self.dense_column, self.dense)
        return tuple(column for column in columns if column.buckets)

    def kind(self, name: str) -> Kind:
        """Return the kind of values in sparse column ``name``."""
        return self.kinds[self.sparse.index(name)]

    def vocabulary(self, name: str) -> str:
        """Return the name of the vocabulary of field ``name``: a shared name, or the field's own
        name.
        """
        return dict(self.vocabularies).get(name, name)

    def check(self, key: str) -> None:
        """Raise ConfigError if the schema is invalid, for example because a name is used twice or
        is not in ``columns``.
        """
        used, once = self.used, self._exclusive
        others = [name for name in self.shareable if name not in self.features]
        if repeated := [name for name in once if once.count(name) > 1 or name in others]:
            raise ConfigError(
                f"{key}: column {repeated[0]!r} is used twice; name each column once (only group, "
                "time and row_key may also be a dense or sparse column)"
            )
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ConfigError(f"{key}: columns lists {twice[0]!r} twice; name each column once")
        if unknown := [name for name in used if name not in self.columns]:
            raise ConfigError(
                f"{key}: {unknown[0]!r} is not one of the columns {list(self.columns)}"
            )
        fields = (*self.sparse, *(column.name for column in self.buckets))
        if invalid := [name for name in fields if not FIELD_NAME.fullmatch(name)]:
            raise ConfigError(
                f"{key}: field {invalid[0]!r}: the name appears in file names and "
                f"options, so it {NAME_RULE}; rename the column in the table"
            )
        if patterns := [name for name in used if PATTERN.fullmatch(name)]:
            raise ConfigError(
                f"{key}: Polars reads the column name {patterns[0]!r} as a pattern; rename the "
                "column (for example, to 'd1')"
            )
        if own := [n for n in self.columns if n in _RESERVED or n.endswith(CHECK)]:
            raise ConfigError(f"{key}: the name {own[0]!r} is reserved; rename the column")
        if not fields:
            raise ConfigError(f"{key}: sparse is empty; name at least one column")
        self._check_vocabularies(key, fields)
        self._check_text(key)

    def _check_vocabularies(self, key: str, fields: tuple[str, ...]) -> None:
        first: dict[str, str] = {}
        for name, shared in self.vocabularies:
            own = f"{key}: sparse {name}: vocabulary {shared!r}"
            if not FIELD_NAME.fullmatch(shared):
                raise ConfigError(f"{own}: the name {NAME_RULE}")
            if shared in fields and dict(self.vocabularies).get(shared) != shared:
                raise ConfigError(
                    f"{own} is the name of a column with another vocabulary; use a new name"
                )
            other = first.setdefault(shared, name)
            if self.kind(other) != self.kind(name):
                raise ConfigError(
                    f"{own} is shared with {other}, whose kind is {self.kind(other)} instead of "
                    f"{self.kind(name)}; use the same kind for both"
                )

    def _check_text(self, key: str) -> None:
        if self.separator not in SEPARATORS:
            known = " ".join(repr(separator) for separator in SEPARATORS)
            raise ConfigError(f"{key}: separator must be one of {known}, got {self.separator!r}")
        if self.quote not in (None, '"', "'"):
            raise ConfigError(
                f"{key}: quote must be '\"' or \"'\", got {self.quote!r}; omit it for unquoted text"
            )
        for column in self.many:
            self._check_list_column(f"{key}: sparse {column.name}", column)
        for column in self.numbers:
            if column.indicator and column.buckets:
                raise ConfigError(
                    f"{key}: dense {column.name} has buckets, which already have an id for "
                    "missing values; remove missing: indicator"
                )
            if column.indicator and f"{column.name}_missing" in self.used:
                raise ConfigError(
                    f"{key}: missing: indicator of {column.name} needs the name "
                    f"'{column.name}_missing', which another column has; rename that column"
                )

    def _check_list_column(self, key: str, column: ListColumn) -> None:
        separator, inline = column.separator, column.inline
        if len(separator) != 1 or separator in "\n\r" or not separator.isascii():
            raise ConfigError(
                f"{key}: separator must be one ASCII character, such as '|', and not a line break, "
                f"got {separator!r}"
            )
        if inline is not None and (
            len(inline) != 1
            or not inline.isascii()
            or inline.isalnum()
            or inline in "\n\r.+-" + separator
            or (inline == self.separator and self.quote is None)
        ):
            raise ConfigError(
                f"{key}: weights.after must be one ASCII character, such as ':', other than a "
                "letter, a digit, a line break, '.', '+', '-', or another separator, got "
                f"{inline!r}"
            )
        if separator == self.separator and self.quote is None:
            raise ConfigError(
                f"{key}: separator {separator!r} also separates columns; use another separator, or "
                "set the quote character of the cells"
            )


_DENSE = tuple(f"I{i}" for i in range(1, 14))
_SPARSE = tuple(f"C{i}" for i in range(1, 27))

CRITEO = Schema(
    columns=("label", *_DENSE, *_SPARSE),
    label="label",
    dense=_DENSE,
    sparse=_SPARSE,
    kinds=("hex",) * len(_SPARSE),
)

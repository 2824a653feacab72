"""Which columns a set has: the label, the dense and sparse columns, and the crosses of a wide part.

Values only; reads no rows. ``CRITEO`` is the layout of both Criteo releases (Kaggle and 1TB):
label, I1..I13 integers, C1..C26 eight hex digits, tab separated, empty = missing, no header.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from sbpflow.errors import ConfigError

Kind = Literal["hex", "string", "integer"]

MISSING_ID = 0
RARE_ID = 1
NUM_RESERVED_IDS = 2

SPLIT_COLUMN = "__split"
SEPARATORS = ("\t", ",", ";", "|", " ", ":", "\x01")
"""Characters that no number has; \\x01 is Hive's."""

_FIELD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_PATTERN = re.compile(r"\*|\^.*\$", re.DOTALL)
_KINDS = ("hex", "string", "integer")
_KEYS = ("label", "columns", "dense", "sparse", "separator")


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

    @property
    def parts(self) -> tuple[str, ...]:
        """The columns a field is made of: one, or two for a cross."""
        return tuple(self.name.split("x"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of a text or Parquet input, in file order, and which of them are used."""

    columns: tuple[str, ...]
    label: str
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    kinds: tuple[Kind, ...]
    separator: str = "\t"

    def kind(self, name: str) -> Kind:
        """How the cells of sparse column ``name`` are written."""
        return self.kinds[self.sparse.index(name)]

    def check(self, key: str) -> None:
        """Raise ConfigError unless names are unique, listed in ``columns`` and usable."""
        used = (self.label, *self.dense, *self.sparse)
        if repeated := sorted({name for name in used if used.count(name) > 1}):
            raise ConfigError(f"{key}: column {repeated[0]!r} is used twice; name each column once")
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ConfigError(f"{key}: columns names {twice[0]!r} twice; name each column once")
        if unknown := [name for name in used if name not in self.columns]:
            raise ConfigError(f"{key}: {unknown[0]!r} is not one of columns {list(self.columns)}")
        if crossed := [name for name in self.sparse if "x" in name]:
            raise ConfigError(f"{key}: {crossed[0]!r} has an 'x', which names crosses; rename it")
        if odd := [name for name in self.sparse if not _FIELD_NAME.fullmatch(name)]:
            raise ConfigError(
                f"{key}: sparse column {odd[0]!r} must be letters, digits, '_', '-' and '.', a "
                "letter or digit first: files and options are named after it"
            )
        if patterns := [name for name in used if _PATTERN.fullmatch(name)]:
            raise ConfigError(
                f"{key}: {patterns[0]!r} is a pattern and no name to Polars, which reads the "
                "columns; rename it, for example to 'd1'"
            )
        if SPLIT_COLUMN in used:
            raise ConfigError(f"{key}: {SPLIT_COLUMN!r} is a name of prepare's own; rename it")
        if not self.sparse:
            raise ConfigError(f"{key}: sparse names no column; an embedding needs one")
        if self.separator not in SEPARATORS:
            known = " ".join(repr(separator) for separator in SEPARATORS)
            raise ConfigError(f"{key}: separator {self.separator!r} must be one of {known}")


_DENSE = tuple(f"I{i}" for i in range(1, 14))
_SPARSE = tuple(f"C{i}" for i in range(1, 27))

CRITEO = Schema(
    columns=("label", *_DENSE, *_SPARSE),
    label="label",
    dense=_DENSE,
    sparse=_SPARSE,
    kinds=("hex",) * len(_SPARSE),
)


def read_schema(path: Path) -> Schema:
    """Read a YAML schema: ``label``, ``dense``, ``sparse`` ({name: kind} or names), ``columns``.

    ``columns`` is the order in the file and defaults to label, dense, sparse; columns not used are
    skipped. Kinds are hex (1TB and Kaggle), string and integer.
    """
    try:
        raw: object = yaml.safe_load(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--schema {path}: cannot be read as YAML: {error}") from error
    keys = ", ".join(_KEYS)
    if not isinstance(raw, dict):
        raise ConfigError(f"--schema {path}: must be a mapping with the keys {keys}")
    if unknown := sorted(map(str, set(raw) - set(_KEYS))):
        raise ConfigError(f"--schema {path}: unknown key {unknown[0]!r}; the keys are {keys}")
    return _schema_from(path, cast("dict[str, Any]", raw))


def _schema_from(path: Path, raw: dict[str, Any]) -> Schema:
    for key in ("dense", "columns"):
        if not isinstance(raw.get(key, []), list):
            raise ConfigError(f"--schema {path}: {key} is {raw[key]!r}; write a list of names")
    sparse = raw.get("sparse", {})
    if not isinstance(sparse, dict | list):
        raise ConfigError(f"--schema {path}: sparse is {sparse!r}; write names or name: kind")
    for key in ("dense", "columns", "sparse"):
        if nested := [entry for entry in raw.get(key, ()) if not isinstance(entry, str | int)]:
            raise ConfigError(f"--schema {path}: {key} has {nested[0]!r}, which is no name")
    kinds = dict.fromkeys(sparse, "hex") if isinstance(sparse, list) else sparse
    if bad := [f"{name}: {kind}" for name, kind in kinds.items() if kind not in _KINDS]:
        raise ConfigError(f"--schema {path}: sparse {bad[0]} must be one of {', '.join(_KINDS)}")
    dense = tuple(str(name) for name in raw.get("dense", ()))
    label = str(raw.get("label", "label"))
    schema = Schema(
        columns=tuple(str(c) for c in raw.get("columns", (label, *dense, *kinds))),
        label=label,
        dense=dense,
        sparse=tuple(str(name) for name in kinds),
        kinds=tuple(kinds.values()),
        separator=str(raw.get("separator", "\t")),
    )
    schema.check(f"--schema {path}")
    return schema


def parse_crosses(text: str, sparse: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Read ``C1xC2,C3xC4`` (or ``none``) against the sparse columns there are."""
    if text.strip() in ("", "none"):
        return ()
    pairs = [tuple(item.strip().split("x")) for item in text.split(",")]
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ConfigError(
                f"--crosses: {'x'.join(pair)!r} must be two different columns, like C1xC2"
            )
        if absent := [name for name in pair if name not in sparse]:
            raise ConfigError(
                f"--crosses: {absent[0]!r} is not a sparse column; there are {', '.join(sparse)}"
            )
    if len({frozenset(pair) for pair in pairs}) < len(pairs):
        raise ConfigError(f"--crosses: {text!r} names a cross twice; AxB and BxA are the same")
    return tuple((pair[0], pair[1]) for pair in pairs)

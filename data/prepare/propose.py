"""Propose a schema for a table with column names, as YAML with comments on the facts behind each
guess.

A guess is used only if the user accepts it: the user checks the text and passes it with
``--schema``, or accepts the proposal unchanged with ``--schema auto``.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from sbpflow.config.yaml_text import load_yaml
from sbpflow.data.format.schema import (
    FIELD_NAME,
    NAME_RULE,
    PATTERN,
    comparison,
    is_wrong_comparison,
)
from sbpflow.data.numbers import epoch_unit, minute_text
from sbpflow.data.prepare.facts import ColumnFacts, column_facts, missing_texts, of_words
from sbpflow.data.prepare.sample import Sample, needs_schema, read_sample
from sbpflow.data.prepare.schema_file import MAX_VALUES
from sbpflow.data.prepare.source import find_inputs
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.remote_path import AnyPath
from sbpflow.serving.cells import FLOAT32_MAX

_LABELS = (
    "label target click clicked buy bought purchase purchased convert converted conversion churn "
    "churned default income survived response outcome like liked deposit fraud rating stars score"
)
_TIMES = "time timestamp ts date datetime day created at"
_GROUPS = "user customer member visitor session query"
_KEYS = "id key row index visit impression event transaction order"
_ENTITIES = (
    "id user item movie product article video song shop store seller ad advertiser campaign "
    "creative site app device category cat brand city region country zip postal type code page "
    "query session customer member visitor author artist genre publisher channel"
)
_ENTITY_WORDS = set(_ENTITIES.split())
_SPARSE_KINDS = {"boolean": "string", "text": "string", "integer": "integer"}
_MAX_SMALL = 20
"""A column with at most this many distinct integers is treated as categorical, whatever its name"""
_UNUSABLE = {
    "empty": "no values",
    "date": "a date column can be used only as the time column",
}
_MIN_IDS = 100
"""Minimum number of distinct integers in a column for the remark that they may be IDs"""
_SKEW = 20
"""A logarithm is proposed if the 99% quantile exceeds this multiple of the median, or of 1 if the
median is smaller
"""
_CHOOSE = 'label:  # write the column to predict: NAME, {NAME: VALUE} or {NAME: ">= 4"}'


@dataclass(frozen=True)
class Proposal:
    """A proposed schema as YAML text."""

    text: str
    has_label: bool
    has_sparse: bool


def propose(paths: Sequence[AnyPath]) -> Proposal:
    """Return a schema for the tables. Raises the errors of ``find_inputs`` and ``read_sample``."""
    return _of_sample(read_sample(find_inputs(paths)))


def refuse_guess(paths: Sequence[AnyPath], message: str = "") -> None:
    """Raise ConfigError with a proposed schema if the table's column names are not Criteo's.

    ``message`` replaces the first line of the error, which by default names command-line options.
    """
    # ``prepare`` itself reports missing files
    exists = all(path.is_file() or path.is_dir() for path in paths)
    if not exists or not needs_schema(find_inputs(paths, log=False)[0]):
        return
    names = " ".join(map(str, paths))
    raise ConfigError(
        message
        or f"--input {names}: this table needs a --schema. To write the proposal below to a file, "
        f"run `sbpflow schema {names} > schema.yaml`; check the file, and use --schema "
        "schema.yaml. To accept the proposal unchanged, use --schema auto",
        *propose(paths).text.splitlines(),
    )


def _of_sample(sample: Sample) -> Proposal:
    absent = missing_texts(sample.frame)
    frame = sample.frame.with_columns(pl.col(pl.String).replace(absent, None))
    columns = column_facts(frame)
    label, others = _label(columns)
    rule = None if label is None else _rule(label)
    free = [column for column in columns if column is not label]
    time = _time(free)
    named = (column for column in of_words(free, _KEYS) if column.kind in ("integer", "text"))
    texts = (column for column in free if column.kind == "text" and not column.odd)
    keys = (column for column in (*named, *texts) if column.is_unique and column is not time)
    key = next(keys, None)
    features = [column for column in free if column is not time and column is not key]
    group = next(
        (
            column
            for column in of_words(features, _GROUPS)
            if column.kind in ("integer", "text")
            and not column.missing
            and 1 < column.distinct < 0.7 * len(frame)
        ),
        None,
    )
    lines = _head(sample)
    if absent:
        lines.append(
            f"missing_values: {json.dumps(absent)}  # found in columns of numbers or dates"
        )
    if label is None or rule is None:
        lines.append(_CHOOSE)
    else:
        lines.append(f"label: {rule[0]}  # guess: {label.shown()}; {rule[1]:.1%} are 1{others}")
    if time is not None:
        kind = json.dumps(time.forms[0]) if time.forms else "integer"
        text = _name(time.name)
        text = text if time.kind == "date" and not time.forms else f"{{{text}: {kind}}}"
        others = "".join(f", or the format {form}" for form in time.forms[1:])
        lines.append(f"time: {text}  # guess: {_span(time)}{others}")
        if not time.is_sorted:
            lines.append(f"# The rows are not in time order; to split by time, add: {_split(time)}")
    if group is not None:
        kind = "{%s: integer}" if group.kind == "integer" else "%s"
        lines.append(f"group: {kind % _name(group.name)}  # guess, for GAUC: {group.shown()}")
    if key is not None:
        kind = "{%s: integer}" if key.kind == "integer" else "%s"
        lines.append(f"row_key: {kind % _name(key.name)}  # guess: every row has its own value")
    lines += _features(features)
    return Proposal("\n".join(lines) + "\n", label is not None, "sparse:" in lines)


def _head(sample: Sample) -> list[str]:
    files = ", ".join(sample.files)
    lines = [f"# Proposed from {len(sample.frame):,} rows of {repr(files)[1:-1]}. Check each line."]
    if sample.separator is not None:
        lines += [f"separator: {json.dumps(sample.separator)}", "header: true"]
        lines += ["quote: '\"'"] if sample.quote else []
    return lines


def _label(columns: Sequence[ColumnFacts]) -> tuple[ColumnFacts | None, str]:
    """Return the column that is likely to be the label, and a remark on other candidates.

    A column with only two values, whose name is typical of labels or is a past participle such as
    "installed", is preferred to a column of ratings such as stars.
    """
    named = [column for column in of_words(columns, _LABELS) if _rule(column)]
    binary = [column for column in columns if column.distinct == 2 and _rule(column)]
    events = [
        column
        for column in binary
        if column.words & set(_LABELS.split()) or any(word.endswith("ed") for word in column.words)
    ]
    if not named and not events and not (binary and binary[-1] is columns[-1]):
        return None, ""
    label = (events or named or binary)[-1]
    candidates = dict.fromkeys(each.name for each in [*named, *events] or binary)
    others = [name for name in candidates if name != label.name]
    remark = f"; other columns could be the label: {', '.join(others)}"
    return label, repr(remark)[1:-1] if others else ""


def _rule(column: ColumnFacts) -> tuple[str, float] | None:
    """Return the schema text that makes this column the label, and the resulting label rate, or
    None if the column cannot be the label.
    """
    name, values = _name(column.name), column.values
    is_number = column.kind in ("integer", "real") and column.decimal == "."
    if is_number and set(values.unique()) <= {0, 1}:
        return (name, _share(values == 1)) if column.distinct == 2 else None
    if column.kind == "boolean" and column.distinct == 2:
        return name, _share(values.str.to_lowercase().is_in(["true", "1", "1.0"]))
    if column.kind == "text" and column.distinct == 2:
        rare = str(values.value_counts(sort=True)[values.name][1])
        value = _quoted(rare)
        value = f"[{value}]" if comparison(rare) or is_wrong_comparison(rare) else value
        return f"{{{name}: {value}}}", _share(values == rare)
    if is_number and 2 <= column.distinct <= 2 * _MAX_SMALL:
        shares = {limit: _share(values >= limit) for limit in values.unique().sort()}
        limits = [limit for limit, share in shares.items() if share <= 0.6]
        if limits:
            limit = repr(limits[0]).removesuffix(".0")
            return f'{{{name}: ">= {limit}"}}', shares[limits[0]]
    return None


def _share(flags: pl.Series) -> float:
    return float(flags.sum()) / max(len(flags), 1)


def _time(columns: Sequence[ColumnFacts]) -> ColumnFacts | None:
    def is_time(column: ColumnFacts) -> bool:
        if column.missing or column.kind not in ("date", "integer"):
            return False
        named = bool(column.words & set(_TIMES.split()))
        return column.kind == "date" or (named and _unit(column) is not None)

    return next(filter(is_time, columns), None)


def _unit(column: ColumnFacts) -> float | None:
    """Return the number of time units per second if the integers may be times since 1970, or else
    None.
    """
    return epoch_unit(float(column.values.min()), float(column.values.max()))


def _moment(column: ColumnFacts, value: float) -> str:
    return minute_text(value / (1e6 if column.kind == "date" else _unit(column) or 1.0))


def _span(column: ColumnFacts) -> str:
    low, high = (float(value) for value in (column.values.min(), column.values.max()))
    return f"{_moment(column, low)} to {_moment(column, high)}"


def _split(column: ColumnFacts) -> str:
    places = [column.values.sort()[int(part * len(column.values))] for part in (0.8, 0.9)]
    texts = [
        _moment(column, place).replace(" ", "T") if column.kind == "date" else str(place)
        for place in places
    ]
    name = column.name
    return f"--split {_shell_word(f'time:{name}<{texts[0]},{name}<{texts[1]}')}"


def _features(columns: Sequence[ColumnFacts]) -> list[str]:
    """Return lines of YAML for the dense and sparse columns, with comments on columns that are not
    used.
    """
    dense: list[str] = []
    sparse: list[str] = []
    unused: list[str] = []
    for column in columns:
        line = f"  {_name(column.name)}: "
        is_id = column.distinct <= _MAX_SMALL or bool(column.words & _ENTITY_WORDS)
        is_sparse = column.kind in ("boolean", "text", "list") or (
            column.kind == "integer" and is_id
        )
        if reason := _why_unused(column, is_sparse):
            unused.append(f"#   {repr(column.name)[1:-1]}: {reason}")
        elif is_sparse:
            kind = _list(column) if column.kind == "list" else _SPARSE_KINDS[column.kind]
            sparse.append(f"{line}{kind}  # {column.shown()}{_remark(column)}")
        else:
            dense.append(f"{line}{_transform(column)}  # {column.shown()}{_remark(column)}")
    lines = ["dense:", *dense] if dense else []
    if sparse:
        lines += ["sparse:", *sparse]
    else:
        lines.append(
            "sparse:  # list the columns of categories (at least one), such as NAME: string"
        )
    return lines + (["# Not used:", *unused] if unused else [])


def _remark(column: ColumnFacts) -> str:
    """Return a remark if the proposed use of a column is doubtful, or ""."""
    if column.odd:
        problem = f"cells such as {column.odd!r:.40} are not numbers"
        return f"; {problem}; clean them to use the column as a dense column"
    if column.kind != "integer" or column.distinct < _MIN_IDS or column.words & _ENTITY_WORDS:
        return ""
    low, high = (float(value) for value in (column.values.min(), column.values.max()))
    # If most integers in the range occur, the column is likely to contain IDs.
    is_dense = high - low < 2 * column.distinct
    return (
        f"; if they are IDs, write {_name(column.name)}: integer under sparse" if is_dense else ""
    )


def _why_unused(column: ColumnFacts, is_sparse: bool) -> str:
    if reason := _UNUSABLE.get(column.kind):
        return reason
    if column.kind == "other":
        kind = f"{column.values.dtype!s:.40}"
        return f"values of type {kind} cannot be read; convert them to numbers or strings"
    if column.distinct == 1 and column.values.n_unique() == 1:  # lists may differ in length
        value = column.values[0]
        value = value.to_list() if isinstance(value, pl.Series) else value
        return f"only the value {value!r:.40}"
    if column.kind == "real" and _in_range(column).n_unique() < 2:
        return "fewer than two different values in the float32 range"
    if column.longest > MAX_VALUES:
        return f"lists of up to {column.longest:,} values, but the maximum is {MAX_VALUES:,}"
    if column.kind == "text" and column.is_unique:
        return f"each row has a different string{_remark(column)}"
    if PATTERN.fullmatch(column.name) or (is_sparse and not FIELD_NAME.fullmatch(column.name)):
        return f"rename the column; a name {NAME_RULE}"
    return ""


def _list(column: ColumnFacts) -> str:
    inner: Callable[[], bool] = column.values.explode().dtype.is_integer
    kind = "integer" if inner() else "string"
    mark = f"separator: {json.dumps(column.mark)}, " if column.mark else ""
    return f"{{kind: {kind}, {mark}max: {min(2 * column.longest, MAX_VALUES)}}}"


def _transform(column: ColumnFacts) -> str:
    """Return the transform of a dense column: ``log1`` for skewed values of 0 or more, or else
    ``standardise``; with ``clip`` if ``prepare`` would refuse some of the values.
    """
    values = _in_range(column)
    median, high = values.median(), values.quantile(0.99)
    is_skewed = isinstance(median, float) and high is not None and high > _SKEW * max(median, 1.0)
    name = "log1" if is_skewed and float(values.min()) >= 0 else "standardise"
    more = "" if column.decimal == "." else f', decimal: "{column.decimal}"'
    if len(values) < len(column.values):
        low, high = (repr(float(value)) for value in (values.min(), values.max()))
        texts = (end if "." in end else end.replace("e", ".0e") for end in (low, high))  # for YAML
        more += f", clip: [{', '.join(texts)}]"
    return f"{{transform: {name}{more}}}" if more else name


def _in_range(column: ColumnFacts) -> pl.Series:
    """Return the values of a column of numbers that are finite as float32."""
    values = column.values.cast(float)
    return values.filter(values.abs() <= FLOAT32_MAX)


def _name(name: str) -> str:
    """Return a column name as YAML, in quotes if YAML would misread the plain name."""
    try:
        is_plain = name.isprintable() and load_yaml(f"{{{name}: 1}}") == {name: 1}
    except ConfigError:
        is_plain = False
    return name if is_plain else _quoted(name)


def _quoted(text: str) -> str:
    """Return the text in double quotes for YAML, on one line.

    JSON leaves some line breaks unescaped, or else writes emoji as surrogates, which YAML refuses.
    """
    raw = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in raw)


def _shell_word(text: str) -> str:
    """Return the text as one word of a shell command, on one line."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + _quoted(text)[1:-1].replace("'", "\\'") + "'"

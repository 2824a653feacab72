"""Report the bad lines of staged pieces, and reject inputs with too many bad lines."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbpflow.data.format.schema import CRITEO, NUMBER, SEPARATORS, Schema, is_wrong_comparison
from sbpflow.data.prepare.cells import EXPECTED, LABELS, NOT_A_NUMBER, NOT_A_TIME
from sbpflow.data.prepare.csv_text import RETURNS, STRAY_RETURN
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.piece import BadLines
from sbpflow.errors import DataError
from sbpflow.runtime.files.remote_path import AnyPath

_WRONG_NUMBER = "fields instead of"
_NOT_HEX = "is not eight hex digits"
_FIXES = {
    _NOT_HEX: "write the kind of the column under sparse, as in `NAME: string` or `NAME: integer`",
    NOT_A_NUMBER: "write plain numbers such as 1234.5, or make the column a sparse column of kind "
    "string, so that its cells are categories",
    f"is not {EXPECTED['integer']}": "write whole numbers, or use kind string instead of integer",
    "is not a 32-bit integer": "write 32-bit integers, or list the column in a --schema "
    "without kind: integer",
    NOT_A_TIME: "write dates such as 2024-05-01 12:30:00, or give their format, as in "
    '`time: {NAME: "%d/%m/%Y"}`, or `time: {NAME: integer}` for integers',
}
"""Advice for cells that break a rule, by rule"""


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """A piece that is staged on disk: the path of its rows, its input file, and the counts and bad
    lines found in it.
    """

    path: Path
    file: AnyPath
    num_rows: int
    num_train: int
    """Number of rows in train. For a split by time, which is decided later, this is the number of
    all rows
    """
    num_lines: int
    num_names: int
    """Number of headers (0 or 1) before the rows"""
    num_extra: int
    """Number of lines of the text beyond one per record and one for a header"""
    bad: BadLines
    cut: Mapping[str, int]
    """Number of values dropped because a row had more than the maximum, by column"""
    num_positives: int
    label_cells: list[str]
    """Some cells of the label column, if the schema has a label rule or a label is bad"""


def check_bad(staged: Sequence[StagedPiece], options: PrepareOptions, early: float = 0.0) -> None:
    """Raise DataError if the input has no lines or too many bad lines; in the latter case, the
    error contains the counts and the first bad lines.

    While files are still being read, the tolerated fraction of bad lines is at least ``early``.
    """
    num_lines = sum(piece.num_lines - piece.bad.blank for piece in staged)
    num_bad = sum(piece.bad.total for piece in staged)
    limit = options.max_bad_fraction
    if num_lines == 0:
        files = ", ".join(map(str, options.inputs))
        raise DataError(f"--input {files} has no rows; use files with one row per line")
    if num_lines == num_bad:
        problem = f"every line is bad (lines: {num_lines})"
    elif num_bad > max(limit, early) * num_lines:
        first = "first " if early else ""
        problem = (
            f"{num_bad} of the {first}{num_lines} lines are bad, more than --max-bad-fraction "
            f"{limit:g}"
        )
    else:
        return
    advice = _advice(staged, options)
    if not advice and num_bad < num_lines and not early:
        enough = math.ceil(1000 * num_bad / num_lines) / 1000
        advice = [f"correct these rows, or skip them with --max-bad-fraction {enough:g}"]
    raise DataError(f"--input: {problem}", *bad_lines(staged), *advice)


def check_label_rule(staged: Sequence[StagedPiece], schema: Schema) -> None:
    """Raise DataError if all rows have the same label under the schema's label rule."""
    total = sum(piece.num_rows for piece in staged)
    positives = sum(piece.num_positives for piece in staged)
    if schema.label_rule is not None and positives in (0, total):
        seen = dict.fromkeys(cell for piece in staged for cell in piece.label_cells)
        raise DataError(
            f"--schema: {'no row' if positives == 0 else 'every row'} has a {schema.label} that "
            f"{schema.label_rule}, so all labels would be equal; under label, write a rule that "
            "separates the values of this column (such as "
            f"{', '.join(map(repr, list(seen)[:5]))})"
        )


def bad_counts(staged: Sequence[StagedPiece]) -> dict[str, int]:
    """Return the number of bad lines in all pieces, by reason."""
    counts: Counter[str] = Counter()
    for piece in staged:
        counts.update(piece.bad.counts)
    return dict(sorted(counts.items()))


def bad_lines(staged: Sequence[StagedPiece], shown: int = 5) -> list[str]:
    """Return lines of text with the counts by reason, and with the first bad lines and their line
    numbers.
    """
    messages = [f"{count} x {reason}" for reason, count in bad_counts(staged).items()]
    line_of_file: dict[AnyPath, int] = {}
    for piece in staged:
        first = line_of_file.get(piece.file, 1) + piece.num_names
        line_of_file[piece.file] = first + piece.num_lines + piece.num_extra
        for number, reason, line, cell in piece.bad.examples[:shown]:
            messages.append(f"{piece.file}:{first + number}: {reason}: {cell or line!r}")
        shown -= min(shown, len(piece.bad.examples))
    return messages


def _advice(staged: Sequence[StagedPiece], options: PrepareOptions) -> list[str]:
    """Return advice about the schema, derived from the first bad lines."""
    schema = options.schema
    examples = [example for piece in staged for example in piece.bad.examples]
    if set(bad_counts(staged)) == {STRAY_RETURN} and not any(piece.num_rows for piece in staged):
        return [f"the {RETURNS}"]
    text = next((line for _, reason, line, _ in examples if _WRONG_NUMBER in reason), None)
    settings: list[str] = []
    if text is not None and schema.separator not in text:
        counts = {mark: text.count(mark) for mark in SEPARATORS}
        mark = max(counts, key=counts.__getitem__)
        if counts[mark]:
            settings.append(f"separator: {json.dumps(mark)}")
    if schema.quote is None and any('"' in line for _, _, line, _ in examples):
        settings.append("quote: '\"'")
    separators = {schema.separator, *(mark for mark in SEPARATORS if text and mark in text)}
    if not schema.header and any(
        schema.label in line.split(mark) for _, _, line, _ in examples for mark in separators
    ):
        settings.append("header: true")
    others = [cell for piece in staged for cell in piece.label_cells if cell not in LABELS]
    is_header = set(others) == {schema.label}  # a repeated header has the name of the column
    if others and not is_header and options.like is None and _needs_rule(staged, schema, others):
        # The rule for a single other label must separate it from the valid one.
        more = [_only_label(staged)] if len(set(others)) == 1 else []
        settings.append(f"label: {{{schema.label}: {_rule_for([*others, *filter(None, more)])}}}")
    keys = " and ".join(f"`{key}`" for key in settings)
    if options.like is not None:
        if text is None and not settings:
            return []
        columns = f"the columns of {options.like}: {', '.join(schema.columns or schema.used)}"
        return [
            f"new rows must have {columns}; the first line of a text file may name these columns, "
            "in any order and with any separator"
        ]
    not_hex = any(_NOT_HEX in reason for _, reason, _, _ in examples)
    if schema == CRITEO and (text is not None or settings or not_hex):
        needs = f", which probably needs {keys}" if settings else ""
        return [
            "without --schema, lines must have Criteo's format: 40 cells separated by tabs, "
            "without column names and with eight hex digits per category; describe any other "
            f"table in a --schema file{needs} (see docs/data.md)"
        ]
    advice = [f"the schema probably needs {keys}"] if settings else []
    words = _columns_of_words(examples, schema)
    advice += [
        f"column {name} contains words such as {', '.join(map(repr, cells[:2]))}; "
        f"{'use' if name in schema.sparse else 'make it a sparse column of'} kind string, or, "
        "under `missing_values`, list the words that stand for missing values"
        for name, cells in words.items()
    ]
    rest = (example for example in examples if _misfit(example)[0] not in words)
    return advice + list(dict.fromkeys(filter(None, (_cell_advice(each, schema) for each in rest))))


_MIN_WORDS = 3
"""Minimum number of different words in a column's bad cells for the advice that the column contains
strings
"""


def _misfit(example: tuple[int, str, str, str]) -> tuple[str, str]:
    """Return the column of a bad line's cell, and the rule in ``_FIXES`` that the cell breaks; both
    are "" if there is no such rule.
    """
    _, reason, _, _ = example
    rule = next((rule for rule in _FIXES if f" {rule}" in reason), "")
    return (reason.partition(f" {rule}")[0] if rule else ""), rule


def _columns_of_words(
    examples: Sequence[tuple[int, str, str, str]], schema: Schema
) -> dict[str, list[str]]:
    """Return the numeric columns whose bad cells contain several different words, with these
    words.
    """
    words: dict[str, list[str]] = {}
    for example in examples:
        name, rule = _misfit(example)
        cell, is_feature = example[3], name in (*schema.sparse, *schema.dense)
        if rule and rule != NOT_A_TIME and is_feature and cell[:1].isalpha():
            words.setdefault(name, []).append(cell)
    distinct = {name: list(dict.fromkeys(cells)) for name, cells in words.items()}
    return {name: cells for name, cells in distinct.items() if len(cells) >= _MIN_WORDS}


def _needs_rule(staged: Sequence[StagedPiece], schema: Schema, others: Sequence[str]) -> bool:
    """Return whether labels such as ``others`` need a label rule. They are mistakes or missing
    values, such as NA, if most labels are 0 or 1, unless they are numbers and only 0 or only 1
    occurs with them, as in a column of 1 and 2.
    """
    num_others = bad_counts(staged).get(f"{schema.label} is not 0 or 1", 0)
    num_lines = sum(piece.num_lines - piece.bad.blank for piece in staged)
    if not num_others or 2 * num_others >= num_lines:
        return num_others > 0
    return bool(_only_label(staged)) and all(re.fullmatch(NUMBER, cell) for cell in others)


def _only_label(staged: Sequence[StagedPiece]) -> str:
    """Return the label, 0 or 1, of all good rows, or "" if there are several labels or no rows."""
    num_rows = sum(piece.num_rows for piece in staged)
    positives = sum(piece.num_positives for piece in staged)
    return {0: "0", num_rows: "1"}.get(positives, "") if num_rows else ""


def _rule_for(cells: Sequence[str]) -> str:
    """Return a label rule that separates ``cells``: for numbers, a comparison with the median of
    the distinct values; otherwise, the first cell as the value that means 1.
    """
    numbers = {float(cell): cell for cell in cells if re.fullmatch(NUMBER, cell)}
    if not numbers or not re.fullmatch(NUMBER, cells[0]):
        literal = json.dumps(cells[0])
        return f"[{literal}]" if is_wrong_comparison(cells[0]) else literal
    return json.dumps(f">= {numbers[sorted(numbers)[len(numbers) // 2]]}")


def _cell_advice(example: tuple[int, str, str, str], schema: Schema) -> str:
    """Return advice on a cell that does not fit its column, or "" if there is none."""
    name, rule = _misfit(example)
    cell = example[3]
    if not rule or not cell or cell == name:  # the name of a column is from a repeated header
        return ""
    if rule != NOT_A_TIME and not re.search("[0-9]", cell):
        missing = (
            f"if {cell!r} stands for a missing value, add `missing_values: [{json.dumps(cell)}]`"
        )
        fix = f"{_FIXES[rule]}; or, " if rule == _NOT_HEX else ""
        return f"column {name}: {fix}{missing}"
    if rule == NOT_A_NUMBER and re.fullmatch(NUMBER, cell.replace(",", ".", 1)):
        if name == schema.label:
            return f"{name}: labels must have a decimal point; replace the commas in this column"
        return f'{name}: for a decimal comma, write `decimal: ","` in its options'
    return f"{name}: {_FIXES[rule]}"

"""Which lines were left out of the staged pieces, when they are too many, and what to do then."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbpflow.data.format.schema import CRITEO, SEPARATORS
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.piece import BadLines
from sbpflow.data.prepare.remote import InputPath
from sbpflow.errors import DataError

_WRONG_NUMBER = "fields instead of"


@dataclass(frozen=True, slots=True)
class Staged:
    """One piece on disk: its rows, the lines it came from and what was left out."""

    path: Path
    file: InputPath
    num_rows: int
    num_train: int
    """Rows for train by ratio or by file; all of them where the split is by time."""
    num_lines: int
    num_names: int
    """Lines before them that hold the names of the columns."""
    bad: BadLines
    cut: Mapping[str, int]
    """Values left out beyond the most of a row, by column."""
    part: int
    """Which machine has it."""


def check_bad(staged: Sequence[Staged], options: PrepareOptions, early: float = 0.0) -> None:
    """Raise DataError, with counts and the first bad lines, when more are bad than may be.

    ``early``: not before so many of the lines read so far are.
    """
    num_lines = sum(piece.num_lines - piece.bad.blank for piece in staged)
    num_bad = sum(piece.bad.total for piece in staged)
    if num_lines == 0:
        files = ", ".join(map(str, options.inputs))
        raise DataError(f"--input {files}: has no rows; name files with one row a line")
    if num_lines - num_bad == 0:
        raise DataError(
            f"--input: no usable row in {num_lines} lines",
            *bad_lines(staged),
            *_advice(staged, options),
        )
    limit = options.max_bad_fraction
    if num_bad > max(limit, early) * num_lines:
        so_far = "of the first " if early else "of "
        raise DataError(
            f"--input: {num_bad} {so_far}{num_lines} lines are bad, more than --max-bad-fraction "
            f"{limit:g}",
            *bad_lines(staged),
            *_advice(staged, options),
        )


def bad_counts(staged: Sequence[Staged]) -> dict[str, int]:
    """Bad lines by reason over all pieces."""
    counts: dict[str, int] = {}
    for piece in staged:
        for reason, number in piece.bad.counts.items():
            counts[reason] = counts.get(reason, 0) + number
    return dict(sorted(counts.items()))


def bad_lines(staged: Sequence[Staged], shown: int = 5) -> list[str]:
    """Counts per reason and the first bad lines with file and line number; empty if none."""
    found = [f"{count} x {reason}" for reason, count in bad_counts(staged).items()]
    line_of_file: dict[InputPath, int] = {}
    for piece in staged:
        first = line_of_file.get(piece.file, 1) + piece.num_names
        line_of_file[piece.file] = first + piece.num_lines
        for number, reason, line in piece.bad.examples[:shown]:
            found.append(f"{piece.file}:{first + number}: {reason}: {line!r}")
        shown -= min(shown, len(piece.bad.examples))
    return found


def _advice(staged: Sequence[Staged], options: PrepareOptions) -> list[str]:
    """What in the schema may not fit the first bad lines, as one line; empty if nothing."""
    schema = options.schema
    examples = [example for piece in staged for example in piece.bad.examples]
    text = next((line for _, reason, line in examples if _WRONG_NUMBER in reason), None)
    found: list[str] = []
    if text is not None and schema.separator not in text:
        counts = {mark: text.count(mark) for mark in SEPARATORS}
        mark = max(counts, key=counts.__getitem__)
        if counts[mark]:
            found.append(f"separator: {json.dumps(mark)}")
    if schema.quote is None and any('"' in line for _, _, line in examples):
        found.append("quote: '\"'")
    separators = {schema.separator, *(mark for mark in SEPARATORS if text and mark in text)}
    if not schema.header and any(
        schema.label in line.split(mark) for _, _, line in examples for mark in separators
    ):
        found.append("header: true")
    keys = " and ".join(f"`{key}`" for key in found)
    if options.like is not None:
        if text is None and not found:
            return []
        columns = f"the columns of {options.like}: {', '.join(schema.columns or schema.used)}"
        return [f"the rows are read as those of --like, which has {columns}"]
    if schema == CRITEO and (text is not None or found):
        needs = f", here probably with {keys}" if found else ""
        return [
            "without --schema every line is read as Criteo's: 40 cells, tab separated, no "
            f"names; describe any other table in a --schema file{needs} (docs/data.md)"
        ]
    return [f"the --schema file probably needs {keys}"] if found else []

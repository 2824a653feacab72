"""Rewrites JSON rows as tab-separated lines in one compiled pass, without a Python object per cell.
Only ``encoder_loops`` imports this module, which needs numba.

The text around the values must be the same in every row, which is true of the output of nearly
every program. Other JSON is left to Python's parser.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled, load_word, store_word

_TAB, _LINE, _BLANK = 9, 10, 32
_QUOTE, _PLUS, _MINUS, _POINT, _ZERO, _LARGE_E, _BACKSLASH, _E, _N = (
    34, 43, 45, 46, 48, 69, 92, 101, 110
)  # fmt: skip
_NULL = np.frombuffer(b"null", dtype=np.uint8)
_WORD = 8  # bytes that are compared or copied together
_ONES, _HIGH_BITS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_QUOTES, _BACKSLASHES, _BLANKS = (np.uint64(byte) * _ONES for byte in (_QUOTE, _BACKSLASH, _BLANK))
_GAP = rb"[ \t\n\r]*"
_TEXT = rb'"([^"\\\x00-\x1f]*)"'
_BEGIN, _NEXT, _END = (
    re.compile(_GAP + _GAP.join(marks) + _GAP)
    for marks in ((rb"\[", rb"\{"), (b",",), (rb"\}", rb"\]"))
)
_NEXT_ROW = re.compile(_GAP + _GAP.join((rb"\}", b",", rb"\{")) + _GAP)
_KEY = re.compile(_TEXT + _GAP + b":" + _GAP)
_VALUE = re.compile(_TEXT + rb"|null|[-0-9][-+.0-9eE]*")


@compiled
def count_lines(text: Array) -> Any:
    """Return the number of newlines; ``bytes.count`` would take as long as the rest of a small
    request.
    """
    count = 0
    for at in range(text.size):
        count += text[at] == _LINE
    return count


@compiled
def _after_digits(text: Array, at: int) -> int:
    while at < text.size and text[at] >= _ZERO and text[at] <= _ZERO + 9:
        at += 1
    return at


@compiled
def _after_number(text: Array, at: int) -> int:
    """Return the end of the JSON number at ``at``, or -1 if no number starts there."""
    at += text[at] == _MINUS
    end = _after_digits(text, at)
    if end == at or (text[at] == _ZERO and end > at + 1):
        return -1
    at = end
    if at < text.size and text[at] == _POINT:
        end = _after_digits(text, at + 1)
        if end == at + 1:
            return -1
        at = end
    if at < text.size and (text[at] == _E or text[at] == _LARGE_E):
        at += 1
        at += at < text.size and (text[at] == _PLUS or text[at] == _MINUS)
        end = _after_digits(text, at)
        if end == at:
            return -1
        at = end
    return at


@compiled
def _after_bytes(text: Array, at: int, wanted: Array, start: int, stop: int) -> int:
    """Return the end of ``wanted[start:stop]`` in ``text`` if it starts at ``at``, else -1."""
    if at + stop - start > text.size:
        return -1
    while stop - start >= _WORD:
        if load_word(text, at) != load_word(wanted, start):
            return -1
        at, start = at + _WORD, start + _WORD
    for k in range(start, stop):
        if text[at] != wanted[k]:
            return -1
        at += 1
    return at


@compiled
def _is_plain(word: Any) -> bool:
    """Return whether a word contains no quote, backslash, or control character."""
    quotes, backslashes = word ^ _QUOTES, word ^ _BACKSLASHES
    # Subtracting 1 (or 32) from a byte sets its high bit if the byte is 0 (or less than 32). Bytes
    # that already had a high bit do not count. A borrow from a lower byte only occurs if the lower
    # byte counts, so it does not change the result.
    special = (quotes - _ONES) & ~quotes
    special |= (backslashes - _ONES) & ~backslashes
    special |= (word - _BLANKS) & ~word
    return (special & _HIGH_BITS) == 0


@compiled
def _copy_string(text: Array, at: int, out: Array, size: int) -> tuple[int, int]:
    """Copy the string that starts at ``at`` to ``out[size:]``; return the place after its closing
    quote and the new size, or -1 and the new size for a string with escapes or control characters.
    """
    while at + _WORD <= text.size:
        word = load_word(text, at)
        if not _is_plain(word):
            break
        store_word(out, size, word)
        at, size = at + _WORD, size + _WORD
    while at < text.size and text[at] != _QUOTE:
        if text[at] == _BACKSLASH or text[at] < _BLANK:
            return -1, size
        out[size] = text[at]
        at, size = at + 1, size + 1
    return at + 1, size


@compiled
def rewrite(
    text: Array, gaps: Array, ends: Array, is_text: Array, out: Array
) -> tuple[int, int, int]:
    """Write rows to ``out`` as tab-separated lines; return the end of the last value, the size of
    the lines, and the number of lines, or (-1, 0, 0) for other JSON, such as escapes, nested
    values, true, or false.

    ``gaps`` concatenates the strings before each value of a row and before the first value of the
    next row (the last string is empty if there is only one row). ``ends`` ([columns + 1]) contains
    the end of each string in ``gaps``. ``is_text`` ([columns]) is True for columns in which
    numbers are not accepted.
    """
    at, size, num_rows, columns = 0, 0, 0, is_text.size
    while True:
        for column in range(columns):
            if column > 0 or num_rows == 0:
                at = _after_bytes(text, at, gaps, ends[column - 1] if column else 0, ends[column])
            if at < 0 or at == text.size:
                return -1, 0, 0
            if text[at] == _QUOTE:
                at, size = _copy_string(text, at + 1, out, size)
            elif text[at] == _N:
                at = _after_bytes(text, at, _NULL, 0, 4)
            else:
                end = -1 if is_text[column] else _after_number(text, at)
                for k in range(at, end):
                    out[size] = text[k]
                    size += 1
                at = end
            if at < 0 or at >= text.size:
                return -1, 0, 0
            out[size] = _LINE if column == columns - 1 else _TAB
            size += 1
        num_rows += 1
        following = _after_bytes(text, at, gaps, ends[columns - 1], ends[columns])
        if following <= at:
            return at, size, num_rows
        at = following


_ColumnsOf = Callable[[Sequence[str]], tuple[Array, Array]]


class TextLines(NamedTuple):
    """Tab-separated lines, and the kinds and targets of their columns."""

    text: Array
    num_rows: int
    columns: tuple[Array, Array]


class _Layout(NamedTuple):
    """The arguments of ``rewrite``, and the kinds and targets of the columns."""

    gaps: Array
    ends: Array
    is_text: Array
    columns: tuple[Array, Array]


class JsonLines:
    """Rewrites JSON rows as lines. Numbers are not accepted in columns of the kinds ``text_kinds``.
    The layout of the last request is tried first.
    """

    def __init__(self, required: Collection[str], text_kinds: Sequence[int]) -> None:
        self._required, self._text_kinds = frozenset(required), text_kinds
        self._last: _Layout | None = None

    def lines(self, text: bytes, columns_of: _ColumnsOf) -> TextLines | None:
        """Return the rows of a list of objects, or None for other JSON or invalid rows.

        ``columns_of(names)`` returns the kind and the target column of each name.
        """
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError:
                return None
        if self._last is not None and (found := self._rewritten(text, self._last)):
            return found
        layout = self._layout(text, columns_of)
        if layout is None or (found := self._rewritten(text, layout)) is None:
            return None
        self._last = layout
        return found

    def _rewritten(self, text: bytes, layout: _Layout) -> TextLines | None:
        array, out = np.frombuffer(text, dtype=np.uint8), np.empty(len(text), dtype=np.uint8)
        at, size, num_rows = rewrite(array, layout.gaps, layout.ends, layout.is_text, out)
        if at < 0 or not _END.fullmatch(text, at):
            return None
        return TextLines(out[:size], num_rows, layout.columns)

    def _layout(self, text: bytes, columns_of: _ColumnsOf) -> _Layout | None:
        """Return the layout of the first row, if its keys are unique and include all required
        columns.
        """
        gaps: list[bytes] = []
        names: list[str] = []
        before, start = _BEGIN.match(text), 0
        while before is not None:
            key = _KEY.match(text, before.end())
            value = None if key is None else _VALUE.match(text, key.end())
            if key is None or value is None:
                return None
            gaps.append(text[start : key.end()])
            names.append(key[1].decode())
            start = value.end()
            before = _NEXT.match(text, start)
        if not names or len(set(names)) < len(names) or not self._required <= set(names):
            return None
        following = _NEXT_ROW.match(text, start)
        key = None if following is None else _KEY.match(text, following.end())
        if key is not None and key[1].decode() != names[0]:
            return None
        gaps.append(b"" if key is None else text[start : key.end()])
        ends = np.cumsum([len(gap) for gap in gaps], dtype=np.int64)
        columns = columns_of(names)
        is_text = np.isin(columns[0], self._text_kinds)
        return _Layout(np.frombuffer(b"".join(gaps), dtype=np.uint8), ends, is_text, columns)

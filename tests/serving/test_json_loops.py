"""Tests that JSON rows rewritten as lines have the cells that Python's parser finds."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the loops need numba")

from sbpflow.serving.json_loops import JsonLines

NUMBER, TEXT = 1, 2
KINDS = {"n": NUMBER, "t": TEXT}


def columns_of(names):
    kinds = np.array([KINDS.get(name, 0) for name in names])
    return kinds, np.arange(len(names))


def lines_of(text, reader=None):
    """Return the cells of ``text`` by row, and the kinds of their columns, or None if the text is
    left to Python's parser.
    """
    reader = reader or JsonLines(list(KINDS), (TEXT,))
    found = reader.lines(text if isinstance(text, bytes) else text.encode(), columns_of)
    if found is None:
        return None
    lines = found.text.tobytes().decode().split("\n")
    assert len(lines) == found.num_rows + 1
    return [line.split("\t") for line in lines[:-1]], found.columns[0].tolist()


def refuse(text):
    raise ValueError(text)


def checked(text):
    """Compare the cells with those of Python's parser; return whether the loops read the text."""
    found = lines_of(text)
    if found is None:
        return False
    parse = {"parse_int": str, "parse_float": str, "parse_constant": refuse}
    rows = json.loads(text, **parse)
    cells = [["" if cell is None else cell for cell in row.values()] for row in rows]
    names = {tuple(row) for row in rows}
    assert (cells, names) == (found[0], {next(iter(names))})
    return True


@pytest.mark.parametrize(
    "text",
    [
        '[{"n": 1, "t": "a"}]',
        ' [ {"t":"x y","n":-1.5e-3} ,\r\n\t{"t":null,"n":null}]\n',
        '[{"n": "12", "t": "", "other": 7.25}, {"n": 0, "t": "}", "other": "[{"}]',
        '[{"n": 10E+2, "t": "\u00e9\u6f22"}]',
    ],
)
def test_usual_rows_are_read(text):
    assert checked(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[]", "{}", "[{}]", "7", '[{"n": 1}]', '[{"n": 1, "n": 1, "t": ""}]',
        '[{"n": 1, "t": 2}]', '[{"n": true, "t": ""}]', '[{"n": [1], "t": ""}]',
        '[{"n": {"a": 1}, "t": ""}]', '[{"n": NaN, "t": ""}]', '[{"n": nul, "t": ""}]',
        '[{"n": 1, "t": "\\u0041"}]', '[{"n": 1, "t": "a\tb"}]', '[{"n": 1, "t": "a\nb"}]',
        '[{"n": 01, "t": ""}]', '[{"n": +1, "t": ""}]', '[{"n": .5, "t": ""}]',
        '[{"n": 1., "t": ""}]', '[{"n": 1e, "t": ""}]', '[{"n": -, "t": ""}]', '[{"n": 1',
        '[{"n": 1, "t": ""},]', '[{"n": 1, "t": ""}] 7', '[{"n": 1, "t": "',
        '[{"n": 1, "t": ""} {"n": 1, "t": ""}]', '[{"n": 1, "t": ""}, {"t": "", "n": 1}]',
        '[{"n": 1, "t": ""}, {"n": 1, "t": "", "u": 1}]', '[{"n": 1, "t": ""}, 7]',
        '[{"n": 1, "t": ""}, { "n": 1, "t": ""}, {"n": 1, "t": ""}]',
        '[{"n" 1, "t": ""}]', '[{"n": 1; "t": ""}]', '[\f{"n": 1, "t": ""}]', '[{"n": 1, "t": ""',
        b'[{"n": 1, "t": "\xff"}]',
    ],
)  # fmt: skip
def test_rarer_rows_and_errors_are_left_to_the_parser(text):
    assert lines_of(text) is None


@pytest.mark.few(40)
@pytest.mark.parametrize("size", range(20))
@pytest.mark.parametrize("other", ["\\u0041", "\\n", '\\"', "\x00", "\x1f", "\t"])
def test_special_characters_are_found_at_every_place(size, other):
    """The loops look at eight bytes at a time."""
    for at in range(size + 1):
        cell = "x" * at + other + "x" * (size - at)
        assert lines_of(f'[{{"n": 1, "t": "{cell}"}}]') is None
        for plain in ("\x7f", "!", "\xff", "\u6f22"):
            assert checked(f'[{{"n": 1, "t": "{"x" * at}{plain}{"x" * (size - at)}"}}]')


@pytest.mark.parametrize("size", range(20))
def test_names_of_any_length_are_compared_whole(size):
    for at in range(size):
        name = "x" * size
        other = "x" * at + "y" + "x" * (size - at - 1)
        rows = '[{{"n": 1, "t": "", "{}": 2}}, {{"n": 1, "t": "", "{}": 2}}]'
        assert checked(rows.format(name, name))
        assert lines_of(rows.format(name, other)) is None


def test_requests_may_have_different_keys():
    reader = JsonLines(list(KINDS), (TEXT,))
    for _ in range(2):
        assert lines_of('[{"n": 1, "t": "a"}]', reader) == ([["1", "a"]], [NUMBER, TEXT])
        found = lines_of('[{"t": "a", "x": 3, "n": 1}]', reader)
        assert found == ([["a", "3", "1"]], [TEXT, 0, NUMBER])
        assert lines_of('[{"t": "a", "x": 3}]', reader) is None


CELLS = st.one_of(
    st.none(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5), st.booleans(),
)  # fmt: skip


@given(st.lists(st.tuples(CELLS, CELLS), max_size=4), st.booleans())
def test_any_rows_have_the_parser_s_cells(cells, ascii_only):
    rows = [dict(zip("nt", row, strict=True)) for row in cells]
    text = json.dumps(rows, ensure_ascii=ascii_only)
    is_usual = all(
        not isinstance(row["n"], bool) and isinstance(row["t"], str | None) for row in rows
    )
    plain = all(f'"{cell}"' == json.dumps(cell, ensure_ascii=False) for row in rows
                for cell in row.values() if isinstance(cell, str))  # fmt: skip
    if checked(text):
        assert rows
        assert is_usual
    elif rows and is_usual and plain and not ascii_only:
        raise AssertionError(text)


@given(st.integers(0, 60), st.sampled_from(list('"{}[]:,\\ntx019.eE+- ')))
def test_damaged_text_is_never_read_differently(at, character):
    text = '[{"n": -10.5e-3, "t": "ab"}, {"n": null, "t": ""}]'
    checked(text[:at] + character + text[at + 1 :])
    checked(text[:at] + character + text[at:])
    checked(text[:at] + text[at + 1 :])

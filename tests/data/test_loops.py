"""Tests that compiled loops of the data plane give the same results as Polars and numpy."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbpflow.data.format.ids import IdTable
from sbpflow.data.format.schema import CRITEO, Schema
from sbpflow.data.prepare import parse
from tests.data.rows import text_rows

# once loaded, the loops are used for inputs of any size
pytest.importorskip("numba", reason="the loops need numba")
SMALL = Schema(
    columns=("h", "n", "label", "k", "m"),
    label="label",
    dense=("m", "n"),
    sparse=("h", "k"),
    kinds=("hex", "hex"),
    separator=",",
)


def test_lines_are_parsed_as_by_polars():
    rows = text_rows(300)
    rows[5][3], rows[6][3], rows[7][3] = "-7", "999999999", "-000000012"
    rows[8][20] = "ABCDEF01"
    text = "".join("\t".join(row) + "\n" for row in rows).encode()
    actual = parse._by_loop(text, len(rows), CRITEO)
    expected = parse._parse_clean(text, len(rows), CRITEO)
    assert actual.schema == expected.schema
    assert actual.equals(expected, null_equal=True)


CELLS = ["", "0", "1", "2", "-1", "-", "+1", " 1", "1234567890", "12345678", "abcdef0g",
         "ABCDEF0", "00000000", "-12345678", "x", "\u00e9", "1\r", "1,1", "1\n0"]  # fmt: skip


@given(st.lists(st.lists(st.sampled_from(CELLS), min_size=4, max_size=6), max_size=4))
def test_polars_agrees_on_all_lines_that_the_loop_accepts(rows):
    rows = [["0a0b0c0d", "5", "1", "", "-3"], *rows]
    text = "".join(",".join(row) + "\n" for row in rows).encode()
    num_lines = text.count(b"\n")
    actual = parse._by_loop(text, num_lines, SMALL)
    if actual is not None:
        assert actual.equals(parse._parse_clean(text, num_lines, SMALL), null_equal=True)
    for size in (1, 7, len(text) - 2):  # the loop must not read beyond the end
        parse._by_loop(text[:size], max(num_lines, 1), SMALL)


def test_the_loop_accepts_plain_lines():
    text = b"0a0b0c0d,5,1,,-3\n,,0,FFFFFFFF,\n"
    frame = parse._by_loop(text, 2, SMALL)
    assert frame.columns == ["label", "m", "n", "h", "k"]
    assert frame.rows() == [(1, -3, 5, 0x0A0B0C0D, None), (0, None, None, None, 2**32 - 1)]
    assert frame.dtypes == [pl.UInt8, pl.Int32, pl.Int32, pl.UInt32, pl.UInt32]
    for broken in (text[:-1], text + b"\n", text[2:], text.replace(b"-3", b"3-")):
        assert parse._by_loop(broken, 2, SMALL) is None


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
@pytest.mark.parametrize("number", [0, 1, 5000])
def test_ids_are_looked_up_as_by_numpy(monkeypatch, kind, number):
    rng = np.random.default_rng(number)
    most = np.iinfo(kind).max
    keys = np.unique(rng.integers(0, most, number, dtype=kind, endpoint=True))
    if number > 1:
        keys[0], keys[-1] = 0, most
    id_table = IdTable(keys, rng.permutation(len(keys)).astype(np.int32) + 2, np.ones(len(keys)))
    asked = np.concatenate([keys, keys + kind(1), rng.integers(0, most, 999, dtype=kind)])
    fast = id_table.lookup(asked)
    monkeypatch.setattr("sbpflow.data.format.ids.find_loops", lambda *_: None)
    assert np.array_equal(fast, id_table.lookup(asked))
    assert fast.dtype == np.int32

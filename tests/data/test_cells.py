"""Tests that the meaning of a cell does not depend on neighboring rows, in text and in Parquet."""

from dataclasses import replace
from decimal import Decimal

import polars as pl
import pytest

from sbpflow.data.format.schema import CRITEO, ListColumn, Schema
from sbpflow.data.prepare import lists
from sbpflow.data.prepare.parse import parse_piece
from sbpflow.data.prepare.source import find_inputs
from sbpflow.data.prepare.tables import table_piece
from sbpflow.serving import cells, columns
from tests.data.rows import run_prepare, text_rows, write_rows

ROWS = text_rows(20)
COMMAS = Schema(
    columns=("label", "d", "e", "s"),
    label="label",
    dense=("d", "e"),
    sparse=("s",),
    kinds=("string",),
    separator=",",
)


@pytest.mark.parametrize("column", [1, 7, 13])
@pytest.mark.parametrize("cell", [" ", "   ", " 5", "5 ", " +", "+5", "-", " -7", "007"])
def test_a_dense_cell_does_not_depend_on_its_neighbours(cell, column):
    lines = ["\t".join(row) for row in ROWS]
    lines[7] = "\t".join([*ROWS[7][:column], cell, *ROWS[7][column + 1 :]])
    alone = parse_piece("\n".join(lines).encode(), CRITEO)
    with_bad = parse_piece("\n".join([*lines, "zz"]).encode(), CRITEO)
    is_number = cell.lstrip(" ").lstrip("+-").isdigit()
    reason = f"I{column} is not a 32-bit integer"
    assert alone.bad.counts == ({} if is_number else {reason: 1})
    assert with_bad.bad.total == alone.bad.total + 1
    assert alone.frame.equals(with_bad.frame)


@pytest.mark.parametrize("cell", [" ", "\t", "\t\t", "\t5", " \t5", " 5", "5\t", ""])
def test_blanks_and_tabs_in_dense_cells_of_comma_separated_text(cell):
    good = b"1,2,3,two words\n0,-2,,tab\there\n"
    line = f"1,4,{cell},x\n".encode()
    alone = parse_piece(good + line, COMMAS)
    with_bad = parse_piece(good + line + b"zz\n", COMMAS)
    is_good = cell in (" 5", "")
    assert alone.bad.counts == (
        {} if is_good else {f"{COMMAS.dense[1]} is not a 32-bit integer": 1}
    )
    assert alone.frame.equals(with_bad.frame)
    assert len(alone.frame) == 2 + is_good


def test_blanks_in_string_categories_do_not_slow_a_piece(monkeypatch):
    """The check must not parse line by line, which is much slower."""

    def slow(*_):
        raise AssertionError("line by line")

    monkeypatch.setattr("sbpflow.data.prepare.parse.parse_table", slow)
    piece = parse_piece(b"1,2,3,two words\n0,-2,,a\tb\n1, 5,+6, \n", COMMAS)
    assert piece.frame["d"].to_list() == [2, -2, 5]
    assert piece.bad.total == 0


def is_good(integer, category="", kind="integer"):
    schema = replace(COMMAS, kinds=(kind,))
    return parse_piece(f"1,{integer},,{category}\n".encode(), schema).bad.total == 0


def test_very_long_integers_are_checked_without_converting_them():
    assert not is_good("9" * 5000)
    assert is_good("0" * 5000 + "7")
    assert is_good("-2147483648")
    assert not is_good("2147483648")
    assert is_good("", "9223372036854775807")
    assert is_good("", "-9223372036854775808")
    assert not is_good("", "9223372036854775808")
    assert not is_good("", "+5")
    assert not is_good("", "1234567", "hex")


CELLS = ["5", "+5", "-5", " 5", "5 ", " ", "", "1e1", "1.0", "007", "0x5", "nan", "inf", "-0",
         "2147483647", "2147483648", "-2147483648", "99999999999", "9223372036854775807",
         "9223372036854775808", "-9223372036854775808", "0" * 30 + "7", "5\n", "\u0665"
]  # fmt: skip


@pytest.mark.parametrize("kind", ["hex", "string", "integer"])
def test_text_cells_have_the_same_meaning_in_parquet_and_text(tmp_path, kind):
    """Test each cell as a dense value and as a category."""
    schema = Schema(
        columns=("label", "d", "s"), label="label", dense=("d",), sparse=("s",), kinds=(kind,)
    )
    known = "0123abCD" if kind == "hex" else "7"
    for cell in CELLS:
        for dense, category in ((cell, known), ("3", cell)):
            frame = pl.DataFrame({"label": ["1"], "d": [dense], "s": [category]})
            frame.write_parquet(tmp_path / "r.parquet")
            binary = table_piece(tmp_path / "r.parquet", 0, schema)
            if "\n" in cell:
                assert (binary.bad.total == 0) == (kind == "string" and category == cell)
                continue
            text = parse_piece(f"1\t{dense}\t{category}\n".encode(), schema)
            assert binary.frame.equals(text.frame), (dense, category)
            assert binary.bad.total == text.bad.total, (dense, category)


def test_a_parquet_table_without_dense_columns_is_read(tmp_path):
    schema = Schema(columns=("y", "c"), label="y", dense=(), sparse=("c",), kinds=("string",))
    frame = pl.DataFrame({"y": [0, 1, 2], "c": ["a", None, "b"]})
    frame.write_parquet(tmp_path / "r.parquet")
    piece = table_piece(tmp_path / "r.parquet", 0, schema)
    assert piece.frame["y"].to_list() == [0, 1]
    assert piece.frame["c"].null_count() == 1
    assert piece.bad.counts == {"y is not 0 or 1": 1}
    manifest = run_prepare(
        tmp_path / "set", tmp_path / "r.parquet", schema=schema, crosses=(), max_bad_fraction=0.5
    )
    assert manifest.num_words == 2


def test_files_with_unusual_digits_in_their_names_are_sorted(tmp_path):
    """A superscript two is a digit but not a decimal; an Arabic-Indic three is both."""
    for name in ("1\u00b22.tsv", "\u00b2.tsv", "10.tsv", "2.tsv", "\u0663.tsv"):
        write_rows(tmp_path / name, ROWS[:2])
    names = [source.path.name for source in find_inputs([tmp_path])]
    assert sorted(names) != names
    assert names.index("2.tsv") < names.index("\u0663.tsv") < names.index("10.tsv")


@pytest.mark.parametrize(
    ("weight", "fits"),
    [("0.5", True), (" 0.5", True), ("+.5", True), ("5.", True), ("-1e3", True), ("0.5 ", False),
     ("1_0", False), ("nan", False), ("inf", False), ("1e400", False), ("", False)],
)  # fmt: skip
def test_weights_of_values_are_real_numbers_in_prepare_and_in_bundles(weight, fits):
    cells = [f"a:{weight}|b:1"]
    column = ListColumn(name="c", inline=":")
    prepared = lists.read_list(pl.DataFrame({"c": cells}), column, "string")
    assert prepared.bad_weights.to_list() == [not fits]
    options = {"separator": "|", "most": 3, "beyond": "error", "weights": None, "inline": ":"}
    entry = {"name": "c", "kind": "string", "list": options}
    if fits:
        weights = columns.read_list(entry, {"c": cells}).weights
        assert weights.tolist() == prepared.values["weight"].to_list() == [float(weight), 1.0]
    else:
        with pytest.raises(columns.RowError, match="not a finite number"):
            columns.read_list(entry, {"c": cells})


def test_a_decimal_with_a_million_digits_is_refused_quickly():
    with pytest.raises(cells.Misfit):
        cells.key_of(Decimal("1e1000000"), "integer")

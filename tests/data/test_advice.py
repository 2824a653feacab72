"""Tests that the message for a first attempt with the wrong schema names the key to write."""

import gzip

import pytest

from sbpflow.data.__main__ import main
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.prepare import prepare
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.errors import DataError
from tests.data.test_ordinary_tables import HEAD, run

NAMED = "header: true"
UNNAMED = "header: false\ncolumns: [click, income, city]"
COLUMNS = "label: click\ndense: [income]\nsparse: {city: string}\n"
ROWS = "1,3,Berlin\n0,2,Paris\n"


def message_of(tmp_path, text, schema, name="rows.csv"):
    """Return prepare's message for this text."""
    rows, settings = tmp_path / name, {"crosses": ()}
    rows.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    if schema is not None:
        (tmp_path / "schema.yaml").write_text(f"{schema}\n{COLUMNS}")
        settings["schema"] = read_schema(tmp_path / "schema.yaml")
    with pytest.raises(DataError) as caught:
        prepare(PrepareOptions(inputs=(rows,), output=tmp_path / "set", **settings))
    return str(caught.value)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
@pytest.mark.parametrize("schema", [NAMED, UNNAMED, None])
def test_an_empty_file_is_reported_as_empty(tmp_path, name, schema):
    message = message_of(tmp_path, "", schema, name)
    assert name in message
    expected = (
        ("the file is empty", "the first line is empty") if schema == NAMED else ("has no rows",)
    )
    assert any(text in message for text in expected), message


@pytest.mark.parametrize(
    ("text", "schema", "advice"),
    [
        (ROWS.replace(",", "\t"), None, "describe any other table in a --schema file (see docs"),
        (ROWS, None, 'in a --schema file, which probably needs `separator: ","`'),
        (ROWS, UNNAMED, 'the schema probably needs `separator: ","`'),
        (f"click,income,city\n{ROWS}", NAMED, 'write `separator: ","` in the schema'),
        (
            f"click,income,city\n{ROWS}".replace("\n", "\r"),
            f"{NAMED}\nseparator: ','",
            r"its lines end in carriage returns; convert the file with `tr '\r' '\n'`",
        ),
        (
            ROWS.replace("\n", "\r"),
            f"{UNNAMED}\nseparator: ','",
            r"the lines end in carriage returns; convert the file with `tr '\r' '\n'`",
        ),
        (
            f"click,income,city\n{ROWS}",
            f"{UNNAMED}\nseparator: ','",
            "the schema probably needs `header: true`",
        ),
        (
            '1,3,"Berlin, Mitte"\n0,2,Paris\n',
            f"{UNNAMED}\nseparator: ','",
            "the schema probably needs `quote: '\"'`",
        ),
        (
            '1,"3",Berlin\n0,"2",Paris\n',
            f"{UNNAMED}\nseparator: ','",
            "the schema probably needs `quote: '\"'`",
        ),
        (
            '"click","income","city"\n"1","3","Berlin"\n',
            f"{NAMED}\nseparator: ','",
            "write `quote: '\"'` in the schema",
        ),
    ],
)
def test_the_missing_key_is_named(tmp_path, text, schema, advice):
    assert advice in message_of(tmp_path, text, schema)


def test_rows_with_other_categories_are_advised_to_use_a_schema(tmp_path):
    row = "\t".join(["1", *["3"] * 13, *["Berlin"] * 26])
    message = message_of(tmp_path, f"{row}\n" * 3, None)
    assert "3 x C1 is not eight hex digits" in message
    assert "describe any other table in a --schema file (see docs/data.md)" in message


def test_a_row_that_no_key_would_fix_gets_no_advice(tmp_path):
    message = message_of(tmp_path, "1,3,Berlin\n0,2,Paris,x\n", f"{UNNAMED}\nseparator: ','")
    assert "4 fields instead of 3" in message
    assert "--schema" not in message


@pytest.mark.parametrize(
    ("cells", "advice"),
    [
        ("123", "u: write the kind of the column under sparse, as in"),
        ("abc", "use kind string"),
        ("aba", "column u: write the kind of the column under sparse, as in"),
    ],
)
def test_the_advice_for_a_column_without_a_kind_names_kinds(tmp_path, capsys, cells, advice):
    rows = "".join(f"{number % 2},{cells[number % 3]}\n" for number in range(9))
    (tmp_path / "t.csv").write_text("y,u\n" + rows)
    assert run(tmp_path, HEAD + "label: y\nsparse: [u]\n", tmp_path / "t.csv") == 2
    assert advice in capsys.readouterr().err


def test_integers_in_a_column_of_dates_name_the_kind_to_write(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("y,c,ts\n" + "0,a,1700000000\n1,b,1700000001\n" * 5)
    schema = HEAD + "label: y\nsparse: {c: string}\ntime: ts\n"
    assert run(tmp_path, schema, tmp_path / "t.csv") == 2
    assert "or `time: {NAME: integer}` for integers" in capsys.readouterr().err


def test_a_few_labels_such_as_na_are_bad_lines_and_not_the_label_1(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("y,c\n" + "0,a\n1,b\nNA,b\n" * 5)
    assert run(tmp_path, HEAD + "label: y\nsparse: {c: string}\n", tmp_path / "t.csv") == 2
    error = capsys.readouterr().err
    assert "t.csv:4: y is not 0 or 1: 'NA'" in error
    assert "correct these rows, or skip them with --max-bad-fraction 0.334" in error
    assert "label: {" not in error


@pytest.mark.parametrize(
    ("labels", "other", "rule"), [("0", 2, 2), ("1", 2, 2), ("1", -1, 1), ("0011", 2, None)]
)
def test_a_few_other_numbers_need_a_rule_if_0_or_1_is_missing(
    tmp_path, capsys, labels, other, rule
):
    text = "".join(f"{label},a\n" for label in labels * 9) + f"{other},b\n"
    (tmp_path / "t.csv").write_text(f"y,c\n{text}")
    assert run(tmp_path, HEAD + "label: y\nsparse: {c: string}\n", tmp_path / "t.csv") == 2
    error = capsys.readouterr().err
    assert f'label: {{y: ">= {rule}"}}' in error if rule else "label: {" not in error


def test_bad_labels_of_new_rows_are_no_reason_to_change_their_columns(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("y,c\n" + "0,a\n1,b\n" * 5)
    assert run(tmp_path, HEAD + "label: y\nsparse: {c: string}\n", tmp_path / "t.csv") == 0
    (tmp_path / "n.csv").write_text("y,c\nNA,a\n")
    words = ["--like", tmp_path / "set", "--input", tmp_path / "n.csv", "--output", tmp_path / "n"]
    assert main(["encode", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert "n.csv:2: y is not 0 or 1: 'NA'" in error
    assert "new rows must have" not in error


def test_a_proposed_schema_of_text_with_carriage_returns_is_refused_with_advice(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("click,income\r1,3\r0,2\r", newline="")
    assert main(["schema", str(tmp_path / "t.csv")]) == 2
    assert "its lines end in carriage returns; convert the file" in capsys.readouterr().err

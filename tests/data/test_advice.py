"""What a first attempt with the wrong schema is answered: the key to write."""

import gzip

import pytest

from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.prepare import prepare
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.errors import DataError

NAMED = "header: true"
UNNAMED = "header: false\ncolumns: [click, income, city]"
COLUMNS = "label: click\ndense: [income]\nsparse: {city: string}\n"
ROWS = "1,3,Berlin\n0,2,Paris\n"


def answer(tmp_path, text, schema, name="rows.csv"):
    """The message of prepare for these rows."""
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
def test_an_empty_file_is_called_empty(tmp_path, name, schema):
    message = answer(tmp_path, "", schema, name)
    assert name in message
    said = ("is empty", "its first line is empty") if schema == NAMED else ("has no rows",)
    assert any(words in message for words in said), message


@pytest.mark.parametrize(
    ("text", "schema", "advice"),
    [
        (ROWS.replace(",", "\t"), None, "describe any other table in a --schema file (docs"),
        (ROWS, None, 'in a --schema file, here probably with `separator: ","`'),
        (ROWS, UNNAMED, 'the --schema file probably needs `separator: ","`'),
        (f"click,income,city\n{ROWS}", NAMED, 'write `separator: ","` in the --schema file'),
        (
            f"click,income,city\n{ROWS}",
            f"{UNNAMED}\nseparator: ','",
            "the --schema file probably needs `header: true`",
        ),
        (
            '1,3,"Berlin, Mitte"\n0,2,Paris\n',
            f"{UNNAMED}\nseparator: ','",
            "the --schema file probably needs `quote: '\"'`",
        ),
        (
            '1,"3",Berlin\n0,"2",Paris\n',
            f"{UNNAMED}\nseparator: ','",
            "the --schema file probably needs `quote: '\"'`",
        ),
        (
            '"click","income","city"\n"1","3","Berlin"\n',
            f"{NAMED}\nseparator: ','",
            "write `quote: '\"'` in the --schema file",
        ),
    ],
)
def test_the_key_that_is_missing_is_named(tmp_path, text, schema, advice):
    assert advice in answer(tmp_path, text, schema)


def test_a_row_that_no_key_mends_gets_no_advice(tmp_path):
    message = answer(tmp_path, "1,3,Berlin\n0,2,Paris,x\n", f"{UNNAMED}\nseparator: ','")
    assert "4 fields instead of 3" in message
    assert "--schema" not in message

"""Tests cells that could silently change: each makes its line bad, stops prepare, or is stored
exactly.
"""

import errno
import json
import re
from datetime import UTC, datetime

import numpy as np
import polars as pl
import pytest

from sbpflow.data import load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.format.manifest import MANIFEST
from sbpflow.data.format.schema import TIME
from sbpflow.data.prepare import prepare, stage
from sbpflow.data.prepare.csv_text import parse_table
from sbpflow.data.prepare.new_rows import encode
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.data.prepare.tables import table_piece
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.remote_path import input_path
from tests.data.rows import all_words, run_prepare

LINES = "separator: ','\nquote: '\"'\n"


def schema_of(folder, text):
    path = folder / "schema.yaml"
    path.write_text(LINES + text)
    return read_schema(path)


def parsed(folder, schema, text):
    schema = schema_of(folder, schema)
    return parse_table(text.encode(), schema.columns, schema)


def from_parquet(folder, schema, **columns):
    path = folder / "t.parquet"
    pl.DataFrame({"label": [1, 0], "C1": ["a", "b"], **columns}).write_parquet(path)
    return table_piece(path, 0, schema_of(folder, schema))


def prepared(folder, schema, text):
    (folder / "t.csv").write_text(text)
    options = {"schema": schema_of(folder, schema), "crosses": (), "min_count": 1}
    return run_prepare(folder / "set", folder / "t.csv", max_bad_fraction=0.5, **options)


def test_a_year_has_four_digits(tmp_path):
    """Many parsers would read 24-05-01 as the year 24, and 01-05-24 as the year 1."""
    cells = ("2024-05-01", "24-05-01", "01-05-24", "01-05-24 10:00:00", " 2024-05-01T00:00:00Z")
    text = "".join(f"1,a,{cell}\n" for cell in cells)
    piece = parsed(tmp_path, "sparse: {C1: string}\ntime: ts\n", text)
    assert piece.bad.counts == {"ts is not a time (date)": 3}
    assert piece.frame[TIME].to_list() == [1714521600 * 10**6] * 2


@pytest.mark.parametrize(
    ("form", "cell", "expected"),
    [
        ("%y%m%d%H", "14102103", "2014-10-21T03:00"),
        ("%d/%m/%Y %I %p", "21/10/2014 03 PM", "2014-10-21T15:00"),
        ("%Y-%m-%d %H %Z", "2014-10-21 03 UTC", "2014-10-21T03:00"),
        ("%Y-%m-%d %H:%M %z", "2014-10-21 03:04 +0200", "2014-10-21T01:04"),
        ("%Y-%m-%d %H:%M:%S.%f", "2014-10-21 03:04:05.500000", "2014-10-21T03:04:05.5"),
        ("%Y-%m-%d %H:%M:%S%.f", "2014-10-21 03:04:05.25", "2014-10-21T03:04:05.25"),
    ],
)
def test_a_time_is_read_by_the_codes_of_strptime(tmp_path, form, cell, expected):
    schema = f"sparse: {{C1: string}}\ntime: {{ts: '{form}'}}\n"
    piece = parsed(tmp_path, schema, f"1,a,{cell}\n0,a,x\n")
    assert piece.bad.counts == {f"ts is not a time ({form})": 1}
    moment = datetime.fromisoformat(expected).replace(tzinfo=UTC).timestamp()
    assert piece.frame[TIME].to_list() == [moment * 10**6]


@pytest.mark.parametrize(
    "form", ["%H:%M", "%d/%m", "%Y-%m-%d %H:%M:%S,%f", "%Y-%m-%d %Q", "%Y-%m-%d %", "%Y-%m-%d %I"]
)
def test_a_format_that_cannot_be_read_is_refused_with_its_key(tmp_path, form):
    with pytest.raises(ConfigError) as error:
        schema_of(tmp_path, f"sparse: {{C1: string}}\ntime: {{ts: '{form}'}}\n")
    assert f"schema.yaml: time ts is {form!r}; write a format with codes" in str(error.value)


def test_a_name_in_the_header_may_have_several_lines(tmp_path):
    text = 'label,"a\nnote, too",C1\n1,x,p\n0,x,q\n1,x\n'
    manifest = prepared(tmp_path, "header: true\nsparse: {C1: string}\n", text)
    assert manifest.content["bad_lines"] == {"2 fields instead of 3": 1}
    assert all_words(manifest, "train").shape == (2, 2)
    piece = parse_table(text.encode(), ("label", "a\nnote, too", "C1"),
                        schema_of(tmp_path, "header: true\nsparse: {C1: string}\n"), 1)  # fmt: skip
    assert [number for number, *_ in piece.bad.examples] == [3], "line 5 is line 3 after the first"


@pytest.mark.parametrize("kind", [pl.Date, pl.Datetime("ms"), pl.Datetime("ns")])
def test_dates_are_not_read_as_integers_of_the_files_unit(tmp_path, kind):
    times = pl.Series([1, 2]).cast(kind)
    with pytest.raises(DataError, match=r"columns ts \(Date.* need `time: NAME`"):
        from_parquet(tmp_path, "sparse: {C1: string}\ntime: {ts: integer}\n", ts=times)
    piece = from_parquet(tmp_path, "sparse: {C1: string}\ntime: ts\n", ts=times)
    unit = {pl.Date: 86_400 * 10**6, pl.Datetime("ms"): 1000}.get(kind, 0)
    assert piece.frame[TIME].to_list() == [unit, 2 * unit]


def test_line_ends_in_quotes_are_preserved(tmp_path):
    """LF and CRLF inside quotes are kept as they are, in a file whose rows end with CRLF."""
    cells = ["p\r\nq", "p\nq", "p\n\r\nq", "\r\n", "p"]
    text = "".join(f'1,"{cell}"\r\n' for cell in cells) + "\r\n" + '0,"p\rq"\r\n0,"p","q"\r\n'
    piece = parsed(tmp_path, "sparse: {C1: string}\n", text)
    pl.DataFrame({"label": [1] * 5, "C1": cells}).write_parquet(tmp_path / "t.parquet")
    schema = schema_of(tmp_path, "sparse: {C1: string}\n")
    assert piece.frame.equals(table_piece(tmp_path / "t.parquet", 0, schema).frame)
    assert piece.frame["C1"].n_unique() == 5
    counts = {"blank line": 1, "stray carriage return": 1, "3 fields instead of 2": 1}
    assert piece.bad.counts == counts


def test_a_weight_is_not_read_as_a_value(tmp_path):
    schema = "sparse: {C1: string, t: {kind: integer, weights: {after: ':'}}}\n"
    with pytest.raises(DataError, match="a value and then its weight"):
        from_parquet(tmp_path, schema, t=[[{"weight": 1.0, "id": 5}], []])
    piece = from_parquet(tmp_path, schema, t=[[{"id": 5, "weight": 1.0}], []])
    assert piece.lists["t"]["key"].to_list() == [5]


def test_a_dense_column_may_be_named_like_an_entry_of_a_list(tmp_path):
    schema = "dense: {'t[0]': identity}\nsparse: {t: {kind: string, width: 2}}\n"
    manifest = prepared(tmp_path, schema, "1,5.5,a|b\n0,6.5,b\n1,7.5,a|b\n0,8.5,a\n1,9.5,b\n")
    words = all_words(manifest, "train")
    assert words[:, 1].view(np.float32).tolist() == [5.5, 6.5, 7.5, 8.5]
    assert len({*words[:, 2:].reshape(-1).tolist()} - {0}) == 2


@pytest.mark.parametrize("clip", ["[-1.0e300, 1]", "[0, .inf]", "[0, 3.5e38]", "[0, true]"])
def test_limits_beyond_float32_are_refused(tmp_path, clip):
    with pytest.raises(ConfigError, match=r"clip is .* in the float32 range, -3.40282e\+38 to"):
        schema_of(tmp_path, f"dense: {{d: {{clip: {clip}}}}}\nsparse: [C1]\n")


def test_infinite_values_are_in_the_outermost_buckets(tmp_path):
    cells = ("inf", "inf", "-inf", "-inf", "1", "inf", "-inf", "2", "", "3")
    text = "".join(f"1,{cell},a\n" for cell in cells)
    manifest = prepared(tmp_path, "dense: {d: {buckets: 3}}\nsparse: {C1: string}\n", text)
    place = [field.name for field in manifest.fields].index("d")
    ids = all_words(manifest, "train")[:, 1 + place].tolist()
    by_cell = dict(zip(cells, ids, strict=False))
    assert by_cell["-inf"] == 2
    assert by_cell["-inf"] <= by_cell["1"] <= by_cell["2"] < by_cell["inf"]
    text = (manifest.path / MANIFEST).read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_values_dropped_from_bad_lines_are_not_counted(tmp_path):
    schema = "sparse: {C1: string, t: {kind: string, max: 2, beyond: first}}\n"
    piece = parsed(tmp_path, schema, "1,a,p|q|r\n7,a,p|q|r|s\n0,a,p\n")
    assert (piece.cut, piece.bad.counts) == ({"t": 1}, {"label is not 0 or 1": 1})


def test_a_run_reports_values_that_differ_from_the_input(tmp_path, caplog):
    schema = (
        "dense: {d: {clip: [0, 2]}}\nsparse: {C1: string, t: {kind: string, max: 2, beyond: last}}"
    )
    caplog.set_level("INFO")
    manifest = prepared(
        tmp_path, schema, "1,5,a,p|q|r\n0,1,b,p\n\n1,-3,a,q\n0,1,b,p|q|r|s\n1,1,a,\n"
    )
    assert "bad lines were skipped:\n  1 x blank line" in caplog.messages
    assert (
        "values clamped to `clip` or to the input range of their transform: d 2" in caplog.messages
    )
    assert "values dropped because a row had too many of them: t 3" in caplog.messages
    assert not any("without an id" in message for message in caplog.messages)
    caplog.clear()
    (tmp_path / "new.csv").write_text("1,1,new,p|new\n0,1,a,\n0,1,other,x\n")
    new = encode(
        [tmp_path / "new.csv"], tmp_path / "new", like=manifest.path, workers=1, max_bad_fraction=0
    )
    assert new is not None
    assert "lookups of values without their own id: C1 2, t 2" in caplog.messages


def test_encoded_rows_cannot_replace_the_set_of_like(tmp_path, capsys):
    rows = "1,a\n0,b\n1,a\n0,b\n1,a\n"
    manifest = prepared(tmp_path, "sparse: {C1: string}\n", rows)
    arguments = ["encode", "--like", manifest.path, "--input", tmp_path / "t.csv", "--overwrite"]
    assert main([*map(str, arguments), "--output", str(tmp_path / "." / "set")]) == 2
    assert "this folder contains the --like set" in capsys.readouterr().err
    assert load_manifest(manifest.path).fingerprint == manifest.fingerprint


def test_a_file_written_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """If an input changes during the run, its last line may be incomplete, or its rows may come
    from two versions.
    """
    text = "".join(f"1,value-{k}\n" for k in range(200))
    real = stage.parse_table

    def parse_and_append(*arguments, **named):
        with (tmp_path / "t.csv").open("a") as file:
            file.write("0,late\n")
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "parse_table", parse_and_append)
        with pytest.raises(DataError, match=r"t\.csv changed while it was read"):
            prepared(tmp_path, "sparse: {C1: string}\n", text)
    rows = prepared(tmp_path, "sparse: {C1: string}\n", text).splits
    assert sum(rows.values()) == 200


@pytest.mark.parametrize("size", [4, 8])
def test_a_remote_file_written_while_it_is_read_is_refused(tmp_path, monkeypatch, size):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/late/t.csv", b"1,a\n0,b\n")
    real = stage.parse_table

    def parse_and_replace(*arguments, **named):
        memory.pipe("/late/t.csv", b"1,c\n0,d\n"[:size])
        return real(*arguments, **named)

    options = {"schema": schema_of(tmp_path, "sparse: {C1: string}\n"), "crosses": ()}
    with monkeypatch.context() as patch:
        patch.setattr(stage, "parse_table", parse_and_replace)
        with pytest.raises(DataError, match=r"late/t\.csv changed while it was read"):
            run_prepare(tmp_path / "set", input_path("memory://late/t.csv"), **options)
    assert run_prepare(tmp_path / "set", input_path("memory://late/t.csv"), **options).splits


def test_a_full_disk_is_reported_for_remote_rows(tmp_path, monkeypatch, capsys):
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/full/t.csv", b"1,a\n" * 100_000)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare, "stage_inputs", full)
    (tmp_path / "schema.yaml").write_text(LINES + "sparse: {C1: string}\n")
    words = ["--input", "memory://full/t.csv", "--schema", str(tmp_path / "schema.yaml")]
    assert main(["prepare", *words, "--output", str(tmp_path / "set")]) == 2
    message = capsys.readouterr().err
    assert "no space left on device; the command needs about 0.6 MB" in message
    assert re.search(r"\d [GM]B is free in", message)

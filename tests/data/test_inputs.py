"""Tests which inputs prepare accepts: file formats, labels, Parquet, splits, and a full disk."""

import gzip
import lzma
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sbpflow.data import load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.format.schema import CRITEO
from sbpflow.data.prepare import count, tables
from sbpflow.data.prepare.parse import parse_piece
from sbpflow.data.prepare.tables import table_piece
from tests.data.rows import (
    ROOT,
    all_words,
    folder_bytes,
    ids,
    run_prepare,
    text_rows,
    write_rows,
)

ROWS = text_rows(600)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("text") / "rows.tsv", ROWS)


def refused(capsys, output, *arguments):
    """Return prepare's single error line."""
    assert main(["prepare", "--output", str(output), *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "Traceback" not in captured.err + captured.out
    assert not output.exists()
    return errors[0]


TEXT = b"".join("\t".join(row).encode() + b"\n" for row in ROWS[:50])
OTHER_FORMATS = {
    "rows.parquet.gz": (gzip.compress(b"PAR1" + TEXT), "gunzip; its content is Parquet"),
    "rows.tsv": (b"PAR1" + TEXT, "rename it to end in .parquet"),
    "gzipped.tsv": (gzip.compress(TEXT), "rename it to end in .gz"),
    "utf16.tsv": (TEXT.decode().encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "marked.tsv": (b"\xef\xbb\xbf" + TEXT, "tail -c +4"),
    "marked.tsv.gz": (gzip.compress(b"\xef\xbb\xbf" + TEXT), "gunzip; its content starts with"),
    "rows.zip": (b"PK\x03\x04" + TEXT, "zip archive"),
    "rows.tsv.zst": (b"\x28\xb5\x2f\xfd" + TEXT, "truncated or damaged"),
    "zstd.tsv": (b"\x28\xb5\x2f\xfd" + TEXT, "rename it to end in .zst"),
    "arrow.tsv": (b"ARROW1" + TEXT, "rename it to end in .arrow"),
    "marked.tsv.xz": (lzma.compress(b"\xef\xbb\xbf" + TEXT), "decompress it; its content starts"),
    "cut.tsv.gz": (gzip.compress(TEXT)[:8], "truncated or damaged"),
    "plain.tsv.gz": (TEXT, "is not a gzip file"),
    "empty.tsv.gz": (b"", "truncated or damaged (empty file)"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_file_in_another_format_is_refused_with_advice(tmp_path, capsys, name):
    content, message = OTHER_FORMATS[name]
    (tmp_path / name).write_bytes(content)
    error = refused(capsys, tmp_path / "set", "--input", tmp_path / name)
    assert message in error
    assert name in error


def test_a_file_whose_name_is_not_utf_8_is_refused_at_the_start(tmp_path, capsys):
    path = tmp_path / os.fsdecode(b"caf\xe9.tsv")
    path.write_bytes(TEXT)
    error = refused(capsys, tmp_path / "set", "--input", path)
    assert "caf\\udce9.tsv': the name is not UTF-8" in error


def test_a_folder_may_have_suffixes_of_any_case_and_day_files(tmp_path, source):
    folder = tmp_path / "parts"
    folder.mkdir()
    write_rows(folder / "day_2", ROWS[100:300])
    write_rows(folder / "day_10", ROWS[300:450])
    write_rows(folder / "day_1.TSV", ROWS[:100])
    write_rows(folder / "part-00011.gz", ROWS[450:]).rename(folder / "part-00011.GZ")
    (folder / "README.md").write_text("not data")
    (folder / ".day_3").write_text("not data")
    names = [entry["name"] for entry in run_prepare(tmp_path / "a", folder).content["inputs"]]
    assert names == ["day_1.TSV", "day_2", "day_10", "part-00011.GZ"]
    plain = run_prepare(tmp_path / "b", source)
    for split in ("train", "test"):
        words = all_words(load_manifest(tmp_path / "a"), split)
        assert np.array_equal(words, all_words(plain, split))


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_the_same_file_twice_is_refused(tmp_path, capsys, source, link):
    again = source
    if link:
        again = tmp_path / "again.tsv"
        link(source, again)
    error = refused(capsys, tmp_path / "set", "--input", source, again)
    assert "would be duplicated" in error


@pytest.mark.parametrize("label", [" 1", "01", "+1", "1 ", "1.5", "-0", "", "yes"])
def test_a_label_must_be_exactly_0_or_1_next_to_any_row(label):
    lines = ["\t".join(row) for row in ROWS[:20]]
    lines[7] = "\t".join([label, *ROWS[7][1:]])
    alone = parse_piece("\n".join(lines).encode(), CRITEO)
    with_bad = parse_piece("\n".join([*lines, "broken"]).encode(), CRITEO)
    assert alone.bad.counts == {f"label is {'not 0 or 1' if label else 'missing'}": 1}
    assert alone.frame.equals(with_bad.frame)
    assert len(alone.frame) == 19


SMALL_SCHEMA = "dense: {I1: {kind: integer}}\nsparse: {C1: string, C2: integer}\n"


def small_parquet(tmp_path, label, dense, first, second):
    """Write Parquet rows with the given columns; return them as prepare reads them."""
    from sbpflow.data.prepare.schema_file import read_schema

    (tmp_path / "schema.yaml").write_text(SMALL_SCHEMA)
    frame = pl.DataFrame({"label": label, "I1": dense, "C1": first, "C2": second})
    frame.write_parquet(tmp_path / "r.parquet")
    return table_piece(tmp_path / "r.parquet", 0, read_schema(tmp_path / "schema.yaml"))


@pytest.mark.parametrize(
    ("label", "num_bad"),
    [
        ([0, 1, 1], 0),
        ([False, True, True], 0),
        ([0.0, 1.0, 1.0], 0),
        (["0", "1", "1"], 0),
        (["0", " 1", "01"], 2),
        ([0.5, float("nan"), 1.0], 2),
        ([2, -1, None], 3),
        ([None, None, None], 3),
    ],
)
def test_labels_of_parquet(tmp_path, label, num_bad):
    piece = small_parquet(tmp_path, label, [1, 2, 3], ["a", "b", "c"], [1, 2, 3])
    assert piece.bad.total == num_bad
    assert len(piece.frame) == 3 - num_bad


def test_whole_parquet_floats_and_categoricals_are_read(tmp_path, monkeypatch):
    read: list[Path] = []  # the column names of a file are read once, not once per column
    names = tables.table_columns
    monkeypatch.setattr(tables, "table_columns", lambda path: (read.append(path), names(path))[1])
    floats = small_parquet(tmp_path, [0, 1], [5.0, float("nan")], ["x", "y"], [7.0, None])
    integers = small_parquet(
        tmp_path, [0, 1], [5, None], pl.Series(["x", "y"], dtype=pl.Categorical), [7, None]
    )
    assert len(read) == 2
    assert floats.frame.equals(integers.frame)
    assert floats.frame["I1"].to_list() == [5, None]
    broken = small_parquet(tmp_path, [0, 1], [5.5, 1.0], ["x", "y"], [7.0, 7.5])
    assert broken.bad.counts == {
        "C2 is not an integer": 1,
        "I1 is not a 32-bit integer": 1,
    }


@pytest.mark.parametrize(
    ("second", "num_bad"), [([True, False], 2), ([2**63 - 1, -(2**63)], 0), ([1e300, 1.0], 1)]
)
def test_unusual_categories_of_parquet(tmp_path, second, num_bad):
    piece = small_parquet(tmp_path, [0, 1], [1, 2], ["a", "b"], second)
    assert piece.bad.total == num_bad


def test_parquet_of_unsupported_types_gives_one_message(tmp_path, capsys):
    frame = pl.DataFrame({"label": [0, 1], "I1": [1, 2], "C1": [["a"], ["b"]], "C2": [1, 2]})
    frame.write_parquet(tmp_path / "r.parquet")
    (tmp_path / "schema.yaml").write_text(SMALL_SCHEMA)
    arguments = ["--input", tmp_path / "r.parquet", "--schema", tmp_path / "schema.yaml"]
    error = refused(capsys, tmp_path / "set", *arguments, "--crosses", "none")
    assert "C1 (List(String))" in error


@pytest.mark.slow
def test_damaged_parquet_gives_a_message_or_a_count(tmp_path, capsys):
    columns = {n: [row[i] or None for row in ROWS[:60]] for i, n in enumerate(CRITEO.columns)}
    frame = pl.DataFrame(columns).with_columns(pl.col(CRITEO.columns[:14]).cast(pl.Int64))
    frame.write_parquet(tmp_path / "clean.parquet")
    raw = (tmp_path / "clean.parquet").read_bytes()
    rng = random.Random(5)
    path, output, refusals = tmp_path / "r.parquet", tmp_path / "set", 0
    for _ in range(60):
        at = rng.randrange(len(raw))
        path.write_bytes(rng.choice([raw[:at], raw[:at] + rng.randbytes(3) + raw[at + 3 :]]))
        arguments = ["--input", str(path), "--output", str(output), "--max-bad-fraction", "1"]
        status = main(["prepare", *arguments, "--overwrite"])
        error = capsys.readouterr().err
        assert "Traceback" not in error
        if status == 0:
            content = load_manifest(output).content
            rows = sum(load_manifest(output).splits.values())
            assert rows + sum(content["bad_lines"].values()) == content["lines"] == 60
        else:
            assert status == 2
            assert sum(line.startswith("error: ") for line in error.splitlines()) == 1
            assert str(path) in error or "a valid row" in error or "train" in error
        refusals += status == 2
    assert refusals > 30


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("file:val=day_9*", "no file goes to val=day_9* ("),
        ("file:val=*,test=rows*", "no file goes to test=rows* ("),
        ("file:val=rows*", "leave none for train"),
        ("time:0.0001,0.5,0.4999", "no row goes to train (rows: 600)"),
        ("ratio:0.00001,0.5,0.49999", "no row goes to train (rows: 600)"),
    ],
)
def test_a_split_without_train_rows_does_not_replace_a_set(
    tmp_path, capsys, source, split, message
):
    output = tmp_path / "set"
    run_prepare(output, source)
    before = folder_bytes(output)
    arguments = ["--input", str(source), "--output", str(output), "--overwrite", "--split", split]
    assert main(["prepare", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert folder_bytes(output) == before


def test_a_split_may_have_only_val_files(tmp_path, source):
    from sbpflow.data.prepare.split import parse_split

    other = write_rows(tmp_path / "day_9.tsv", ROWS[:40])
    manifest = run_prepare(tmp_path / "set", source, other, split=parse_split("file:val=day_9*"))
    assert manifest.splits == {"train": 600, "val": 40, "test": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--crosses", "C1xC2,C2xC1"], "AxB and BxA are the same"),
        (["--hash-size", "C3=10,C3=12"], "contains C3 twice"),
        (["--hash-size", "C3"], "C3=1000000"),
        (["--hash-size", "2"], "must be 3 or more"),
        (["--max-bad-fraction", "nan"], "between 0 and 1"),
        (["--workers", "100000"], "between 1 and 256"),
        (["--seed", "-1"], "--seed"),
        (["--hash-size", ""], "--hash-size must be a number of table rows, or a list such as"),
        (["--keys", ""], "--keys: '' is not a field; choose from C1, C2,"),
        (["--dense", ""], "--dense: '' is unknown; choose from log3,"),
    ],
)
def test_an_option_out_of_range_gives_one_message(tmp_path, capsys, source, arguments, message):
    assert message in refused(capsys, tmp_path / "set", "--input", source, *arguments)


@pytest.mark.parametrize(
    "command",
    [
        ["prepare", "--input", "rows.tsv", "--hash-size", "abc"],
        ["synth", "--rows", "3000", "--skew", "abc"],
    ],
)
def test_a_value_for_all_columns_is_quoted_as_given(tmp_path, capsys, command):
    assert main([*command, "--output", str(tmp_path / "set")]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: {command[-2]} must be a number")
    assert len(error) < 120


@pytest.mark.parametrize(
    ("command", "place", "message"),
    [
        (
            ["prepare", "--input", "rows.tsv"],
            "sbpflow.data.prepare.prepare.prepare",
            "rerun the command to resume",
        ),
        (["synth", "--rows", "3000"], "sbpflow.data.synth.generate.synth", "a rerun starts over"),
    ],
)
def test_the_message_after_an_interrupt_explains_what_a_rerun_does(
    tmp_path, capsys, monkeypatch, command, place, message
):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    assert main([*command, "--output", str(tmp_path / "set")]) == 130
    assert capsys.readouterr().err == f"stopped; {message}\n"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("columns: [label, C1, C1]\nsparse: [C1]\n", "columns lists 'C1' twice"),
        ("sparse: [C1]\nseparator: '5'\n", "separator must be one of"),
        ('sparse: [C1]\nseparator: "\\n"\n', "must be one of"),
        ("sparse: [C1]\nseparator: '\"'\n", "must be one of"),
        ("sparse: [C1]\ndense: [__split]\n", "the name '__split' is reserved"),
        ('dense: ["*"]\nsparse: [C1]\n', "the column name '*' as a pattern"),
        ('dense: ["^d.*$"]\nsparse: [C1]\n', "the column name '^d.*$' as a pattern"),
        ('label: "^.*$"\nsparse: [C1]\n', "the column name '^.*$' as a pattern"),
        (
            "sparse: [a/b]\n",
            "'a/b': the name appears in file names and options, so it must start with a letter",
        ),
        ("sparse: [[C1]]\n", "sparse must list column names, but contains ['C1']"),
        ("columns: [label, on]\nsparse: [C1]\n", "columns contains the boolean True, because YAML"),
        ("sparse: {off: string}\n", "sparse contains the boolean False, because YAML"),
        ("sparse: [C1, C2]\ndense: [C1xC2]\n", "--crosses: 'C1xC2' is also the name of a column"),
    ],
)
def test_an_impossible_schema_gives_one_message(tmp_path, capsys, source, schema, message):
    (tmp_path / "schema.yaml").write_text(schema)
    arguments = ["--input", source, "--schema", tmp_path / "schema.yaml"]
    crosses = ["--crosses", "C1xC2"] if "C1xC2" in schema else []
    assert message in refused(capsys, tmp_path / "set", *arguments, *crosses)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "command",
    [
        ["prepare", "--input", "{source}"],
        ["synth", "--rows", "3000", "--vocab-scale", "0.001"],
        ["synth", "--rows", "3000", "--vocab-scale", "0.001", "--format", "tsv"],
    ],
)
def test_a_full_disk_gives_one_line_and_no_set(tmp_path, source, command):
    """A limit of 20 kB per file fails like a full disk, with an error that does not name the
    file.
    """
    code = (
        "import resource, sys; from data.__main__ import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.exit(main(sys.argv[1:]))"
    )
    arguments = [word.format(source=source) for word in command]
    output = tmp_path / "set"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--output", str(output)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"error: {output}: file too large; " in result.stderr
    assert f"B is free in {tmp_path}" in result.stderr
    assert ("B at its peak" in result.stderr) == (command[0] == "prepare")
    assert not output.exists()


def test_counting_opens_each_piece_once_for_all_fields(tmp_path, monkeypatch):
    # Polars keeps the columns of a file per scan: 1 GB for 1,000 fields that scanned the same file.
    opened: Counter[str] = Counter()
    scan = count.pl.scan_ipc

    def scanned(path, **options):
        opened[path.name] += 1
        return scan(path, **options)

    monkeypatch.setattr(count.pl, "scan_ipc", scanned)
    source = write_rows(tmp_path / "r.tsv", ROWS[:50])
    assert len(run_prepare(tmp_path / "set", source).fields) == 28
    assert opened
    assert max(opened.values()) <= 2  # once to count, and once to encode


def test_integers_beyond_24_bits_become_the_nearest_float(tmp_path):
    values = [2**24, 2**24 + 1, 2**31 - 1, -(2**31)]
    rows = [[row[0], str(value), *row[2:]] for row, value in zip(ROWS, values, strict=False)]
    source = write_rows(tmp_path / "r.tsv", rows)
    manifest = run_prepare(tmp_path / "set", source, transform="identity")
    words = np.concatenate([all_words(manifest, split) for split in ("train", "val", "test")])
    assert words[:, 1].view(np.float32).tolist() == [2**24, 2**24, 2**31, -(2**31)]


def test_rare_and_unseen_values_share_an_id(tmp_path):
    rows = [[*row[:14], f"{number:08x}", *row[15:]] for number, row in enumerate(ROWS[:50])]
    manifest = run_prepare(tmp_path / "set", write_rows(tmp_path / "r.tsv", rows), min_count=2)
    by_split = [set(ids(manifest, split)["C1"].tolist()) for split in ("train", "test")]
    assert by_split == [{1}, {1}]


def test_plain_text_named_gz_is_refused(tmp_path, capsys):
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(write_rows(tmp_path / "rows.tsv", ROWS[:5]).read_bytes())
    message = refused(capsys, tmp_path / "set", "--input", path)
    assert "this is not a gzip file" in message
    assert "if it is plain text, rename it to rows.tsv" in message


def test_files_of_a_folder_that_are_not_read_are_logged(tmp_path, caplog):
    folder = tmp_path / "rows"
    folder.mkdir()
    write_rows(folder / "a.tsv", ROWS[:50])
    write_rows(folder / "b.log", ROWS[:50])
    manifest = run_prepare(tmp_path / "set", folder)
    assert sum(manifest.splits.values()) == 50
    assert "entries that are not read: 1 (b.log)" in caplog.text


def test_blank_lines_are_counted_separately(tmp_path):
    text = write_rows(tmp_path / "rows.tsv", ROWS[:20]).read_text()
    (tmp_path / "rows.tsv").write_text("\n\n" + text + "\n")
    manifest = run_prepare(tmp_path / "set", tmp_path / "rows.tsv", max_bad_fraction=0.0)
    assert manifest.content["bad_lines"] == {"blank line": 3}
    assert sum(manifest.splits.values()) == 20
    assert manifest.content["lines"] == 23


def test_a_line_with_broken_encoding_is_skipped(tmp_path, source):
    broken = b"\t".join([*(cell.encode() for cell in ROWS[0][:-1]), b"\xff1234567"])
    (tmp_path / "rows.tsv").write_bytes(broken + b"\n" + source.read_bytes())
    words = ["--input", str(tmp_path / "rows.tsv"), "--output", str(tmp_path / "set")]
    assert main(["prepare", *words, "--max-bad-fraction", "0.01"]) == 0
    assert load_manifest(tmp_path / "set").content["bad_lines"] == {"broken encoding": 1}


def test_the_message_for_many_bad_lines_names_the_given_limit(tmp_path, capsys):
    path = tmp_path / "rows.tsv"
    path.write_text("x\n" * 12_000)
    message = refused(capsys, tmp_path / "set", "--input", path, "--max-bad-fraction", "0.002")
    assert "every line is bad (lines: 12000)" in message
    path.write_text("x\n" * 12_000 + "\t".join(ROWS[0]) + "\n")
    message = refused(capsys, tmp_path / "set", "--input", path, "--max-bad-fraction", "0.002")
    assert "more than --max-bad-fraction 0.002" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "--inputt", "x"], "--input"),
        (["stats"], "required: DIR"),
        (["statss"], "stats"),
    ],
)
def test_a_wrong_option_is_one_message(capsys, words, message):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "; usage: sbpflow" in error

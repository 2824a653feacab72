"""Tests prepare against plain Python: counts, ids, values, input formats, and bad lines."""

import gzip
import os
import shutil

import numpy as np
import polars as pl
import pytest

from sbpflow.data import load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.format.schema import CRITEO
from sbpflow.data.prepare import stage
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.prepare import prepare
from sbpflow.data.prepare.split import parse_split
from sbpflow.data.prepare.tables import PIECE_ROWS
from sbpflow.errors import ConfigError, DataError
from sbpflow.serving.cells import hash_salt, hashed_key_ids
from tests.data.rows import (
    all_words,
    counts_of,
    floats,
    folder_bytes,
    genuine_rows,
    ids,
    run_prepare,
    text_rows,
    write_rows,
)

ROWS = text_rows(3000)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("text") / "rows.tsv", ROWS)


def check_ids(manifest, rows, train_rows, name, min_count):
    """Check ids: missing is 0, each value that is frequent in train has its own id, and any other
    value is 1.
    """
    counts = counts_of(rows[:train_rows], name)
    frequent = {value for value, count in counts.items() if count >= min_count}
    places = [CRITEO.columns.index(part) for part in name.split("x")]
    id_of, start = {}, 0
    for split in ("train", "val", "test"):
        split_ids = ids(manifest, split)[name].tolist()
        for row, actual in zip(rows[start : start + len(split_ids)], split_ids, strict=True):
            value = tuple(row[place] for place in places)
            if not all(value):
                assert actual == 0
            elif value not in frequent:
                assert actual == 1
            else:
                assert id_of.setdefault(value, actual) == actual
        start += len(split_ids)
    assert len(set(id_of.values())) == len(frequent)
    assert manifest.field(name).rows == len(frequent) + 2
    assert set(id_of.values()) <= set(range(2, len(frequent) + 2))


@pytest.mark.parametrize("min_count", [1, 40])
def test_ids_follow_counts_of_the_train_part(tmp_path, source, min_count):
    manifest = run_prepare(tmp_path / "set", source, min_count=min_count)
    assert manifest.splits == {"train": 2400, "val": 300, "test": 300}
    for name in ("C1", "C2", "C17", "C26", "C1xC2", "C3xC4"):
        check_ids(manifest, ROWS, 2400, name, min_count)


def test_labels_and_integers_are_reproduced(tmp_path, source):
    manifest = run_prepare(tmp_path / "set", source, transform="identity")
    actual = np.concatenate([floats(manifest, split) for split in ("train", "val", "test")])
    assert np.array_equal(actual, [[float(cell or 0) for cell in row[:14]] for row in ROWS])


def test_genuine_rows_match_an_independent_count_and_are_reproducible(tmp_path):
    path = genuine_rows()
    with gzip.open(path, "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    by_name = dict(zip(CRITEO.columns, zip(*rows, strict=True), strict=True))
    options = {"min_count": 1, "transform": "identity", "piece_bytes": 4 << 20}
    manifest = run_prepare(tmp_path / "a", path, **options)
    run_prepare(tmp_path / "b", path, **options)
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    train_rows = manifest.splits["train"]
    assert train_rows == round(0.8 * len(rows)) == sum(manifest.splits.values()) - 2 * 10_971
    for field in manifest.fields:
        parts = (by_name[part][:train_rows] for part in field.parts)
        distinct = {value for value in zip(*parts, strict=True) if all(value)}
        assert field.rows - 2 == len(distinct), field.name
    actual = np.concatenate([floats(manifest, split) for split in ("train", "val", "test")])
    assert np.array_equal(actual, [[float(cell or 0) for cell in row[:14]] for row in rows])


def test_halves_of_real_tables_have_equal_load(tmp_path):
    manifest = run_prepare(tmp_path / "set", genuine_rows(), piece_bytes=8 << 20)
    large = [field for field in manifest.fields if field.rows >= 1000]
    assert len(large) > 12
    train = ids(manifest, "train")
    for field in large:
        share = float((train[field.name] < (field.rows + 1) // 2).mean())
        assert 0.4 <= share <= 0.6, (field, share)


def test_all_input_formats_give_the_same_rows(tmp_path, source):
    folder = tmp_path / "parts"
    folder.mkdir()
    write_rows(folder / "day_2.tsv.gz", ROWS[:1000])
    write_rows(folder / "day_10.tsv", ROWS[1000:])
    types = dict.fromkeys(CRITEO.columns[:14], pl.Int64) | dict.fromkeys(CRITEO.sparse, pl.String)
    frame = pl.read_csv(source, separator="\t", has_header=False, schema=types)
    frame.with_columns(pl.col("I1").cast(pl.Float64)).write_parquet(tmp_path / "rows.parquet")
    crlf = tmp_path / "crlf.txt"
    crlf.write_bytes(source.read_bytes().replace(b"\n", b"\r\n")[:-2])
    plain = run_prepare(tmp_path / "set", source)
    expected = {split: all_words(plain, split) for split in ("train", "test")}
    for number, other in enumerate((folder, tmp_path / "rows.parquet", crlf)):
        manifest = run_prepare(tmp_path / f"set{number}", other)
        for split, words in expected.items():
            assert np.array_equal(words, all_words(manifest, split)), other


def test_parquet_is_read_in_pieces(tmp_path):
    count = PIECE_ROWS + 10
    columns = {"label": np.arange(count) % 2} | {"I1": np.arange(count)}
    pl.DataFrame(columns | {"C1": np.arange(count) % 50}).write_parquet(tmp_path / "r.parquet")
    (tmp_path / "schema.yaml").write_text("dense: [I1]\nsparse: {C1: integer}\n")
    arguments = ["prepare", "--input", str(tmp_path / "r.parquet"), "--dense", "identity"]
    arguments += ["--schema", str(tmp_path / "schema.yaml"), "--output", str(tmp_path / "set")]
    assert main([*arguments, "--split", "time:1,0,0"]) == 0
    manifest = load_manifest(tmp_path / "set")
    assert len(manifest.shards("train")) == 2
    assert np.array_equal(floats(manifest, "train")[:, 1], np.arange(count))
    assert manifest.field("C1").rows == 52


def test_ratio_and_file_splits(tmp_path, source):
    ratio = run_prepare(tmp_path / "ratio", source, split=parse_split("ratio:0.5,0.3,0.2"))
    assert sum(ratio.splits.values()) == 3000
    assert abs(ratio.splits["train"] - 1500) < 120
    assert abs(ratio.splits["val"] - 900) < 120
    files = [write_rows(tmp_path / f"day_{n}.tsv", ROWS[500 * n : 500 * (n + 1)]) for n in range(6)]
    rule = parse_split("file:val=day_4*,test=day_5*")
    by_file = run_prepare(tmp_path / "files", *files, split=rule)
    assert by_file.splits == {"train": 2000, "val": 500, "test": 500}
    check_ids(by_file, ROWS, 2000, "C5", 2)


def test_hashed_fields_need_no_vocabulary(tmp_path, source):
    manifest = run_prepare(tmp_path / "set", source, hash_sizes=(("C3", 12), ("C1xC2", 50)))
    assert manifest.field("C3").rows == 12
    raw = np.array([int(row[16] or "0", 16) for row in ROWS[:2400]], dtype=np.uint32)
    expected = hashed_key_ids(raw, 12, hash_salt(7, "C3"))
    expected[[not row[16] for row in ROWS[:2400]]] = 0
    assert np.array_equal(ids(manifest, "train")["C3"], expected)
    stats = {entry["name"]: entry for entry in manifest.content["stats"]}
    assert stats["C3"]["lookups"] == 2400
    check_ids(manifest, ROWS, 2400, "C4", 2)


def test_other_columns_with_a_schema_file(tmp_path):
    rows = [f"{n % 2},{n},{'red' if n % 3 else 'blue'},{n % 7},x" for n in range(200)]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    (tmp_path / "schema.yaml").write_text(
        "separator: ','\ncolumns: [click, price, colour, shop, note]\nlabel: click\n"
        "dense: [price]\nsparse: {colour: string, shop: integer}\n"
    )
    arguments = ["prepare", "--input", str(tmp_path / "rows.csv"), "--output", str(tmp_path / "s")]
    arguments += ["--schema", str(tmp_path / "schema.yaml"), "--crosses", "colourxshop"]
    assert main(arguments) == 0
    from sbpflow.data import load_manifest

    manifest = load_manifest(tmp_path / "s")
    assert [field.rows for field in manifest.fields] == [4, 9, 16]
    assert manifest.splits["train"] == 160


BAD = {
    "39 fields instead of 40": "\t".join(ROWS[0][:-1]),
    "41 fields instead of 40": "\t".join([*ROWS[0], "x"]),
    "label is not 0 or 1": "\t".join(["2", *ROWS[0][1:]]),
    "I1 is not a 32-bit integer": "\t".join(["1", "1.5", *ROWS[0][2:]]),
    "C26 is not eight hex digits": "\t".join([*ROWS[0][:-1], "+1234567"]),
    "broken encoding": "\t".join([*ROWS[0][:-1], "\xff1234567"]),
}


def with_bad_lines(path, bad=BAD):
    lines = ["\t".join(row) for row in ROWS]
    for number, line in enumerate(bad.values()):
        lines.insert(100 + 300 * number, line)
    path.write_bytes("\n".join(lines).encode("latin-1"))
    return path


def test_bad_lines_are_skipped_and_counted_by_reason(tmp_path, source):
    path = with_bad_lines(tmp_path / "bad.tsv")
    manifest = run_prepare(tmp_path / "set", path, max_bad_fraction=0.01)
    assert manifest.content["bad_lines"] == dict.fromkeys(sorted(BAD), 1)
    assert manifest.content["lines"] == 3000 + len(BAD)
    clean = run_prepare(tmp_path / "clean", source)
    assert np.array_equal(all_words(manifest, "train"), all_words(clean, "train"))


def test_bad_lines_are_not_added_up_after_each_piece(tmp_path, source, monkeypatch):
    checked = []
    monkeypatch.setattr(stage, "_EARLY_LINES", 1)
    monkeypatch.setattr(stage, "check_bad", lambda staged, *_, **__: checked.append(len(staged)))
    run_prepare(tmp_path / "set", source)
    assert len(checked) == 1
    assert checked[0] > 9


def test_too_many_bad_lines_do_not_replace_a_set(tmp_path, source):
    output = tmp_path / "set"
    run_prepare(output, source)
    before = folder_bytes(output)
    path = with_bad_lines(tmp_path / "bad.tsv")
    with pytest.raises(DataError) as error:
        run_prepare(output, path, overwrite=True, max_bad_fraction=0.001)
    assert folder_bytes(output) == before
    message = str(error.value)
    assert "6 of the 3006 lines are bad" in message
    assert all(f"1 x {reason}" in message for reason in BAD)
    for number, reason in enumerate(list(BAD)[:5]):
        assert f"bad.tsv:{101 + 300 * number}: {reason}" in message


def test_bad_parquet_cells_are_counted(tmp_path):
    frame = pl.DataFrame(
        {"label": [0, 1, 2, 1, None], "I1": [1.0, float("nan"), 3.0, 0.5, 1.0], "C1": ["a"] * 5}
    )
    frame.write_parquet(tmp_path / "r.parquet")
    (tmp_path / "schema.yaml").write_text("dense: {I1: {kind: integer}}\nsparse: {C1: string}\n")
    arguments = ["prepare", "--input", str(tmp_path / "r.parquet"), "--output", str(tmp_path / "s")]
    arguments += ["--schema", str(tmp_path / "schema.yaml"), "--max-bad-fraction", "1"]
    assert main([*arguments, "--split", "time:1,0,0"]) == 0
    from sbpflow.data import load_manifest

    content = load_manifest(tmp_path / "s").content
    assert content["bad_lines"] == {
        "I1 is not a 32-bit integer": 1,
        "label is missing": 1,
        "label is not 0 or 1": 1,
    }


@pytest.mark.parametrize("cut", [0.3, 0.97])
def test_a_truncated_gzip_is_refused(tmp_path, cut):
    path = write_rows(tmp_path / "rows.tsv.gz", ROWS)
    path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])
    with pytest.raises(DataError, match="truncated or damaged"):
        run_prepare(tmp_path / "set", path)


def test_a_file_in_another_format_is_refused_before_its_end(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b,c\n" * 2_000_000)
    with pytest.raises(
        DataError, match=r"every line is bad \(lines: \d{5}\)\n  \d+ x .*\n  .*rows.csv:1: "
    ):
        run_prepare(tmp_path / "set", path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere.tsv"], "no such file"),
        (["--crosses", "C1xC99"], "C99"),
        (["--crosses", "C1"], "such as C1xC2"),
        (["--split", "time:0.8,0.1"], "three fractions"),
        (["--split", "ratio:0.8,0.1,0.2"], "add up to 1"),
        (["--split", "weekday"], "time:0.8,0.1,0.1"),
        (["--split", "time:ts<--5"], "the time must be a date"),
        (["--hash-size", "many"], "C3=1000000"),
        (["--hash-size", "C99=10"], "C99"),
        (["--min-count", "0"], "between 1 and"),
        (["--dense", "sqrt"], "log3"),
        (["--schema", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_user_mistake_gives_one_readable_message(tmp_path, source, capsys, arguments, message):
    start = ["prepare", "--input", str(source), "--output", str(tmp_path / "set")]
    assert main([*start, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert message in error
    assert "Traceback" not in error


def test_the_input_can_be_given_several_times(tmp_path, source):
    other = shutil.copy(source, tmp_path / "other.tsv")
    found = tmp_path / "set"
    both = ["--input", str(source), "--input", str(other)]
    assert main(["prepare", *both, "--output", str(found)]) == 0
    assert sum(load_manifest(found).splits.values()) == 6000


def test_an_output_that_is_a_mount_point_is_refused_at_the_start(tmp_path, source, monkeypatch):
    """A folder cannot be renamed to a mount point, such as a volume of a container."""
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == volume)
    with pytest.raises(ConfigError, match=r"volume is a mount point.* such as .*/volume/set"):
        run_prepare(volume, source)
    assert not list(tmp_path.glob("volume.work"))


def test_an_output_whose_path_is_not_utf_8_is_refused_at_the_start(tmp_path, source):
    with pytest.raises(ConfigError, match=r"caf\\udce9': the path is not UTF-8"):
        run_prepare(tmp_path / os.fsdecode(b"caf\xe9"), source)
    assert not list(tmp_path.glob("*.work"))


def test_an_existing_output_is_not_replaced(tmp_path, source):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="not a prepared set"):
        run_prepare(tmp_path / "full", source, overwrite=True)
    run_prepare(tmp_path / "set", source)
    with pytest.raises(ConfigError, match="--overwrite"):
        run_prepare(tmp_path / "set", source)
    (tmp_path / "set" / ".DS_Store").touch()  # hidden files, of file managers, do not matter
    again = run_prepare(tmp_path / "set", source, overwrite=True, min_count=3)
    assert again.content["min_count"] == 3
    inside = tmp_path / "set" / "day_2.tsv"
    shutil.copy(source, inside)
    with pytest.raises(ConfigError, match=r"would delete the input .*day_2\.tsv"):
        run_prepare(tmp_path / "set", source, inside, overwrite=True)
    assert inside.exists()
    inside.rename(tmp_path / "set" / "notes.md")
    with pytest.raises(ConfigError, match=r"would delete notes\.md, which is not a file"):
        run_prepare(tmp_path / "set", source, overwrite=True)
    assert (tmp_path / "set" / "notes.md").exists()


def test_a_set_is_not_lost_by_a_kill_while_it_is_replaced(tmp_path, source, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(first, second):
        if first == tmp_path / "set.work" / "set":
            raise Killed
        os.rename(first, second)

    run_prepare(tmp_path / "set", source)
    before = (tmp_path / "set" / "manifest.json").read_bytes()
    monkeypatch.setattr("sbpflow.data.prepare.prepare.os.replace", killed)
    with pytest.raises(Killed):
        run_prepare(tmp_path / "set", source, overwrite=True, min_count=3)
    monkeypatch.undo()
    assert not (tmp_path / "set").exists()
    with pytest.raises(ConfigError, match="--overwrite"):
        run_prepare(tmp_path / "set", source, min_count=4)
    assert (tmp_path / "set" / "manifest.json").read_bytes() == before
    again = run_prepare(tmp_path / "set", source, overwrite=True, min_count=3)
    assert again.content["min_count"] == 3
    assert not (tmp_path / "set.work").exists()
    (tmp_path / "mine.work" / "replaced").mkdir(parents=True)  # of the user
    with pytest.raises(ConfigError, match="was not created by this program"):
        run_prepare(tmp_path / "mine", source)
    assert (tmp_path / "mine.work" / "replaced").is_dir()


def test_a_link_as_the_output_stays_a_link(tmp_path, source):
    link, target = tmp_path / "link", tmp_path / "disk" / "set"
    link.symlink_to(target)  # which does not exist yet
    for more in ({}, {"overwrite": True, "min_count": 3}):
        run_prepare(link, source, **more)
        assert link.is_symlink()
        assert (target / "manifest.json").is_file()
    assert sorted(path.name for path in target.parent.iterdir()) == ["set"]


def test_workers_and_pieces_do_not_change_the_rows(tmp_path, source):
    single = prepare(PrepareOptions(inputs=(source,), output=tmp_path / "a", workers=1))
    several = run_prepare(tmp_path / "b", source, workers=4)
    for split in ("train", "val", "test"):
        assert np.array_equal(all_words(single, split), all_words(several, split))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("dense: I1\nsparse: [C1]\n", "write names, or name: transform"),
        ("sparse: 5\n", "name: kind"),
        ("dense: [I1]\n", "name at least one column"),
        ("sparse: {C1: text}\n", "hex, string, integer"),
        ("spares: [C1]\n", "unknown key 'spares'"),
        ("[1, 2]\n", "must be a mapping"),
        ("sparse: [C1, label]\n", "used twice"),
        ("columns: [label]\nsparse: [C1]\n", "not one of the columns"),
        ("sparse: [C1]\nseparator: '::'\n", "must be one of '\\t' ','"),
        ("sparse: {C1: [\n", "cannot be parsed as YAML"),
    ],
)
def test_a_wrong_schema_gives_one_readable_message(tmp_path, source, capsys, schema, message):
    (tmp_path / "schema.yaml").write_text(schema)
    arguments = ["prepare", "--input", str(source), "--output", str(tmp_path / "set")]
    assert main([*arguments, "--schema", str(tmp_path / "schema.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_an_unreadable_schema_file_is_not_reported_as_bad_yaml(tmp_path, source, capsys):
    arguments = ["prepare", "--input", str(source), "--output", str(tmp_path / "set")]
    assert main([*arguments, "--schema", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml does not exist; use the path of a YAML file, or" in capsys.readouterr().err
    assert main([*arguments, "--schema", str(tmp_path)]) == 2
    assert f"--schema {tmp_path} cannot be read: Is a directory" in capsys.readouterr().err

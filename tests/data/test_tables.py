"""Tests reading, encoding, and growing tables with every kind of column, from CSV and Parquet."""

import json
import shlex
import shutil
from dataclasses import asdict

import numpy as np
import pytest

from sbpflow.commands.explain import explain
from sbpflow.data import load_manifest
from sbpflow.data.__main__ import main, parser
from sbpflow.data.format.manifest import MANIFEST, SPLITS, fingerprint_of
from sbpflow.data.format.npy import write_array
from sbpflow.data.format.rebuild import how_to_rebuild
from sbpflow.data.format.shards import RowFiles
from sbpflow.data.format.verify import verify_set
from sbpflow.data.format.vocabulary import open_vocabularies
from sbpflow.data.prepare import prepare
from sbpflow.data.prepare.encode import encode_all
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.data.prepare.split import parse_split
from tests.data.rows import all_words, folder_bytes, run_prepare
from tests.data.tables import SCHEMA, SPLIT, table, write_csv, write_parquet
from tests.quick import quick

ROWS = table(700)


def prepare_table(output, source, *more):
    """Prepare ``source`` with the schema of ``tests.data.tables``."""
    schema = source.with_name("schema.yaml")
    schema.write_text(SCHEMA)
    words = ["--input", source, "--output", output, "--schema", schema, "--split", SPLIT]
    assert main(["prepare", *map(str, [*words, "--max-bad-fraction", "0.05", *more])]) == 0
    return load_manifest(output)


@pytest.fixture(scope="module")
def as_csv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("csv")
    return prepare_table(folder / "set", write_csv(folder / "t.csv", ROWS))


@pytest.fixture(scope="module")
def as_parquet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet")
    return prepare_table(folder / "set", write_parquet(folder / "t.parquet", ROWS))


def data_files(manifest):
    return {name: raw for name, raw in folder_bytes(manifest.path).items() if "json" not in name}


def test_csv_and_parquet_give_the_same_bytes(as_csv, as_parquet):
    assert data_files(as_csv) == data_files(as_parquet)
    same = ("dense", "fields", "fitted", "splits", "lines", "bad_lines", "side", "vocabulary")
    for key in same:
        assert as_csv.content[key] == as_parquet.content[key], key


def test_every_row_is_in_the_set_or_counted(as_csv):
    infinite = sum(row["price"] == float("inf") for row in ROWS)
    (reason,) = as_csv.content["bad_lines"]
    assert "infinite" in reason
    assert as_csv.content["bad_lines"][reason] == infinite > 0
    assert sum(as_csv.splits.values()) + infinite == as_csv.content["lines"] == len(ROWS)


def good_rows(split):
    bounds = {"train": (0, 480), "val": (480, 576), "test": (576, 700)}[split]
    return [row for row in ROWS[slice(*bounds)] if row["price"] != float("inf")]


@pytest.mark.parametrize("split", SPLITS)
def test_lists_have_the_values_of_the_cells(as_csv, split):
    rows = good_rows(split)
    assert [field.name for field in as_csv.lists] == ["tags", "more"]
    lengths, values = RowFiles(as_csv, split).lists(0, len(rows))
    weights = np.load(as_csv.path / as_csv.shards(split)[0].parts["value_weights"].file).tolist()
    all_tags = [row["tags"][:3] for row in rows]
    assert lengths.tolist() == [
        [len(tags), len(row["more"])] for tags, row in zip(all_tags, rows, strict=True)
    ]
    vocabulary = open_vocabularies(as_csv)["more"]
    of_value = dict(zip(vocabulary.keys.tolist(), vocabulary.ids.tolist(), strict=True))
    values, place = values.tolist(), 0
    for tags, row in zip(all_tags, rows, strict=True):
        tag_ids = values[place : place + len(tags)]
        assert [value == 0 for value in tag_ids] == [tag == "" for tag in tags]
        assert np.allclose(weights[place : place + len(tags)], row["tag_weights"][: len(tags)])
        place += len(tags)
        end = place + len(row["more"])
        assert values[place:end] == [of_value.get(v, 1) for v in row["more"]]
        assert set(weights[place:end]) <= {1.0}
        place = end
    assert place == len(values)


def test_dense_values_are_transformed_with_constants_of_train(as_csv):
    rows = good_rows("train")
    floats = all_words(as_csv, "train")[:, :4].view(np.float32)
    price = np.array([np.nan if row["price"] is None else row["price"] for row in rows])
    present = price[~np.isnan(price)]
    expected = np.where(np.isnan(price), 0, (price - present.mean()) / present.std())
    assert as_csv.dense == ("price", "price_missing", "age")
    assert np.allclose(floats[:, 1], expected, atol=1e-6)
    assert np.array_equal(floats[:, 2], np.isnan(price))
    age = np.array([0.0 if row["age"] is None else np.clip(row["age"], 0, 100) for row in rows])
    missing = np.array([row["age"] is None for row in rows])
    assert np.allclose(floats[:, 3], np.where(missing, 0, np.log(age + 3)), atol=1e-6)


def test_buckets_are_quantiles_of_train(as_csv):
    score = [row["score"] for row in good_rows("train")]
    words = all_words(as_csv, "train")
    column = 1 + len(as_csv.dense) + 4  # after city, shop, and genre (twice)
    bucket = words[:, column]
    assert set(bucket[[value is None for value in score]]) == {0}
    present = np.array([value is not None for value in score])
    order = np.argsort(np.array([value for value in score if value is not None]), kind="stable")
    assert (np.diff(bucket[present][order]) >= 0).all()
    sizes = np.bincount(bucket[present])[2:]
    assert len(sizes) == 4
    assert sizes.min() > 0.15 * present.sum()


def test_columns_that_are_not_features(as_csv):
    rows = good_rows("train")
    files = RowFiles(as_csv, "train")
    weight = files.part("weight", 0, len(rows))
    given = np.array([row["w"] for row in rows])
    assert np.allclose(weight, given / given.mean(), rtol=1e-5)
    groups = files.part("group", 0, len(rows))
    assert len(set(zip(groups.tolist(), [row["user"] for row in rows], strict=True))) == 3
    moments = files.part("time", 0, len(rows)).astype("datetime64[us]")
    assert moments[0] == np.datetime64(rows[0]["ts"])
    labels = files.part("labels", 0, len(rows))[:, 0]
    expected = [np.nan if row["buy"] is None else row["buy"] for row in rows]
    assert np.array_equal(labels, np.array(expected, dtype=np.float32), equal_nan=True)
    shard = as_csv.shards("train")[0]
    text = np.load(as_csv.path / shard.parts["row_key_bytes"].file).tobytes()
    ends = files.part("row_key_ends", 0, len(rows))
    assert text[: ends[0]].decode() == rows[0]["id"]
    assert text[ends[-2] : ends[-1]].decode() == rows[-1]["id"]


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_rows_encoded_without_labels_have_the_words_of_the_set(tmp_path, as_csv, write):
    rows = [{k: v for k, v in row.items() if k not in ("click", "buy")} for row in ROWS[576:]]
    source = write(tmp_path / ("t.csv" if write is write_csv else "t.parquet"), rows)
    words = ["--like", as_csv.path, "--input", source, "--output", tmp_path / "new"]
    assert main(["encode", *map(str, words), "--max-bad-fraction", "0.1"]) == 0
    new = load_manifest(tmp_path / "new")
    verify_set(new, 1)
    assert not new.labelled
    assert np.isnan(all_words(new, "test")[:, 0].view(np.float32)).all()
    assert np.array_equal(all_words(new, "test")[:, 1:], all_words(as_csv, "test")[:, 1:])
    for name, part in as_csv.shards("test")[0].parts.items():
        if name != "labels":
            own = new.shards("test")[0].parts[name]
            assert own.crc32 == part.crc32, name
    assert new.vocabulary_digest == as_csv.vocabulary_digest


def test_encoding_the_test_rows_gives_identical_files(tmp_path, as_csv):
    source = write_csv(tmp_path / "t.csv", ROWS[576:])
    words = ["--like", as_csv.path, "--input", source, "--output", tmp_path / "new"]
    assert main(["encode", *map(str, words), "--max-bad-fraction", "0.1"]) == 0
    of_test = {n: raw for n, raw in data_files(as_csv).items() if n.startswith(("test", "voc"))}
    assert data_files(load_manifest(tmp_path / "new")) == of_test


QUOTED = """\
columns: [click, text, n]
label: click
separator: ","
quote: '"'
dense: {n: standardise}
sparse: {text: string}
"""


def test_a_first_record_may_have_line_ends(tmp_path, capsys):
    """Without column names, the first record's number of cells shows whether rows have labels."""
    rows = [f'"a\nb{row % 7}",{row}\n' for row in range(100)]
    files = {name: tmp_path / name for name in ("old.csv", "new.csv", "schema.yaml", "bad.csv")}
    files["old.csv"].write_text("".join(f"{row % 2},{text}" for row, text in enumerate(rows)))
    files["new.csv"].write_text("".join(rows))
    files["schema.yaml"].write_text(QUOTED)
    words = ["--input", files["old.csv"], "--schema", files["schema.yaml"]]
    assert main(["prepare", *map(str, words), "--output", str(tmp_path / "set")]) == 0
    for name in ("old.csv", "new.csv"):
        more = ["--like", tmp_path / "set", "--output", tmp_path / f"{name} encoded"]
        assert main(["encode", "--input", str(files[name]), *map(str, more)]) == 0
        encoded = load_manifest(tmp_path / f"{name} encoded")
        assert (encoded.splits["test"], encoded.labelled) == (100, name == "old.csv")
    files["bad.csv"].write_text('"a,1\n')
    more = ["--like", tmp_path / "set", "--output", tmp_path / "none"]
    assert main(["encode", "--input", str(files["bad.csv"]), *map(str, more)]) == 2
    error = capsys.readouterr().err
    assert "bad.csv: the first record, '\"a,1', has a quote \" that does not enclose" in error
    assert "Original error" not in error


def test_bad_rows_have_the_line_numbers_of_the_file(tmp_path, caplog):
    rows = [f'{row % 2},"a\nb{row % 7}",{row}\n' for row in range(100)]
    rows[80] = "7,a,1\n"
    (tmp_path / "t.csv").write_text('click,text,"n\n1"\n' + "".join(rows))
    (tmp_path / "schema.yaml").write_text(
        "{separator: ',', header: true, quote: '\"', label: click, sparse: {text: string}}"
    )
    options = {"schema": read_schema(tmp_path / "schema.yaml"), "crosses": ()}
    for size in (1 << 20, 300):
        output = tmp_path / f"set-{size}"
        run_prepare(output, tmp_path / "t.csv", piece_bytes=size, max_bad_fraction=1.0, **options)
    assert caplog.text.count("t.csv:163: click is not 0 or 1: '7'") == 2


def shops(first, count):
    """Return 60 rows that use ``count`` shops in turn, numbered from ``first``."""
    base = table(60, seed=5)
    return [{**row, "price": 1.0, "shop": first + n % count} for n, row in enumerate(base)]


def test_growth_changes_no_id_and_fills_spare_ids_first(tmp_path, capsys):
    schema = tmp_path / "schema.yaml"
    schema.write_text(SCHEMA)
    old_rows = write_csv(tmp_path / "old.csv", shops(0, 20))
    words = ["--input", old_rows, "--schema", schema, "--split", "time:1,0,0", "--spare", "0.25"]
    assert main(["prepare", *map(str, words), "--output", str(tmp_path / "old")]) == 0
    old = load_manifest(tmp_path / "old")
    assert old.field("shop").rows == 2 + 20 + 5
    new_rows = write_csv(tmp_path / "new.csv", shops(12, 20))
    words = ["--input", new_rows, "--like", old.path, "--split", "time:1,0,0"]
    assert main(["prepare", *map(str, words), "--output", str(tmp_path / "same")]) == 0
    same = load_manifest(tmp_path / "same")
    assert same.vocabulary_digest == old.vocabulary_digest
    assert same.ancestors == ()
    assert np.count_nonzero(ids_of(same, "shop") == 1) == 36
    assert main(["prepare", *map(str, words), "--grow", "--output", str(tmp_path / "big")]) == 0
    big = load_manifest(tmp_path / "big")
    assert [a.digest for a in big.ancestors] == [old.vocabulary_digest]
    assert big.ancestors[0].rows["shop"] == 27
    assert big.field("shop").rows == 27 + 12 - 5
    before, after = (open_vocabularies(m)["shop"] for m in (old, big))
    places = np.searchsorted(after.keys, before.keys)
    assert np.array_equal(after.keys[places], before.keys)
    assert np.array_equal(after.ids[places], before.ids)
    new_ids = np.setdiff1d(after.ids, before.ids)
    assert set(before.spare_ids().tolist()) < set(new_ids.tolist())
    assert 1 not in ids_of(big, "shop")
    assert next(e for e in big.content["fields"] if e["name"] == "shop")["grown"]["spare"] == 5
    after = open_vocabularies(big)["shop"]
    loads = np.zeros(big.field("shop").rows)
    loads[after.ids] = after.counts
    parts = [part.sum() for part in np.array_split(loads, 4)]
    report = explained(capsys, big.path, "--json")
    (shop,) = (entry for entry in json.loads(report)["growth"] if entry["table"] == "deep.shop")
    assert (shop["new_values"], shop["in_spare_ids"], shop["behind_the_old"]) == (12, 5, 7)
    assert shop["max_over_mean"] == pytest.approx(max(parts) / np.mean(parts), abs=1e-3)
    line = "deep.shop has 12 new values: 5 in spare rows and 7 in rows after the old ones;"
    assert f"{line} its rows are split into 4 parts, of which the busiest has" in explained(
        capsys, big.path
    )
    assert "grown" not in explained(capsys, same.path)


def explained(capsys, folder, *more):
    """Return the output of ``explain`` for scheme 2 on four ranks."""
    capsys.readouterr()
    words = ["--config", "configs/scheme2.yaml", "--ranks", "4", f"data.path={folder}"]
    assert explain([*words, "model.wide.crosses=[]", "parallel.kernel=torch", *more]) == 0
    return capsys.readouterr().out


def ids_of(manifest, name):
    names = [n for field in manifest.fixed for n in [field.name] * field.hot]
    return all_words(manifest, "train")[:, 1 + len(manifest.dense) + names.index(name)]


def test_like_refuses_options_that_the_set_decides(tmp_path, as_csv, capsys):
    source = write_csv(tmp_path / "t.csv", ROWS[:20])
    words = ["--input", source, "--output", tmp_path / "new", "--like", as_csv.path]
    assert main(["prepare", *map(str, words), "--min-count", "3"]) == 2
    assert "--min-count: this option is determined by the --like set" in capsys.readouterr().err
    assert main(["prepare", *map(str, words[:4]), "--grow"]) == 2
    assert "--grow needs a set to grow from" in capsys.readouterr().err


def test_a_changed_bit_in_a_vocabulary_is_found(tmp_path, as_csv, capsys):
    shutil.copytree(as_csv.path, tmp_path / "set")
    path = tmp_path / "set" / "vocabulary" / "shop.ids.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert main(["verify", str(tmp_path / "set")]) == 2
    assert "shop.ids.npy: the checksum differs" in capsys.readouterr().err


def test_a_set_of_format_1_is_refused_with_the_command_to_rebuild_it(tmp_path, capsys):
    old = {"format": "sbpflow-prepared", "version": 1, "source": "prepare", "min_count": 3,
           "inputs": [{"name": "train.tsv", "bytes": 1}], "seed": 9,
           "schema": {"columns": ["label", "I1"], "dense": ["I"] * 13},
           "split": {"kind": "time", "fractions": [0.8, 0.1, 0.1], "patterns": []},
           "fields": [{"name": "C1", "rows": 5}, {"name": "C1xC2", "rows": 9, "hashed": True}],
           "dense": [{"name": "I1", "transform": "log1"}]}  # fmt: skip
    old["fingerprint"] = fingerprint_of(old)
    (tmp_path / MANIFEST).write_text(json.dumps(old))
    assert main(["stats", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "format version 1, but this program reads only versions 2 and 3" in error
    assert (
        "sbpflow prepare --input FOLDER/train.tsv --split time:0.8,0.1,0.1 --crosses C1xC2 "
        f"--hash-size C1xC2=9 --min-count 3 --seed 9 --dense log1 --output {tmp_path}"
    ) in error


@pytest.mark.parametrize(
    "text",
    [
        "time:0.8,0.1,0.1",
        "ratio:0.87654321,0.1,0.02345679",
        "time:ts<5,ts<9",
        "file:val=a*,test=b*",
    ],
)
def test_the_command_to_rebuild_a_set_has_its_split(tmp_path, text):
    content = {"inputs": [], "schema": {"columns": [], "dense": []}, "fields": [], "seed": 1,
               "split": asdict(parse_split(text)), "min_count": 1, "dense": []}  # fmt: skip
    words = shlex.split(how_to_rebuild(tmp_path, content))
    assert words[words.index("--split") + 1] == text


@pytest.mark.parametrize("seed", [20_260_301, 1_000_000])
@pytest.mark.parametrize(
    ("hot", "text"), [([], ""), ([["C1", [3, 3]], ["C20", [0, 12]]], " --hot C1=3-3,C20=0-12")]
)
def test_the_command_to_rebuild_a_set_has_exact_numbers(tmp_path, seed, hot, text):
    options = {"rows": 5_000_000, "vocab_scale": 0.01, "ctr": 0.25620001, "auc": 0.8, "drift": 0.0,
               "seed": seed, "skew": [["C1", 1.25]], "hot": hot}  # fmt: skip
    command = how_to_rebuild(tmp_path, {"source": "synth", "options": options})
    numbers = "--rows 5000000 --vocab-scale 0.01 --ctr 0.25620001 --auc 0.8 --drift 0"
    assert f"synth {numbers} --seed {seed} --skew C1=1.25{text} --output" in command
    parser().parse_args(shlex.split(command)[1:])


def test_a_second_run_with_the_same_output_is_refused(tmp_path, capsys):
    from sbpflow.data.prepare.workspace import only_run

    source = write_csv(tmp_path / "t.csv", ROWS[:20])
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    words = ["--input", source, "--schema", tmp_path / "schema.yaml", "--output", tmp_path / "s"]
    with only_run(tmp_path / "s"):
        assert main(["prepare", *map(str, words)]) == 2
        assert "another run (process" in capsys.readouterr().err
    assert not (tmp_path / "s.work.lock").exists()


def test_columns_with_an_x_are_crossed_and_ambiguous_names_refused(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("".join(f"{n % 2},{n % 3},{n % 5},1\n" for n in range(90)))
    schema = tmp_path / "schema.yaml"
    words = ["prepare", "--input", tmp_path / "rows.csv", "--schema", schema]
    words += ["--output", tmp_path / "set", "--crosses", "sexxtax"]
    schema.write_text("sparse: {sex: integer, tax: integer, x: integer}\nseparator: ','\n")
    assert main([*map(str, words)]) == 0
    cross = load_manifest(tmp_path / "set").field("sexxtax")
    assert (cross.parts, cross.rows) == (("sex", "tax"), 17)
    schema.write_text("sparse: {se: integer, sex: integer, tax: integer, xtax: integer}\n")
    assert main([*map(str, words)]) == 2
    assert "'sexxtax' can be read as se with xtax or sex with tax" in capsys.readouterr().err


class Stopped(BaseException):
    """Raised to end a run abruptly, like a kill."""


def _stop(*_, **__):
    raise Stopped


def _half(*arguments):
    encode_all(*arguments)
    for record in sorted((arguments[1].work / "encoded").iterdir())[1::2]:
        record.unlink()  # without their records, these pieces count as not encoded
    raise Stopped


STAGED, READY = ["*.list", "*.arrow"], ["fitted.json", "*.ids.npy", "*.starts.npy"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "kinds"),
    quick(
        [
            (("build_vocabularies", _stop), STAGED),
            (("fit_columns", _stop), [*STAGED, "*.ids.npy"]),
            (("encode_all", _stop), [*STAGED, "fitted.json", "*.ids.npy"]),
            (("encode_all", _half), READY),
            (("_publish", _stop), READY),
        ],
        lambda n: n in (1, 3),
    ),
)  # fmt: skip
def test_a_stopped_run_resumes_and_produces_the_same_bytes(tmp_path, monkeypatch, place, kinds):
    """Resume the stopped run as it is, and also with one damaged file of each kind."""
    source = write_csv(tmp_path / "t.csv", table(200))
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    settings = {"schema": read_schema(tmp_path / "schema.yaml"), "crosses": (),
                "max_bad_fraction": 0.1, "piece_bytes": 1 << 13}  # fmt: skip
    clean = run_prepare(tmp_path / "clean", source, **settings)
    assert len(clean.shards("train")) > 2
    with monkeypatch.context() as patch:
        patch.setattr(prepare, *place)
        with pytest.raises(Stopped):
            run_prepare(tmp_path / "stopped", source, **settings)
    work = tmp_path / "stopped.work"
    files = [sorted(work.rglob(kind))[0] for kind in kinds]
    for number, file in enumerate([None, *files]):
        output = tmp_path / f"set{number}"
        shutil.copytree(work, again := output.with_name(f"{output.name}.work"))
        if file is not None:
            raw = bytearray(file.read_bytes())
            raw[-3] ^= 4
            (again / file.relative_to(work)).write_bytes(raw)
        run_prepare(output, source, **settings)
        assert folder_bytes(output) == folder_bytes(clean.path), file


@pytest.mark.parametrize(
    ("array", "place", "value", "message"),
    [("ids", 0, 1, "contains ids 1.."), ("ids", 0, 999, "..999, but value ids must be 2..10"),
     ("ids", 1, None, "assigns one id to two values"), ("keys", 3, 0, "are not ascending")],
)  # fmt: skip
def test_a_hand_made_vocabulary_is_refused(tmp_path, as_csv, capsys, array, place, value, message):
    """The edited set has correct checksums and a correct fingerprint."""
    shutil.copytree(as_csv.path, tmp_path / "set")
    path = tmp_path / "set" / "vocabulary" / f"shop.{array}.npy"
    values = np.load(path)
    values[place] = values[0] if value is None else value
    content = json.loads((tmp_path / "set" / MANIFEST).read_text())
    content["vocabulary"]["fields"]["shop"][array]["crc32"] = write_array(path, values)
    content["fingerprint"] = fingerprint_of(content)
    (tmp_path / "set" / MANIFEST).write_text(json.dumps(content))
    assert main(["verify", str(tmp_path / "set")]) == 2
    assert message in capsys.readouterr().err


def test_verify_refuses_hand_made_rows(tmp_path, as_csv, capsys):
    for number, (word, value, message) in enumerate(
        [(0, 0.5, "a label 0.5"), (1, 2.0**100, "price 1.26"), (1, np.nan, "price nan")]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(as_csv.path, folder)
        path = folder / "train-000000.npy"
        words = np.load(path)
        words[5, word] = np.float32(value).view(np.int32)
        content = json.loads((folder / MANIFEST).read_text())
        content["splits"]["train"][0]["crc32"] = write_array(path, words)
        content["fingerprint"] = fingerprint_of(content)
        (folder / MANIFEST).write_text(json.dumps(content))
        assert main(["verify", str(folder)]) == 2
        assert f"train-000000.npy: row 5 has {message[:9]}" in capsys.readouterr().err

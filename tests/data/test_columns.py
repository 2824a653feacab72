"""Tests columns that share a vocabulary, and weights in the cells of lists."""

import numpy as np
import polars as pl
import pytest

from sbpflow.data import fields_of, load_manifest
from sbpflow.data.__main__ import main
from sbpflow.data.format.shards import RowFiles
from sbpflow.data.format.vocabulary import open_vocabularies
from sbpflow.data.stats import compute_stats, load_stats
from tests.data.test_tables import data_files, ids_of

SHARED = """
separator: ","
sparse:
  home: {kind: string, vocabulary: city}
  work: {kind: string, vocabulary: city}
  seen: {kind: string, max: 4, vocabulary: city}
  shop: string
"""


def shared_rows(path, first):
    cities = [f"city {n % 7 + first}" for n in range(120)]
    path.write_text("".join(
        f"{n % 2},{city},{cities[n // 2]},{'|'.join(cities[n : n + n % 3])},{city}\n"
        for n, city in enumerate(cities)
    ))  # fmt: skip
    return path


@pytest.mark.parametrize("hashed", [False, True])
def test_columns_with_a_shared_vocabulary_give_a_value_the_same_id(tmp_path, hashed):
    (tmp_path / "schema.yaml").write_text(SHARED)
    words = ["--input", shared_rows(tmp_path / "t.csv", 0), "--schema", tmp_path / "schema.yaml"]
    words += ["--output", tmp_path / "set", "--split", "time:1,0,0"]
    words += ["--hash-size", "1000"] if hashed else []
    assert main(["prepare", *map(str, words)]) == 0
    manifest = load_manifest(tmp_path / "set")
    home, work, shop = (ids_of(manifest, name) for name in ("home", "work", "shop"))
    assert np.array_equal(home[np.arange(120) // 2], work)
    assert not np.array_equal(home, shop)
    lengths, values = RowFiles(manifest, "train").lists(0, 120)
    expected = [home[n + k] for n in range(120) for k in range(min(n % 3, 120 - n))]
    assert values.tolist() == expected
    assert [f.vocabulary for f in manifest.fields] == ["city", "city", "city", ""]
    assert fields_of(manifest).sparse[0].vocabulary == "city"
    if hashed:
        return
    assert sorted(path.name for path in (manifest.path / "vocabulary").glob("*.ids.npy")) == [
        "city.ids.npy", "shop.ids.npy",
    ]  # fmt: skip
    counts = open_vocabularies(manifest)["work"].counts
    assert counts.sum() == 240 + lengths.sum()
    assert load_stats(manifest) == compute_stats(manifest)
    words = ["--like", manifest.path, "--input", shared_rows(tmp_path / "new.csv", 3), "--grow"]
    words += ["--output", tmp_path / "grown", "--split", "time:1,0,0"]
    assert main(["prepare", *map(str, words)]) == 0
    grown = load_manifest(tmp_path / "grown")
    assert [grown.field(name).rows for name in ("home", "work", "seen")] == [9 + 3] * 3
    assert np.array_equal(ids_of(grown, "home")[:4], home[3:7])


@pytest.mark.parametrize(
    ("schema", "more", "message"),
    [
        (SHARED.replace("work: {kind: string", "work: {kind: integer"), [], "shared with home"),
        (SHARED.replace("city", "shop"), [], "vocabulary 'shop' is the name of a column"),
        (SHARED, ["--hash-size", "home=50"], "home and work share the vocabulary city"),
        (SHARED.replace("city", "a/b"), [], "'a/b': the name must start with a letter"),
    ],
)
def test_a_vocabulary_that_cannot_be_shared_is_refused(tmp_path, capsys, schema, more, message):
    (tmp_path / "schema.yaml").write_text(schema)
    words = ["--input", shared_rows(tmp_path / "t.csv", 0), "--schema", tmp_path / "schema.yaml"]
    assert main(["prepare", *map(str, [*words, "--output", tmp_path / "set", *more])]) == 2
    assert message in capsys.readouterr().err


INLINE = """
separator: ","
header: true
sparse:
  tags: {kind: string, max: 3, beyond: first, weights: {after: ":"}}
  plain: {kind: integer, max: 9}
"""


def test_weights_in_cells_equal_weights_in_structs(tmp_path):
    """``a:0.5|b:1`` in text and structs in Parquet give the same set."""
    cells = [[("a", 0.5), ("b", 1.0)], [], [("d:e", 2.5)], [("", 0.25)],
             [("a", 1e-3), ("b", 2.0), ("c", 3.0), ("d", 4.0)]] * 8  # fmt: skip
    rows = [{"label": n % 2, "tags": pairs, "plain": [n]} for n, pairs in enumerate(cells)]
    text = "label,tags,plain\n"
    text += "".join(
        f"{r['label']},{'|'.join(f'{v}:{w}' for v, w in r['tags'])},{r['plain'][0]}\n" for r in rows
    )
    (tmp_path / "t.csv").write_text(text)
    structs = [[{"tag": v or None, "score": w} for v, w in r["tags"]] for r in rows]
    kinds = {"tags": pl.List(pl.Struct({"tag": pl.String, "score": pl.Float64}))}
    named = [{**row, "tags": tags} for row, tags in zip(rows, structs, strict=True)]
    pl.DataFrame(named, schema_overrides=kinds).write_parquet(tmp_path / "t.parquet")
    (tmp_path / "schema.yaml").write_text(INLINE)
    manifests = []
    for name in ("t.csv", "t.parquet"):
        words = ["--input", tmp_path / name, "--schema", tmp_path / "schema.yaml"]
        words += ["--output", tmp_path / f"{name}.set", "--split", "time:1,0,0"]
        assert main(["prepare", *map(str, words)]) == 0
        manifests.append(load_manifest(tmp_path / f"{name}.set"))
    assert data_files(manifests[0]) == data_files(manifests[1])
    manifest = manifests[0]
    assert [field.weighted for field in manifest.fields] == [True, False]
    lengths, values = RowFiles(manifest, "train").lists(0, len(rows))
    assert lengths[:5, 0].tolist() == [2, 0, 1, 1, 3]
    shard = manifest.shards("train")[0]
    weights = np.load(manifest.path / shard.parts["value_weights"].file)
    assert weights[:6].tolist() == [0.5, 1.0, 1.0, 1.0, 2.5, 1.0]
    assert weights[6] == 0.25
    assert values[6] == 0
    assert manifest.content["fields"][0]["cut"] == 8


@pytest.mark.parametrize(
    ("cell", "reason"),
    [("a", "tags has a weight that is not a finite number"), ("a:x", "tags has a weight"),
     ("a:1||b:2", "tags has a weight"), ("a:inf", "tags has a weight"), (":", "tags has a weight")],
)  # fmt: skip
def test_a_value_without_its_weight_is_a_bad_line(tmp_path, cell, reason):
    (tmp_path / "schema.yaml").write_text(INLINE)
    (tmp_path / "t.csv").write_text("label,tags,plain\n" + "1,a:1,2\n" * 9 + f"0,{cell},3\n")
    words = ["--input", tmp_path / "t.csv", "--schema", tmp_path / "schema.yaml"]
    words += ["--output", tmp_path / "set", "--max-bad-fraction", "0.2"]
    assert main(["prepare", *map(str, words)]) == 0
    ((actual, count),) = load_manifest(tmp_path / "set").content["bad_lines"].items()
    assert actual.startswith(reason)
    assert count == 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [("{after: '|'}", "weights.after must be one ASCII"), ("{after: '.'}", "must be one"),
     ("{before: ':'}", "write a column name, or {after"), ("{after: ','}", "must be one")],
)  # fmt: skip
def test_an_invalid_separator_of_weights_is_refused(tmp_path, capsys, weights, message):
    (tmp_path / "schema.yaml").write_text(INLINE.replace('{after: ":"}', weights))
    (tmp_path / "t.csv").write_text("label,tags,plain\n1,a:1,2\n")
    words = ["--input", tmp_path / "t.csv", "--schema", tmp_path / "schema.yaml"]
    assert main(["prepare", *map(str, [*words, "--output", tmp_path / "set"])]) == 2
    assert message in capsys.readouterr().err

"""Tests that bundles give raw rows the same scores as the run, in a process with only torch and
numpy.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from torch import nn

from sbpflow.commands.predict import predict
from sbpflow.data.__main__ import main
from sbpflow.data.prepare.new_rows import encode
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.export.bundle import scorer_source
from sbpflow.run.export.graph import graph_of
from sbpflow.serving.cells import string_key
from sbpflow.serving.encoder import Encoder
from sbpflow.serving.operations import Graph
from sbpflow.serving.scorer import BundleError, RowError, Version, load
from tests.data.tables import write_parquet
from tests.serving.bundles import MODELS, OwnConfig, config_of, export, good_rows, make_set, train

NAMES = ("price", "age", "score", "city", "shop", "tags", "tag_weights", "genre", "more")
ALONE = """
import json, sys
BLOCKED = ("sbpflow", "polars", "numba", "safetensors", "pandas", "pyarrow")
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, sys.argv[1])
from scorer import load
model = load(sys.argv[1])
scores = model.score(open(sys.argv[2], encoding="utf-8").read())
json.dump(scores.tolist(), open(sys.argv[3], "w"))
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return make_set(tmp_path_factory.mktemp("bundle"))


def _runs(world, folder: Path, prepared: Path):
    """Train and export every model; return the scores from each model's evaluation on test."""
    scores = {}
    for name, model in MODELS.items():
        config = config_of(prepared, model)
        scores[name] = train(world, folder / name / "run", config)[0]
        export(folder / name / "run", config, folder / name / "model")
    return scores


@pytest.fixture(scope="module")
def exported(_cpu_ranks, prepared, tmp_path_factory):
    """Return a folder with each model's run and bundle, and the scores of the runs."""
    folder = tmp_path_factory.mktemp("models")
    (scores,) = _cpu_ranks(1, _runs, folder, prepared)
    return folder, scores


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_gives_raw_rows_the_scores_of_the_run_and_of_predict(
    exported, prepared, tmp_path, name
):
    folder, scores = exported
    model = load(folder / name / "model")
    text = prepared.parent / "t.csv"
    mine = model.score(text.read_text())
    wanted = scores[name]
    np.testing.assert_allclose(mine[-len(wanted) :], wanted, rtol=0, atol=1e-6)
    out = tmp_path / "scores.parquet"
    words = ["--checkpoint", folder / name / "run", "--input", text, "--output", out]
    own = "tests.serving.bundles:OwnConfig"
    assert predict([*map(str, words), *(["--model", own] if name == "own" else [])]) == 0
    np.testing.assert_allclose(mine, pl.read_parquet(out)["score"], rtol=0, atol=1e-6)
    assert model.version == Version("test", 5, 0)
    assert mine.std() > 1e-4


@pytest.mark.slow
def test_a_bundle_needs_only_torch_and_numpy(exported, prepared, tmp_path):
    folder, _ = exported
    for name in MODELS:
        bundle, out = folder / name / "model", tmp_path / f"{name}.json"
        words = ["-P", "-c", ALONE, bundle, prepared.parent / "t.csv", out]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=tmp_path, env=env)
        wanted = load(bundle).score((prepared.parent / "t.csv").read_text())
        np.testing.assert_allclose(json.loads(out.read_text()), wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_bundle_scores_in_a_fresh_environment(exported, prepared, tmp_path):
    """The environment has only links to torch, numpy, and what they need."""
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    needed = ("torch", "numpy", "typing_extensions", "filelock", "sympy", "mpmath", "networkx",
              "jinja2", "markupsafe", "fsspec", "torchgen", "functorch", "nvidia",
              "numpy.libs")  # fmt: skip
    home = Path(np.__file__).parents[1]
    for package in needed:
        for path in (*home.glob(package), *home.glob(f"{package}.py")):
            (site / path.name).symlink_to(path)
    folder, _ = exported
    words = ["-c", ALONE, folder / "wdl/model", prepared.parent / "t.csv", tmp_path / "out.json"]
    python = tmp_path / "env/bin/python"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([str(python), *map(str, words)], check=True, cwd=tmp_path, env=env)
    assert len(json.loads((tmp_path / "out.json").read_text())) > 800


def test_scorer_py_is_the_code_of_the_package(exported):
    folder, _ = exported
    text = (folder / "wdl/model/scorer.py").read_text()
    assert text == scorer_source()
    assert not [line for line in text.splitlines() if line.startswith("from sbpflow")]
    for name in ("cells", "columns", "encoder", "operations", "row_store", "lookups", "scorer"):
        module = sys.modules[f"sbpflow.serving.{name}"]
        last = Path(module.__file__).read_text().splitlines()[-8:]
        assert "\n".join(last) in text
    tops = [line.split("(")[0].split(":")[0] for line in text.splitlines()
            if line.startswith(("def ", "class "))]  # fmt: skip
    assert len(tops) == len(set(tops))


def test_rows_of_every_form_have_equal_scores(exported, prepared):
    folder, _ = exported
    model = load(folder / "wdl/model")
    rows = [{name: row[name] for name in NAMES} for row in good_rows(40)]
    wanted = model.score(rows)
    text = (prepared.parent / "t.csv").read_text()
    lines = text.split("\n")
    assert model.score(text.encode()).tolist() == model.score(text).tolist()
    assert model.score(lines[:-1]).tolist() == model.score(text).tolist()
    np.testing.assert_allclose(model.score(text)[:40], wanted, rtol=0, atol=1e-6)
    types = {"shop": pl.Int64, "tags": pl.List(pl.String), "tag_weights": pl.List(pl.Float64),
             "genre": pl.List(pl.String), "more": pl.List(pl.Int64)}  # fmt: skip
    frame = pl.DataFrame(rows, schema_overrides=types)
    table = pa.Table.from_pylist(rows)
    for given in (frame, pd.DataFrame(rows), table, *table.to_batches()):
        assert model.score(given).tolist() == wanted.tolist(), type(given)
    assert model.score([]).tolist() == []
    one = [model.score([row])[0] for row in rows]
    np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-6)


def test_pandas_columns_with_na_and_arrays_are_read(exported):
    folder, _ = exported
    model = load(folder / "wdl/model")
    rows = [{name: row[name] for name in NAMES} for row in good_rows(40)]
    frame = pd.DataFrame(rows).astype({"shop": "Int64", "city": "string"})
    for name in ("tags", "tag_weights", "genre", "more"):
        frame[name] = frame[name].map(np.array)
    assert frame["shop"].isna().any()
    assert model.score(frame).tolist() == model.score(rows).tolist()


def test_missing_and_unknown_values_are_counted(exported):
    folder, _ = exported
    model = load(folder / "wdl/model")
    row = {name: good_rows(3)[0][name] for name in NAMES}
    first = {"price": None, "city": "Atlantis", "tags": [], "tag_weights": []}
    second = {"price": 1.5, "city": None, "tags": ["zz", "a"], "tag_weights": [1, 2.5]}
    encoded = model.encode([{**row, **first}, {**row, **second}])
    assert encoded.missing["price"] == 1
    assert "price" not in encoded.unknown
    assert (encoded.missing["city"], encoded.unknown["city"]) == (1, 1)
    assert (encoded.missing["tags"], encoded.unknown["tags"]) == (1, 1)
    assert encoded.ids.dtype == np.int32
    assert encoded.dense.dtype == np.float32


@pytest.mark.parametrize("indicator", [True, False])
def test_unknown_values_are_those_of_categories_for_any_number_of_dense_values(exported, indicator):
    folder, _ = exported
    model = load(folder / "wdl/model")
    content = model.content["input"]
    content |= {"dense": [{**entry, "indicator": indicator} for entry in content["dense"]]}
    encoded = Encoder(content, model.encoder.vocabularies).encode(good_rows(3))
    categories = [each["name"] for each in content["fields"] if each["kind"] or each["parts"]]
    assert set(encoded.unknown) == set(categories)


BAD = [
    ({"price": "inf"}, r"row 1, column 'price': inf must be a finite number in the float32 range"),
    ({"age": "ten"}, r"row 1, column 'age': 'ten' must be a number, such as 3"),
    ({"shop": 7.5}, r"row 1, column 'shop': 7.5 must be an integer, such as 7"),
    ({"shop": "7 "}, r"row 1, column 'shop': '7 ' must be an integer, such as 7"),
    ({"city": ["Paris"]}, r"row 1, column 'city': \['Paris'\] must be a string"),
    ({"tag_weights": [1.0]}, r"row 1, column 'tags': \['a', 'b'\] has 2 values, but 'tag_weights'"),
    ({"tag_weights": [1, "x"]}, r"row 1, column 'tag_weights': \[1, 'x'\] has a weight that"),
    ({"more": list(range(301))}, r"row 1, column 'more': .* has more than 300 values"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_row_is_refused_with_its_row_and_column(exported, change, message):
    folder, _ = exported
    model = load(folder / "wdl/model", check=False)
    row = {name: good_rows(3)[0][name] for name in NAMES} | {"tags": ["a", "b"],
                                                             "tag_weights": [1, 2]}  # fmt: skip
    assert len(model.score([row, row])) == 2
    with pytest.raises(RowError, match=message) as error:
        model.score([row, {**row, **change}])
    assert error.value.row == 1
    del row["city"]
    with pytest.raises(RowError, match=r"row 0, column 'city': .* lacks this column; add it"):
        model.score([row])


def test_bad_text_is_refused_with_its_row(exported, prepared):
    folder, _ = exported
    model = load(folder / "wdl/model", check=False)
    header = (prepared.parent / "t.csv").read_text().partition("\n")[0]
    first = "1,0,1.5,20,2,Paris,3,a|b,1|2,x;y,1|2,1,u1,2024-04-01,r1"
    assert len(model.score(f"{header}\n{first}\n{first}")) == 2
    for line, message in (
        (first + ",1", r"row 1: .* has 16 cells instead of 15"),
        ("", r"row 1: '' is a blank line"),
        ('"a"b' + first, r"row 1: .* has a quote \" that does not enclose a whole cell"),
    ):
        with pytest.raises(RowError, match=message):
            model.score(f"{header}\n{first}\n{line}\n")
    for names, message in (
        (f"{header},city", "row 0, column 'city': .* names this column twice; rename one of them"),
        (f"\ufeff{header}", "row 0: .* begins with a byte order mark; remove it"),
    ):
        with pytest.raises(RowError, match=message):
            model.score(f"{names}\n{first}\n")
    with pytest.raises(RowError, match=r"row 1: b'\\xff.*' is not UTF-8 text"):
        model.score(f"{header}\n{first}\n".encode() + b"\xff\n")
    with pytest.raises(TypeError, match=r"each row must be .*, got int"):
        model.score([3])


def test_a_bundle_checks_itself(exported, tmp_path):
    folder, _ = exported
    bundle = tmp_path / "model"
    shutil.copytree(folder / "wdl/model", bundle)
    sample = json.loads((bundle / "sample.json").read_text())
    assert len(sample["rows"]) == 6
    sample["scores"][4] += 1e-4
    (bundle / "sample.json").write_text(json.dumps(sample))
    with pytest.raises(BundleError, match=r"sample\.json: row 4 must score 0\.\d+, got 0\.\d+"):
        load(bundle)
    load(bundle, check=False)
    tensors = bundle / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    with pytest.raises(BundleError, match=r"model\.safetensors is damaged; export the run again"):
        load(bundle)
    with pytest.raises(BundleError, match=r"model\.safetensors has .* bytes instead of"):
        load(bundle, check=False)
    content = json.loads((bundle / "model.json").read_text())
    (bundle / "model.json").write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(BundleError, match="version 2 of 'sbpflow-model', but this scorer reads"):
        load(bundle)


def test_only_operations_of_the_list_run():
    node = ["aten.from_file.default", "x", ["/etc/passwd"], {}]
    with pytest.raises(BundleError, match=r"aten\.from_file\.default is not an operation that"):
        Graph({"inputs": {}, "weights": {}, "nodes": [node], "output": "x"})
    for name in ("aten.add.out", "python.eval", "os.system"):
        with pytest.raises(BundleError, match=f"{name} is not an operation that bundles may use"):
            Graph({"inputs": {}, "weights": {}, "nodes": [[name, "x", [], {}]], "output": "x"})


class Noisy(nn.Module):
    def forward(self, vectors, dense):
        return dense.sum(1) + torch.rand(dense.shape[0])


def test_an_unsupported_operation_is_refused_at_export_by_name():
    with pytest.raises(ConfigError, match=r"uses the operation aten\.rand\.default, which bundles"):
        graph_of(Noisy(), {"deep": 4}, 3, torch.float32)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))

    def forward(self, vectors, dense):
        x = dense.clone()
        x[:, 0] = 2.0
        return self.layers(x) + vectors["deep"].sum(1, keepdim=True)


def test_operations_in_place_are_replaced():
    module = InPlace().requires_grad_(False)
    content, weights = graph_of(module, {"deep": 4}, 3, torch.float32)
    bound = Graph(json.loads(json.dumps(content))).bind(weights)
    for rows in (0, 1, 5):
        vectors, dense = torch.randn(rows, 4), torch.randn(rows, 3)
        got = bound({"vectors.deep": vectors, "dense": dense})
        torch.testing.assert_close(got, module({"deep": vectors}, dense))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(4, 3, 1)

    def forward(self, vectors, dense):
        return self.pairs(vectors["deep"], dense)


def test_bilinear_layers_are_exported():
    module = Pairs().requires_grad_(False)
    content, weights = graph_of(module, {"deep": 4}, 3, torch.float32)
    vectors, dense = torch.randn(5, 4), torch.randn(5, 3)
    got = Graph(content).bind(weights)({"vectors.deep": vectors, "dense": dense})
    torch.testing.assert_close(got, module({"deep": vectors}, dense))


class Branches(nn.Module):
    def forward(self, vectors, dense):
        return dense.sum(1) if dense.sum() > 0 else vectors["deep"].sum(1)


def test_a_module_that_cannot_be_traced_is_refused_with_the_reason():
    with pytest.raises(
        ConfigError, match=r"torch\.export cannot trace the dense part: .+ without P"
    ):
        graph_of(Branches(), {"deep": 4}, 3, torch.float32)


def test_changes_make_a_new_model_and_leave_the_old_one(exported, prepared):
    folder, _ = exported
    model = load(folder / "deepfm/model")
    text = (prepared.parent / "t.csv").read_text()
    before = model.score(text)
    generator = np.random.default_rng(1)
    table = model.content["tables"]["deep.city"]
    rows = np.arange(table["rows"])
    values = generator.normal(size=(table["rows"], 4)).astype(np.float32)
    weight = generator.normal(size=model.weights["mlp.0.weight"].shape).astype(np.float32)
    second = model.with_changes({"deep.city": (rows, values)}, {}, Version("test", 6, 1))
    third = second.with_changes({}, {"mlp.0.weight": weight}, Version("test", 7, 2))
    assert second.version == ("test", 6, 1)
    scores = [second.score(text), third.score(text)]
    assert np.abs(scores[0] - before).max() > 1e-3
    assert np.abs(scores[1] - scores[0]).max() > 1e-3
    assert model.score(text).tolist() == before.tolist()
    stores = (third.stores[table["store"]], model.stores[table["store"]])
    tensors = [store.gather(torch.from_numpy(rows) + table["first"]) for store in stores]
    assert tensors[0].tolist() == values.tolist()
    assert tensors[1].tolist() != values.tolist()
    for row in (999, -1):
        changed = {"deep.city": (np.array([0, row]), values[:2])}
        with pytest.raises(BundleError, match=rf"table deep\.city has \d+ rows, got row {row}"):
            model.with_changes(changed, {}, Version("test", 6, 1))


def test_new_vocabulary_entries_get_their_ids(exported):
    folder, _ = exported
    model = load(folder / "wdl/model")
    row = {name: good_rows(3)[0][name] for name in NAMES} | {"city": "Atlantis", "shop": 4321}
    before = model.encode([row])
    key, check = string_key("Atlantis")
    city = (np.array([key], np.uint64), np.array([4], np.int32), np.array([check], np.uint32))
    added = {"city": city, "shop": (np.array([4321], np.uint64), np.array([5], np.int32))}
    new = model.with_changes({}, {}, Version("test", 6, 1), added)
    places = [model.content["columns"][name][0] for name in ("city", "shop")]
    assert before.ids[0, places].tolist() == [1, 1]
    assert new.encode([row]).ids[0, places].tolist() == [4, 5]
    assert (
        new.encode(model.sample["rows"]).ids.tolist()
        == model.encode(model.sample["rows"]).ids.tolist()
    )


def test_rows_of_16_and_8_bits_are_served(exported, prepared, tmp_path):
    folder, _ = exported
    config = config_of(prepared, MODELS["dlrm"])
    text = (prepared.parent / "t.csv").read_text()
    wanted = load(folder / "dlrm/model").score(text)
    for rows in ("float16", "int8"):
        files = export(folder / "dlrm/run", config, tmp_path / rows, rows=rows)
        assert [file.name for file in files] == [
            "model.json", "model.safetensors", "sample.json", "scorer.py", "vocabulary.safetensors"
        ]  # fmt: skip
        model = load(tmp_path / rows)
        assert {t["stored"] for t in model.content["tables"].values()} == {rows}
        apart = np.abs(model.score(text) - wanted).max()
        assert 0 < apart < 1e-2
        assert model.content["scores"].keys() == {rows, "as_trained"}
    changed = model.with_changes(
        {"deep.shop": (np.array([3]), np.full((1, 16), 0.25, np.float32))}, {}, Version("test", 6)
    )
    table = model.content["tables"]["deep.shop"]
    row = changed.stores[table["store"]].gather(torch.tensor([table["first"] + 3]))
    assert row.tolist() == [[0.25] * 16]


def test_a_split_without_rows_is_not_scored(exported, prepared, tmp_path, capsys):
    folder, _ = exported
    run, new = folder / "dlrm/run", tmp_path / "new"
    encode([prepared.parent / "t.csv"], new, like=prepared, workers=1, max_bad_fraction=1.0)
    config, untested = config_of(new, MODELS["dlrm"]), tmp_path / "untested"
    words = ["--like", prepared, "--input", prepared.parent / "t.csv", "--output", untested]
    assert main(["prepare", *map(str, words), "--split", "time:0.9,0.1,0"]) == 0
    export(run, config_of(untested, MODELS["dlrm"]), tmp_path / "model")
    assert f"not scored: {untested} has no test rows" in capsys.readouterr().out
    assert "scores" not in load(tmp_path / "model").content
    for options in ({}, {"rows": "int8"}, {"scored": new}):
        with pytest.raises(
            ConfigError, match=r"--split: the split val of .*new has no rows; .*, --split test"
        ):
            export(run, config, tmp_path / "other", split="val", **options)
    with pytest.raises(DataError, match="--score"):
        export(run, config, tmp_path / "other", scored=tmp_path / "missing")


def test_a_bundle_is_on_disk_before_it_has_its_name(exported, prepared, tmp_path, monkeypatch):
    folder, _ = exported
    synced, target = [], tmp_path / "model"
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, target.exists()))
    )
    files = export(folder / "dlrm/run", config_of(prepared, MODELS["dlrm"]), target, measured=False)
    assert {(path.stat().st_ino, False) for path in (*files, target)} <= set(synced)
    assert synced[-1] == (tmp_path.stat().st_ino, True)


def test_the_values_are_read_in_blocks(exported, prepared, tmp_path, monkeypatch):
    from sbpflow.checkpoint.read import Checkpoint

    folder, _ = exported
    seen = []
    real = Checkpoint.tensor

    def tensor(self, name, rows=None, *more, **named):
        if name.startswith("tables/"):
            saved = self.saved(name)
            row_bytes = saved.whole.width * saved.dtype.itemsize
            seen.append(None if rows is None else (rows.stop - rows.start) * row_bytes)
        return real(self, name, rows, *more, **named)

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    monkeypatch.setattr("sbpflow.run.export.bundle._BLOCK_BYTES", 48)
    export(folder / "own/run", config_of(prepared, OwnConfig()), tmp_path / "model")
    assert max(seen) == 48
    text = (prepared.parent / "t.csv").read_text()
    assert (
        load(tmp_path / "model").score(text).tolist()
        == load(folder / "own/model").score(text).tolist()
    )


def test_parquet_rows_are_scored_as_by_predict(exported, tmp_path):
    folder, _ = exported
    file, out = tmp_path / "t.parquet", tmp_path / "scores.parquet"
    write_parquet(file, good_rows(100, seed=5))
    words = ["--checkpoint", folder / "dcnv2/run", "--input", file, "--output", out]
    assert predict([*map(str, words)]) == 0
    scores = load(folder / "dcnv2/model").score(pl.read_parquet(file))
    np.testing.assert_allclose(scores, pl.read_parquet(out)["score"], rtol=0, atol=1e-6)

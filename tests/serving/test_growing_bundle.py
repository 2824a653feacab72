"""Tests that bundles of runs with growing fields give the same scores as the runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from benchmarks.serving_tools import serving
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.commands.predict import predict
from sbpflow.data import load_manifest, open_loader
from sbpflow.data.__main__ import main as data_main
from sbpflow.models.dlrm import DlrmConfig
from sbpflow.run.export.export import encoded_of
from sbpflow.run.saved.saved_model import find_checkpoint
from sbpflow.serving import scorer
from sbpflow.serving.batcher import joined
from sbpflow.serving.bodies import TEXT
from sbpflow.serving.cells import MISSING_KEY, string_key
from sbpflow.serving.scorer import Version, load
from tests.data.tables import write_csv
from tests.ranks import RanksFailed
from tests.serving.bundles import (
    BATCH,
    GROWING,
    GROWS,
    STEPS,
    config_of,
    drifting_rows,
    export,
    make_keyed_set,
    train,
)
from tests.serving.test_bundle import ALONE, NAMES
from tests.serving.test_metrics import values

pytest.importorskip("numba", reason="growing tables need numba")
OWN = "tests.serving.bundles:OwnConfig"


def config(prepared: Path, name: str):
    half = {"table_dtype": "bfloat16"} if name == "pairs" else {}
    found = config_of(prepared, GROWING[name], **half)
    return replace(found, data=replace(found.data, shuffle="none"))


def _runs(world, folder: Path, prepared: Path, names: tuple[str, ...]):
    scores = {}
    for name in names:
        scores[name] = train(world, folder / name / "run", config(prepared, name))[0]
        if world.rank == 0:
            export(folder / name / "run", config(prepared, name), folder / name / "model")
    return scores


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return make_keyed_set(tmp_path_factory.mktemp("keyed"))


@pytest.fixture(scope="module")
def exported(_cpu_ranks, prepared, tmp_path_factory):
    """Return a folder with each model's run and bundle, and the scores of the runs."""
    folder = tmp_path_factory.mktemp("growing")
    (scores,) = _cpu_ranks(1, _runs, folder, prepared, tuple(GROWING))
    return folder, scores


def scores_of(run: Path, source: Path, out: Path, name: str) -> np.ndarray:
    words = ["--checkpoint", run, "--input", source, "--output", out]
    assert predict([*map(str, words), *(["--model", OWN] if name == "own" else [])]) == 0
    return pl.read_parquet(out)["score"].to_numpy()


@pytest.mark.few(4)
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("name", GROWING)
def test_a_bundle_gives_the_scores_of_the_run_and_of_predict(
    exported, prepared, tmp_path, monkeypatch, name, loops
):
    folder, scores = exported
    if not loops:
        monkeypatch.setattr(scorer, "_loops", lambda: None)
    text = prepared.parent / "t.csv"
    mine = load(folder / name / "model").score(text.read_text())
    wanted = scores[name]
    np.testing.assert_allclose(mine[-len(wanted) :], wanted, rtol=0, atol=1e-6)
    raw = scores_of(folder / name / "run", text, tmp_path / "x.parquet", name)
    np.testing.assert_allclose(mine, raw, rtol=0, atol=1e-6)
    assert mine.std() > 1e-4


@pytest.mark.slow
def test_a_bundle_from_two_ranks_gives_the_scores_of_the_run(ranks, prepared, tmp_path):
    (scores, _) = ranks(2, _runs, tmp_path, prepared, ("wdl", "own"))
    text = (prepared.parent / "t.csv").read_text()
    for name, wanted in scores.items():
        mine = load(tmp_path / name / "model").score(text)
        np.testing.assert_allclose(mine[-len(wanted) :], wanted, rtol=0, atol=1e-6)


def keys_of(checkpoint: Checkpoint, field: str, kind: str = "keys") -> list[int]:
    return checkpoint.tensor(f"vocabularies/{field}/{kind}").tolist()


def test_only_keys_with_a_row_have_ids(exported):
    folder, _ = exported
    model, checkpoint = load(folder / "wdl/model"), find_checkpoint(folder / "wdl/run")
    live, pending = keys_of(checkpoint, "shop"), keys_of(checkpoint, "shop", "pending_keys")
    trained = {row["shop"] for row in drifting_rows(900)[: STEPS * BATCH]} - {None}
    evicted = sorted(trained - {*live, *pending})
    assert MISSING_KEY in live
    assert len(pending) > 3
    assert len(evicted) > 1
    live.remove(MISSING_KEY)
    row = {name: drifting_rows(3)[1][name] for name in NAMES}
    rows = [{**row, "shop": shop} for shop in [*live, None, *pending, *evicted, 123456]]
    encoded = model.encode(rows)
    ids = encoded.ids[:, model.content["columns"]["shop"][0]].tolist()
    shared = len(pending) + len(evicted) + 1
    assert ids[: -shared - 1] == [keys_of(checkpoint, "shop").index(key) + 2 for key in live]
    assert ids[-shared - 1 :] == [0, *[1] * shared]
    assert (encoded.unknown["shop"], encoded.missing["shop"]) == (shared, 1)
    for table in ("wide.shop", "deep.shop"):
        saved, place = checkpoint.tensor(f"tables/{table}"), model.content["tables"][table]
        found = model.stores[place["store"]].gather(torch.tensor(ids) + place["first"])
        at = [keys_of(checkpoint, "shop").index(k) + 1 for k in [*live, MISSING_KEY]]
        assert torch.equal(found, saved[[*at, *[0] * shared]])
        assert not torch.equal(saved[at[-1]], saved[0])


def test_a_missing_value_without_a_row_reads_the_shared_row(exported):
    folder, _ = exported
    model, checkpoint = load(folder / "wdl/model"), find_checkpoint(folder / "wdl/run")
    assert MISSING_KEY not in keys_of(checkpoint, "city")
    place = model.content["tables"]["deep.city"]
    rows = model.stores[place["store"]].gather(torch.arange(2) + place["first"])
    assert torch.equal(rows, checkpoint.tensor("tables/deep.city")[[0, 0]])


def test_strings_are_hashed_by_the_rule_of_the_set(exported):
    folder, _ = exported
    model, checkpoint = load(folder / "wdl/model"), find_checkpoint(folder / "wdl/run")
    row = {name: drifting_rows(3)[1][name] for name in NAMES}
    cities = [f"K\u00f6ln {number}" for number in range(10)]
    ids = model.encode([{**row, "city": city} for city in cities]).ids
    saved = keys_of(checkpoint, "city")
    signed = [int(np.uint64(string_key(city)[0]).view(np.int64)) for city in cities]
    wanted = [saved.index(key) + 2 if key in saved else 1 for key in signed]
    assert ids[:, model.content["columns"]["city"][0]].tolist() == wanted
    assert {1} < set(wanted)


def test_requests_scored_together_have_their_own_crosses(exported):
    folder, _ = exported
    model = load(folder / "wdl/model")
    rows = [{name: row[name] for name in NAMES} for row in drifting_rows(60)]
    parts = [model.encode(rows[:7]), model.encode(rows[7:8]), model.encode(rows[8:])]
    np.testing.assert_allclose(
        model.score_encoded(joined(parts)), model.score(rows), rtol=0, atol=1e-6
    )


def test_deltas_can_add_keys_to_spare_rows(exported, prepared, tmp_path):
    folder, _ = exported
    run, settings = folder / "wdl/run", config(prepared, "wdl")
    export(run, settings, tmp_path / "model", measured=False, has_spare_rows=True)
    model, whole = load(tmp_path / "model"), load(folder / "wdl/model")
    count = len(keys_of(find_checkpoint(run), "shop"))
    tables = [each.content["tables"]["deep.shop"]["rows"] for each in (model, whole)]
    assert tables == [count + 2 + count // 4 + 1024, count + 2]
    text = (prepared.parent / "t.csv").read_text()
    assert model.score(text).tolist() == whole.score(text).tolist()
    last = np.array([tables[0] - 1])
    new = (np.array([777], np.uint64), last.astype(np.int32))
    value = np.full((1, 4), 0.5, np.float32)
    changed = model.with_changes({"deep.shop": (last, value)}, {}, Version("x", 6), {"shop": new})
    row = {name: drifting_rows(3)[1][name] for name in NAMES} | {"shop": 777}
    encoded, before = (each.encode([row]) for each in (changed, model))
    column = model.content["columns"]["shop"][0]
    assert (encoded.ids[0, column], before.ids[0, column]) == (int(last[0]), 1)
    assert encoded.keys[column].tolist() == before.keys[column].tolist() == [777]
    assert changed.score([row])[0] != model.score([row])[0]


def test_a_server_counts_keys_without_a_row_as_unknown(exported, tmp_path):
    folder, _ = exported
    text = write_csv(tmp_path / "rows.csv", drifting_rows(900)[400:500]).read_bytes()
    model = load(folder / "wdl/model")
    with serving(f"a={folder / 'wdl/model'}") as server:
        answer = server.request("POST", "/score", text, TEXT)
        assert np.float32(answer.body.split()).tolist() == model.score(text).tolist()
        found = values(server.request("GET", "/metrics").body.decode())
    encoded = model.encode(text)
    for column in ("shop", "city", "tags"):
        for kind, counts in (("unknown", encoded.unknown), ("missing", encoded.missing)):
            name = f'sbpflow_{kind}_values_total{{model="a",column="{column}"}}'
            assert found[name] == counts[column]
    assert encoded.unknown["shop"] > 10


def test_generated_rows_have_no_text_to_compute_keys_from(ranks, tmp_path):
    words = ["--rows", "400", "--vocab-scale", "0.001", "--keys", "--output", tmp_path / "set"]
    assert data_main(["synth", *map(str, words)]) == 0
    with pytest.raises(
        RanksFailed, match=r"ConfigError: C1 is a growing field, but the set was generated"
    ):
        ranks(1, _generated, tmp_path)


def _generated(world, folder: Path) -> None:
    model = DlrmConfig(embedding_dim=4, bottom=(4,), top=(4,), fields={"*": GROWS})
    train(world, folder / "run", config_of(folder / "set", model))
    export(folder / "run", config_of(folder / "set", model), folder / "model")


@pytest.mark.slow
def test_a_bundle_needs_only_torch_and_numpy(exported, prepared, tmp_path):
    folder, _ = exported
    for name in GROWING:
        bundle, out = folder / name / "model", tmp_path / f"{name}.json"
        words = ["-P", "-c", ALONE, bundle, prepared.parent / "t.csv", out]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=tmp_path, env=env)
        wanted = load(bundle).score((prepared.parent / "t.csv").read_text())
        np.testing.assert_allclose(json.loads(out.read_text()), wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_model_pt2_and_the_scorer_accept_keys(exported, prepared, tmp_path):
    """``model.pt2`` finds keys by their addresses, and the scorer in hash tables; both must give
    the run's scores.
    """
    folder, _ = exported
    for name in ("wdl", "wide", "own"):
        export(folder / name / "run", config(prepared, name), tmp_path / name, pt2=True)
        bundle = load(tmp_path / name)
        module = torch.export.load(tmp_path / name / "model.pt2").module()
        loader = open_loader(
            load_manifest(prepared), split="test", batch_size=64, backend="memmap", shuffle="none"
        )
        columns = sum(stop - start for start, stop in bundle.content["columns"].values())
        fixed = columns - len(bundle.content["hashed"])
        for batch in loader.epoch(0):
            bags = {}
            for number, field in enumerate(load_manifest(prepared).lists):
                lists = batch.ids.lists.take(torch.tensor([number]))
                weights = (lists.weights,) if field.weighted else ()
                bags[field.name] = (lists.values, lists.lengths.reshape(-1), *weights)
            logits = module(batch.ids.matrix[:, :fixed], batch.dense, bags)
            wanted = bundle.logits(encoded_of(bundle, batch.ids, batch.dense))
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-6)
        loader.close()


def test_rows_of_8_bits_and_blocks_of_rows(exported, prepared, tmp_path, monkeypatch):
    folder, _ = exported
    seen = set()
    real = Checkpoint.tensor

    def tensor(self, name, rows=None, *more, **named):
        if name.startswith("tables/"):
            saved = self.saved(name)
            row_bytes = saved.whole.width * saved.dtype.itemsize
            seen.add(None if rows is None else (rows.stop - rows.start) * row_bytes)
        return real(self, name, rows, *more, **named)

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    monkeypatch.setattr("sbpflow.run.export.bundle._BLOCK_BYTES", 256)
    export(folder / "pairs/run", config(prepared, "pairs"), tmp_path / "model", rows="int8")
    assert max(seen) == 256
    model, whole = load(tmp_path / "model"), load(folder / "pairs/model")
    scores = model.content["scores"]
    assert scores.keys() == {"int8", "as_trained"}
    assert scores["as_trained"] == whole.content["scores"]["as_trained"]
    stored = [each.content["tables"]["deep.shop"]["stored"] for each in (model, whole)]
    assert stored == ["int8", "bfloat16"]
    text = (prepared.parent / "t.csv").read_text()
    apart = np.abs(model.score(text) - whole.score(text)).max()
    assert 0 < apart < 1e-2

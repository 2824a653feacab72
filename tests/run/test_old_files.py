"""Tests that files of earlier versions are read, or refused with a message that explains the
solution.

Each ``tests/fixtures/COMMIT`` contains files that a commit wrote, and ``expected.json`` with the
values that these files gave at that commit. If a file is no longer supported, its test expects a
message that explains the migration.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands import train
from sbpflow.commands.checkpoint import checkpoint as checkpoint_command
from sbpflow.commands.predict import predict
from sbpflow.commands.report import report
from sbpflow.commands.train import facts_of
from sbpflow.config.load import load_config
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.__main__ import main as data_main
from sbpflow.data.read.loaders import open_loaders
from sbpflow.errors import ConfigError
from sbpflow.models.registry import MODELS
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import load as load_profile
from sbpflow.planner.feasible import choose
from sbpflow.planner.tables_file import read_tables
from sbpflow.planner.task import plan_from_yaml
from sbpflow.run.execution.job import build_job
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.plan_file import plan_from_json
from sbpflow.run.saved import resume
from sbpflow.run.saved.saved_model import saved_config, saved_layouts, saved_plan
from sbpflow.runtime.compute.versions import minor
from sbpflow.runtime.ranks.world import World
from sbpflow.serving.scorer import BundleError
from sbpflow.serving.scorer import load as load_bundle
from tests.fixtures.facts import events, norms, row_digests, rows_of, tensor_digest

OLD = Path(__file__).parents[1] / "fixtures" / "d4baee1"
EXPECTED = json.loads((OLD / "expected.json").read_text())
LAYOUTS = EXPECTED["layouts"]
# The files may come from another CPU, where exp and log differ in the last of 53 bits, and sums are
# computed in another order. A few training steps amplify these differences about 1e3 times.
FLOAT64 = 1e-10
# For bfloat16 rows and vectors: a value midway between two bfloat16 numbers may be rounded either
# way.
BFLOAT16 = 1e-3
# The tolerance is for float32 logits whose sums are computed in another order.
FLOAT32 = 1e-5


@pytest.mark.parametrize("name", EXPECTED["sets"])
def test_an_old_set_is_verified_and_gives_the_same_rows(name):
    assert data_main(["verify", str(OLD / name)]) == 0
    assert row_digests(rows_of(OLD / name)) == EXPECTED["sets"][name]


def test_new_rows_get_the_ids_of_an_old_vocabulary(tmp_path):
    words = ["encode", "--like", OLD / "set", "--input", OLD / "input/tomorrow.csv", "--output"]
    assert data_main([*map(str, words), str(tmp_path / "set")]) == 0
    found, expected = rows_of(tmp_path / "set")["test"], rows_of(OLD / "tomorrow")["test"]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        # Logarithms on another CPU may differ in the last bit.
        bound = 1e-6 if name == "dense" else 0
        np.testing.assert_allclose(found[name], values, rtol=bound, atol=0, err_msg=name)


def test_an_old_set_grows(tmp_path):
    like = ["prepare", "--input", OLD / "input/more.csv", "--like", OLD / "set", "--grow"]
    words = [*like, "--split", "time:ts<2024-04-14,ts<2024-04-16", "--output", tmp_path / "set"]
    assert data_main([*map(str, words)]) == 0
    found, expected = rows_of(tmp_path / "set"), rows_of(OLD / "grown")
    for split, arrays in expected.items():
        for name in ("ids", "values", "lengths", "group", "time"):
            np.testing.assert_array_equal(found[split][name], arrays[name], err_msg=name)


def _go_on(world: World, name: str, steps: int, data: str = "set"):
    """Restore a checkpoint and train; return the restored state, the losses and the final state.

    The saved plan is used if the number of ranks is the same.
    """
    path = OLD / "checkpoints" / name
    saved, manifest = open_checkpoint(path), load_manifest(OLD / data)
    config = saved_config(saved, [f"data.path={OLD / data}"], models=MODELS, own_model=None)
    config, planned = saved_layouts(saved, config, world.size)
    spec, plan = plan_run(
        config, fields_of(manifest), world_size=world.size, device_type="cpu", planned=planned
    )
    if saved.documents["world_size"] == world.size:
        plan = saved_plan(saved, plan, config.parallel.kernel)
        assert plan is not None, f"{name}: the plan that was saved is not the plan of today"
    boxing = Boxing(world)
    job = build_job(config, spec, plan, boxing)
    facts = facts_of(manifest)
    decision = resume.Decision(folder=path.parent, run="", newest=path)
    start = resume.load(decision, job, facts, boxing)
    before = _held(job)
    loaders = open_loaders(
        manifest,
        config.data,
        world.rank,
        world.size,
        seed=config.run.seed,
        device=world.device,
        crosses=spec.hashed_columns,
    )
    loader = loaders["train"]
    if start.cursor is not None:
        loader.load_state_dict(start.cursor)
    batches = zip(range(steps), loader.epoch(start.epoch), strict=False)
    losses = [float(job.trainer.step(batch)) for _, batch in batches]
    after = _held(job)
    for one in loaders.values():
        one.close()
    return before, losses, after


def _held(job):
    """Return, by name, the full shape of each tensor, and the position and values of this rank's
    parts.
    """
    return {
        name: (
            tuple(tensor.shape),
            [
                (slice(p.row_start, p.row_stop), slice(p.col_start, p.col_stop), _sent(values))
                for p, values in ((r.place, r.values) for r in tensor.rectangles)
            ],
        )
        for name, tensor in job.state().items()
    }


def _sent(values):
    """Return the values as a numpy array that can be sent; bfloat16 becomes its bits, as int16."""
    own = values.detach().clone()
    return own.view(torch.int16).numpy() if own.dtype == torch.bfloat16 else own.numpy()


def whole(held):
    """Combine the parts of all ranks into logical tensors; copies must be equal."""
    tensors = {}
    for name, (shape, _) in held[0].items():
        pieces = [piece for of_rank in held for piece in of_rank[name][1]]
        flat = np.zeros((shape[0] if shape else 1, int(np.prod(shape[1:]))), pieces[0][2].dtype)
        filled = np.zeros(flat.shape, dtype=bool)
        for rows, columns, values in pieces:
            part, seen = values.reshape(flat[rows, columns].shape), filled[rows, columns]
            assert (part[seen] == flat[rows, columns][seen]).all(), f"{name}: copies differ"
            flat[rows, columns], filled[rows, columns] = part, True
        assert filled.all(), f"{name}: a part is on no rank"
        tensor = torch.from_numpy(flat.reshape(shape))
        tensors[name] = tensor.view(torch.bfloat16) if flat.dtype == np.int16 else tensor
    return tensors


@pytest.mark.few(5)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "per-shard"])
def test_an_old_checkpoint_has_the_same_values_and_training_resumes(ranks, name, size):
    expected = LAYOUTS[name]
    results = ranks(size, _go_on, name, len(expected["losses"]))
    restored = whole([before for before, _, _ in results])
    digests = {key: tensor_digest(tensor) for key, tensor in restored.items()}
    assert digests == expected["tensors"]
    for _, losses, _ in results:
        assert losses == pytest.approx(expected["losses"], rel=FLOAT64)
    assert norms(whole([after for _, _, after in results])) == pytest.approx(
        expected["norms"], rel=FLOAT64, abs=FLOAT64
    )


def test_state_per_column_shard_is_restored_only_to_equal_shards(ranks):
    """The fixtures include bfloat16 rows, which are exchanged as bfloat16."""
    expected = LAYOUTS["per-shard"]
    results = ranks(2, _go_on, "per-shard", len(expected["losses"]))
    restored = whole([before for before, _, _ in results])
    assert {key: tensor_digest(t) for key, t in restored.items()} == expected["tensors"]
    assert restored["tables/deep.code"].dtype == torch.bfloat16
    assert results[0][1] == pytest.approx(expected["losses"], rel=BFLOAT16)
    actual_norms = norms(whole([after for _, _, after in results]))
    assert actual_norms == pytest.approx(expected["norms"], rel=BFLOAT16, abs=1e-6)
    with pytest.raises(AssertionError, match="use the layout and row_state of the saved run"):
        ranks(1, _go_on, "per-shard", 1)


def test_an_old_checkpoint_resumes_with_a_grown_set(ranks):
    ((before, losses, _),) = ranks(1, _go_on, "rowwise-reduce", 1, "grown")
    assert np.isfinite(losses).all()
    found, saved = whole([before]), open_checkpoint(OLD / "checkpoints/rowwise-reduce")
    grew = [name for name in found if found[name].shape != saved.saved(name).shape]
    assert {"tables/deep.shop", "tables/deep.shop/sum"} <= set(grew)
    for name in grew:
        old = saved.tensor(name)
        assert torch.equal(found[name][: len(old)], old), name


@pytest.mark.parametrize("name", ["run", "interrupted", "planned"])
def test_the_files_of_a_run_are_read(name, tmp_path, capsys):
    assert report([str(OLD / name), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert checkpoint_command(["verify", str(OLD / name)]) == 0
    assert "step-" in capsys.readouterr().out
    kept = json.loads((OLD / name / "plan.json").read_text())
    assert plan_from_json(json.dumps(kept)).world_size == (1 if name == "interrupted" else 2)


def test_an_old_interrupted_run_resumes_to_the_same_losses(tmp_path):
    expected = EXPECTED["interrupted"]
    shutil.copytree(OLD / "interrupted", tmp_path / "run")
    stopped = events(tmp_path / "run")
    assert stopped[-1]["step"] == 11, "it was interrupted after its last checkpoint"
    words = [f"data.path={OLD / 'set'}", f"run.dir={tmp_path / 'run'}", *expected["words"]]
    assert train.main(["--config", str(OLD / "input/base.yaml"), *words]) == 0
    logged = events(tmp_path / "run")
    assert [one["step"] for one in logged if one["event"] == "step"] == list(range(1, 21))
    assert len(logged) == len(expected["events"])
    for one, other in zip(logged, expected["events"], strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            same = value if isinstance(value, str) else pytest.approx(value, rel=FLOAT64)
            assert one[key] == same, (other, key)
    assert not list(tmp_path.glob("run/previous-*"))


def test_predictions_of_an_old_run_are_unchanged(tmp_path):
    pl = pytest.importorskip("polars")
    words = ["--checkpoint", str(OLD / "run"), "--output"]
    for kind, source in (("scores", "set"), ("raw_scores", "input/tomorrow.csv")):
        file = tmp_path / f"{kind}.parquet"
        assert predict([*words, str(file), "--input", str(OLD / source)]) == 0
        scores = pl.read_parquet(file)["score"].to_list()
        assert scores == pytest.approx(EXPECTED["finished"][kind], abs=FLOAT32)


def test_an_old_exported_model_scores_like_its_run():
    writer = json.loads((OLD / "export/model.json").read_text())
    wrote = writer["versions"]["torch"]
    mine, its = (tuple(map(int, minor(one).split("."))) for one in (torch.__version__, wrote))
    if mine < its:
        pytest.skip(f"torch {torch.__version__} reads no model.pt2 of the newer torch {wrote}")
    model = torch.export.load(OLD / "export/model.pt2").module()
    rows = {name: torch.from_numpy(array) for name, array in rows_of(OLD / "set")["test"].items()}
    lengths, bags = rows["lengths"], {}
    starts = rows["lengths"].reshape(-1).cumsum(0).reshape(lengths.shape) - lengths
    names = ["tags", "words", "seen"]
    assert sorted(names) == sorted(writer["inputs"]["bags"])
    for place, name in enumerate(names):
        pieces = [
            slice(int(start), int(start + length))
            for start, length in zip(starts[:, place], lengths[:, place], strict=True)
        ]
        own = [torch.cat([rows[kind][p] for p in pieces]) for kind in ("values", "value_weights")]
        weighted = len(writer["inputs"]["bags"][name]) == 3
        bags[name] = (own[0], lengths[:, place].contiguous(), *own[1:][:weighted])
    scores = model(rows["ids"], rows["dense"], bags).sigmoid().tolist()
    assert scores == pytest.approx(EXPECTED["finished"]["scores"], abs=FLOAT32)


def test_an_old_export_is_refused_with_a_way_to_migrate():
    with pytest.raises(
        BundleError, match=r"version 1 of .* reads version 3 .*; export the run again"
    ):
        load_bundle(OLD / "export")


def test_old_exported_tensors_equal_the_checkpoint():
    load_file = pytest.importorskip("safetensors.torch").load_file
    (path,) = (OLD / "run/checkpoints").glob("step-*")
    saved = open_checkpoint(path)
    same, half = (load_file(OLD / f / "model.safetensors") for f in ("export", "export-float16"))
    assert {"tables/deep.code", "tables/wide.shop", "dense/mlp.0.weight"} <= same.keys()
    for name, tensor in same.items():
        assert torch.equal(tensor, saved.tensor(name)), name
        if name.startswith("tables/"):
            assert torch.equal(half[name], tensor.half()), name


def test_an_old_calibration_is_refused_and_an_old_plan_is_priced():
    with pytest.raises(
        ConfigError, match=r"format is 2, but this version reads 6.*run sbpflow calibrate"
    ):
        load_profile(OLD / "profile.json")
    cost = TaskCost(described("h100-dgx"), read_tables(OLD / "tables.json").task(2))
    given = plan_from_yaml(OLD / "plan.yaml", cost.task)
    old, new = cost.predict(given).step_ms, cost.predict(choose(cost)).step_ms
    assert 0 < old < 1000
    assert new <= old * (1 + 1e-9), "the present search finds nothing worse"


def test_a_run_accepts_the_table_plan_of_an_old_run():
    tables = OLD / "planned/tables.yaml"
    saved = plan_from_json((OLD / "planned/plan.json").read_text())
    words = [f"parallel.plan={tables}", "model={name: wdl, hidden: [6], wide: {crosses: []}}"]
    config = load_config(OLD / "input/base.yaml", words, models=MODELS)
    fields = fields_of(load_manifest(OLD / "plain"))
    _, plan = plan_run(config, fields, world_size=2, device_type="cpu")
    assert {n: str(layout.layout) for n, layout in plan.layouts.items()} == {
        n: str(layout.layout) for n, layout in saved.layouts.items()
    }

"""Tests that a bundle of growing fields with deltas gives the same scores as a new bundle exported
at the same step.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from sbpflow.checkpoint.read import Checkpoint, open_checkpoint
from sbpflow.commands import train
from sbpflow.commands.export import export_model
from sbpflow.models.registry import MODELS
from sbpflow.run.export.chain import export_next, last_export
from sbpflow.run.export.growing_deltas import served_keys
from sbpflow.run.saved.saved_model import saved_config
from sbpflow.serving import scorer
from sbpflow.serving.cells import MISSING_KEY
from sbpflow.serving.deltas import DELTA_FILE
from sbpflow.serving.follower import Follower
from sbpflow.serving.scorer import load
from tests.quick import quick
from tests.serving.bundles import make_keyed_set

pytest.importorskip("numba", reason="growing tables need numba")
GROWS = "{vocabulary: dynamic, admit_count: 2, evict: {max_rows: 65536}}"
FITTED = "{vocabulary: fitted}"
WORDS = [
    "data.batch_size=64", "data.shuffle=none", "data.loader=memmap", "model.hidden=[7]",
    "model.embedding_dim=4", "model.wide.crosses=[[city, shop]]", "model.wide.hash_size=97",
    f"model.fields={{'*': {GROWS}, more: {FITTED}, score: {FITTED}, 'hashed.*': {FITTED}}}",
    "parallel.device=cpu", "parallel.scheme=3", "train.epochs=3", "train.eval_every=0",
    "checkpoint.every=2", "checkpoint.deltas=20", "checkpoint.keep=50",
    "optimizer.sparse.name=lazy_adam",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return the folder of a run's checkpoints; the folder of its data is next to the run."""
    folder = tmp_path_factory.mktemp("followed")
    path = make_keyed_set(folder / "data", rows=900)
    (folder / "run.yaml").write_text("model: {name: wdl}\n")
    words = ["--config", str(folder / "run.yaml"), f"data.path={path}"]
    assert train.main([*words, f"run.dir={folder / 'run'}", *WORDS]) == 0
    return folder / "run" / "checkpoints"


def writer(rows: str = "as_trained", has_spare_rows: bool = False):
    def write_base(checkpoint: Checkpoint, target: Path) -> None:
        config = saved_config(checkpoint, [], models=MODELS, own_model=None)
        export_model(
            checkpoint, config, target, rows=rows, measured=False, has_spare_rows=has_spare_rows
        )

    return write_base


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "loops"), quick([("as_trained", True), ("int8", False)], lambda n: n == 0)
)
def test_a_bundle_with_deltas_gives_the_scores_of_a_bundle_of_the_same_step(
    run, tmp_path, monkeypatch, rows, loops
):
    if not loops:
        monkeypatch.setattr(scorer, "_loops", lambda: None)
    text, steps = (run.parents[1] / "data/t.csv").read_text(), steps_of(run)
    out, counts = tmp_path / "out", {"removed": 0, "vocabulary": 0}
    out.mkdir()
    start = 1
    base = export_next(
        open_checkpoint(run / f"step-{steps[start]}"), out, 9, writer(rows, has_spare_rows=True)
    )
    assert base == out / f"step-{steps[start]}"
    follower = Follower(out, load)
    follower.version.model.check()
    old = follower.version.model.score(text)
    # One delta contains the changes from two checkpoints.
    for number, step in enumerate([steps[start + 1], *steps[start + 3 :]], 1):
        checkpoint = open_checkpoint(run / f"step-{step}")
        assert export_next(checkpoint, out, 9, writer(rows)) == base / f"deltas/{number:06d}"
        content = json.loads((base / f"deltas/{number:06d}" / DELTA_FILE).read_text())["content"]
        assert follower.poll()
        for kind in counts:
            counts[kind] += sum(content[kind].values())
        fresh = tmp_path / f"fresh-{step}"
        writer(rows)(checkpoint, fresh)
        wanted = load(fresh).score(text)
        np.testing.assert_array_equal(follower.version.model.score(text), wanted)
        assert np.abs(wanted - old).max() > 1e-3
        last = last_export(out)
        for name in ("shop", "city", "tags"):
            keys = checkpoint.tensor(f"vocabularies/{name}/keys").numpy()
            served, ids = served_keys(base, last.content, name, last.entries.get(name, ()))
            np.testing.assert_array_equal(served, np.sort(keys))
            assert len(np.unique(ids)) == len(ids)
            assert ids.min() >= 2
    assert min(counts.values()) > 10, counts
    replayed = Follower(out, load).version
    np.testing.assert_array_equal(replayed.model.score(text), wanted)


@pytest.mark.slow
def test_too_many_new_keys_start_a_new_bundle(run, tmp_path):
    steps = steps_of(run)
    first, second = (open_checkpoint(run / f"step-{step}") for step in (steps[0], steps[-1]))
    assert export_next(first, tmp_path, 9, writer()) == tmp_path / f"step-{steps[0]}"
    assert export_next(second, tmp_path, 9, writer()) == tmp_path / f"step-{steps[-1]}"
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{steps[-1]}"]
    assert MISSING_KEY in second.tensor("vocabularies/shop/keys")

"""Tests that whole runs with tables in a file have the same events, resumptions, predictions, and
exports as runs with tables in memory.
"""

import json
from pathlib import Path
from unittest import mock

import pytest

import sbpflow
from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands.explain import explain
from sbpflow.commands.export import export
from sbpflow.commands.predict import open_rows, predict
from tests.training.test_resume import CONFIG, events, interrupted, run, words

# The kernel is fixed, because runs with different storage would measure and choose kernels
# separately.
COMMON = (
    *("parallel.kernel=numba", "train.accumulate=2", "optimizer.clip={norm: 0.5, rows: true}"),
    *("train.stop={metric: logloss, patience: 1, min_delta: 0.01}", "checkpoint.background=true"),
)
CACHED = ("parallel.storage.deep.*={kind: file, cache: 18%}",)


@pytest.fixture(scope="module")
def whole(synth_set, tmp_path_factory) -> Path:
    """Return an uninterrupted run with all rows in memory."""
    pytest.importorskip("numba")
    folder = tmp_path_factory.mktemp("whole")
    assert run(synth_set, folder, *COMMON) == 0
    return folder


def check_equal(one: Path, other: Path) -> None:
    assert events(one) == events(other)
    newest, same = (list_checkpoints(folder / "checkpoints")[0] for folder in (one, other))
    assert newest.name == same.name
    one, other = open_checkpoint(newest), open_checkpoint(same)
    assert one.tensors.keys() == other.tensors.keys()
    for name in one.tensors:
        assert one.tensor(name).equal(other.tensor(name)), name


def test_a_cached_run_equals_one_in_memory_and_shows_its_figures(
    synth_set, whole, tmp_path, capsys
):
    assert run(synth_set, tmp_path, *COMMON, *CACHED) == 0
    check_equal(tmp_path, whole)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert all(line["cache_fetched"] >= line["cache_new"] >= 0 for line in steps)
    assert sum(line["cache_written"] for line in steps) > 100
    assert all(line["cache_wait_ms"] >= 0 for line in steps)
    assert "cached on rank" in (tmp_path / "start.txt").read_text()
    given = ["--config", CONFIG, *words(synth_set, tmp_path, *COMMON, *CACHED)]
    shown = "batches/s, the median of the run in "
    other = f"run.dir={tmp_path / 'none'}"
    for more, is_shown in (([], True), (["data.batch_size=400"], False), ([other], False)):
        capsys.readouterr()
        assert explain([*given, *more, "--ranks", "1"]) == 0
        assert (shown in capsys.readouterr().out) == is_shown
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {path.name for path in whole.iterdir()}


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [(CACHED, ()), ((), CACHED), (CACHED, CACHED)])
def test_killed_runs_resume_with_and_without_a_cache(
    synth_set, whole, tmp_path, monkeypatch, before, after
):
    interrupted(
        synth_set, tmp_path, monkeypatch, 5, *COMMON, "checkpoint.background=false", *before
    )
    assert run(synth_set, tmp_path, *COMMON, *after) == 0
    check_equal(tmp_path, whole)


def test_predictions_and_exports_of_a_cached_run_are_equal(synth_set, whole, tmp_path):
    assert run(synth_set, tmp_path / "run", *COMMON, *CACHED) == 0
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    found = {}
    for name, folder in (("whole", whole), ("cached", moved)):
        out = tmp_path / f"{name}.csv"
        args = ["--checkpoint", folder, "--input", synth_set, "--output", out, "--split", "test"]
        assert predict([*map(str, args)]) == 0
        exported = tmp_path / f"{name}-export"
        args = ["--checkpoint", folder, "--output", exported]
        assert export([*map(str, args)]) == 0
        weights = sorted(exported.glob("*.safetensors"))
        assert weights
        found[name] = out.read_bytes(), [path.read_bytes() for path in weights]
    assert found["whole"] == found["cached"]
    assert not (tmp_path / "run").exists(), "the rows of the prediction need another folder"
    with mock.patch("sbpflow.api.open_rows", wraps=open_rows) as opened:
        sbpflow.load(moved).evaluate(synth_set)
    assert opened.call_args.kwargs["home"] == moved


def test_a_cache_too_small_for_a_step_is_refused_with_a_size(synth_set, tmp_path):
    small = ("parallel.kernel=torch", "parallel.storage.deep.*={kind: file, cache: 1%}")
    with pytest.raises(ValueError, match=r"cache: .* \d+ slots .* needs .* use [\d.]+% or more"):
        run(synth_set, tmp_path, *COMMON, *small)

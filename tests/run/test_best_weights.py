"""Tests that a run that monitors val ends with its best weights, and that its outputs use these
weights.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.commands import train
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.commands.export import export
from sbpflow.commands.predict import predict
from sbpflow.config.checkpoint_options import CheckpointConfig
from sbpflow.config.metrics import METRICS
from sbpflow.config.schema import Config, TrainConfig
from sbpflow.config.train_options import StopConfig
from sbpflow.data.__main__ import main as data_main
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.models.wdl import WdlConfig
from sbpflow.run.report.data import read_run
from sbpflow.run.report.page import page
from sbpflow.run.saved import checkpoints
from sbpflow.run.saved.saved_model import find_checkpoint
from sbpflow.training.batch import Batch
from sbpflow.training.metrics import evaluate
from sbpflow.training.trainer import Trainer
from tests import deadlines

CONFIG = str(Path(__file__).parents[2] / "configs/scheme3.yaml")
STOP = "train.stop={metric: logloss, patience: 2}"
RESUMABLE = (STOP, "checkpoint.every=2", "checkpoint.background=false")
WORDS = [  # high learning rates make the model overfit soon
    "model.hidden=[16]",
    "data.batch_size=500",
    "data.loader=memmap",
    "train.epochs=4",
    "train.eval_every=4",
    "optimizer.sparse.lr=0.05",
    "optimizer.dense.lr=0.01",
    "checkpoint.every=100",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("best") / "set"
    words = ["synth", "--rows", "6000", "--vocab-scale", "0.0005", "--output", str(folder)]
    assert data_main(words) == 0
    return folder


def run(data: Path, folder: Path, *more: str) -> int:
    words = ["--config", CONFIG, f"data.path={data}", f"run.dir={folder}", *WORDS, *more]
    return train.main(words)


def events(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in lines if event["event"] == kind]


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory) -> Path:
    """Train until the run stops early by logloss; return its folder."""
    folder = tmp_path_factory.mktemp("stopped")
    assert run(data, folder, STOP) == 0
    return folder


def test_all_outputs_use_the_best_step(data, stopped, tmp_path, capsys):
    (final,) = events(stopped, "final")
    scores = {
        event["step"]: event["logloss"]
        for event in events(stopped, "eval")
        if event["split"] == "val"
    }
    best, last = min(scores, key=lambda step: scores[step]), final["steps"]
    assert (final["best_step"], best < last) == (best, True)
    tests = {e["step"]: e for e in events(stopped, "eval") if e["split"] == "test"}
    assert set(tests) == {best, last}
    whole = [(e["split"], e["step"]) for e in events(stopped, "eval")]
    assert len(whole) == len(set(whole)), "a split is scored twice with the same weights"
    assert (final["auc"], final["logloss"]) == (tests[best]["auc"], tests[best]["logloss"])
    assert (final["last_auc"], final["last_logloss"]) == (
        tests[last]["auc"],
        tests[last]["logloss"],
    )
    assert final["auc"] != final["last_auc"]
    steps = [path.name for path in list_checkpoints(stopped / "checkpoints")]
    assert steps[0] == f"step-{last}"
    assert f"step-{best}" in steps

    shown = page([read_run(stopped, "run")])
    for figure in (f"{final['auc']:.5f}", f"{final['last_auc']:.5f}", f"{best:,}"):
        assert figure in shown

    outputs = {}
    for which in ([], ["--best"], ["--last"]):
        out = tmp_path / f"s{''.join(which)}.parquet"
        words = ["--checkpoint", str(stopped), "--input", str(data), "--output", str(out)]
        assert predict([*words, *which]) == 0
        outputs["".join(which)] = pl.read_parquet(out)
    assert outputs[""].equals(outputs["--best"])
    for which, auc, logloss in (
        ("", final["auc"], final["logloss"]),
        ("--last", final["last_auc"], final["last_logloss"]),
    ):
        found = scores_of(outputs[which])
        assert found.auc == pytest.approx(auc, abs=1e-6)
        assert found.logloss == pytest.approx(logloss, abs=1e-6)

    capsys.readouterr()
    words = ["--checkpoint", str(stopped)]
    for which, step, auc in (([], best, final["auc"]), (["--last"], last, final["last_auc"])):
        out = tmp_path / f"export{step}"
        assert export([*words, "--output", str(out), *which]) == 0
        facts = json.loads((out / "model.json").read_text())
        assert facts["origin"]["step"] == step
        assert facts["scores"]["as_trained"]["auc"] == pytest.approx(auc, abs=1e-6)
    text = capsys.readouterr().out
    assert re.search(rf"weights of step {best} from .*, with the best logloss on val, 0\.", text)
    assert re.search(rf"weights of step {last} from .*; step {best} has the best logloss", text)


def scores_of(frame: pl.DataFrame):
    """Evaluate probabilities, after converting them to logits."""
    scores = frame["score"].to_numpy().astype(np.float64)
    return evaluate(np.log(scores / (1 - scores)), frame["label"].to_numpy())


def test_single_checkpoints_and_runs_without_a_best_refuse_the_choice(data, stopped, tmp_path):
    step = list_checkpoints(stopped / "checkpoints")[0]
    with pytest.raises(ConfigError, match=r"^--last: .* single checkpoint; remove --last"):
        find_checkpoint(step, "last")
    assert run(data, tmp_path, "train.max_steps=4") == 0
    assert find_checkpoint(tmp_path).step == 4
    with pytest.raises(CheckpointError, match=r"^--best: .*checkpoint\.keep_best .*; use --last"):
        find_checkpoint(tmp_path, "best")
    assert "best_step" not in events(tmp_path, "final")[0]


def test_prune_and_ls_recognize_the_best_checkpoint_and_report_a_missing_one(
    stopped, tmp_path, capsys
):
    shutil.copytree(stopped / "checkpoints", tmp_path / "c")
    best = events(stopped, "final")[0]["best_step"]
    assert checkpoint(["prune", str(tmp_path / "c"), "--keep", "1"]) == 0
    names = {path.name for path in list_checkpoints(tmp_path / "c")}
    assert names == {f"step-{best}", f"step-{events(stopped, 'final')[0]['steps']}"}
    assert checkpoint(["ls", str(tmp_path / "c")]) == 0
    assert "best so far: logloss 0." in capsys.readouterr().out
    shutil.rmtree(tmp_path / "c" / f"step-{best}")
    with pytest.raises(CheckpointError, match=rf"step-{best}.*--last uses .*step-"):
        find_checkpoint(tmp_path / "c")
    assert find_checkpoint(tmp_path / "c", "last").step > best


def test_keep_best_watches_any_metric_and_the_last_step_is_a_candidate(data, tmp_path):
    more = ["train.max_steps=6", "train.eval_rows=500", "optimizer.sparse.lr=0.001"]
    for metric in ("logloss", "auc"):
        keep = f"checkpoint.keep_best={metric}"
        assert run(data, tmp_path, *more, keep, "checkpoint.resume=never") == 0
        seen = [e for e in events(tmp_path, "eval") if e["split"] == "val" and e["num_rows"] == 500]
        assert [event["step"] for event in seen] == [4, 6]
        kind, (first, last) = METRICS[metric], (event[metric] for event in seen)
        (final,) = events(tmp_path, "final")
        assert final["best_step"] == (6 if kind.is_better(last, first, 0.0) else 4)
    assert "last_auc" not in final or final["best_step"] == 4


def interrupt(data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Kill a run after step ``at``, before the next step."""
    step = Trainer.step

    def until(self: Trainer, batches: list[Batch]):
        if self.num_steps == at:
            raise KeyboardInterrupt
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", until)
        with pytest.raises(KeyboardInterrupt):
            run(data, folder, *RESUMABLE)


@pytest.mark.slow
def test_a_run_resumes_from_its_last_step_and_ends_with_the_best(
    data, stopped, tmp_path, monkeypatch, capfd
):
    """Kill the run after its best step; the resumed run must equal the uninterrupted run."""
    best = events(stopped, "final")[0]["best_step"]
    interrupt(data, tmp_path, monkeypatch, best + 3)
    assert run(data, tmp_path, *RESUMABLE) == 0
    assert f"resuming after step {best + 2}" in capfd.readouterr().err
    (final,), (whole,) = events(tmp_path, "final"), events(stopped, "final")
    for name in ("best_step", "steps", "auc", "logloss", "last_auc", "val_auc"):
        assert final[name] == whole[name], name


def test_the_best_is_chosen_again_if_its_checkpoint_is_missing(data, tmp_path, monkeypatch, capfd):
    interrupt(data, tmp_path, monkeypatch, 7)
    shutil.rmtree(tmp_path / "checkpoints" / "step-4")
    assert run(data, tmp_path, *RESUMABLE) == 0
    assert "step-4, the best checkpoint so far, is missing" in capfd.readouterr().err
    assert events(tmp_path, "final")[0]["best_step"] > 4


def test_the_best_checkpoint_is_kept_until_a_better_one_is_complete(data, tmp_path, monkeypatch):
    kept = []
    keep_only = checkpoints.keep_only

    def keep(folder: Path, *, step: int, and_step: int | None, **more: Any) -> None:
        kept.append((step, and_step))
        keep_only(folder, step=step, and_step=and_step, **more)

    monkeypatch.setattr(checkpoints, "keep_only", keep)
    more = ("checkpoint.every=2", "checkpoint.keep=1", "train.max_steps=8", "train.eval_every=3")
    assert run(data, tmp_path, STOP, *more) == 0
    assert [step for step, _ in kept][:3] == [2, 3, 4]  # step 3 is the best so far
    assert kept[1] == (3, 3)
    best = events(tmp_path, "final")[0]["best_step"]
    names = {path.name for path in list_checkpoints(tmp_path / "checkpoints")}
    assert names == {f"step-{best}", "step-8"}


@pytest.mark.slow
def test_two_ranks_end_with_the_best_weights(data, tmp_path):
    """Two ranks restore the best weights, each its own rows; a prediction on one rank must give the
    run's scores.
    """
    words = [*WORDS, STOP, f"data.path={data}", f"run.dir={tmp_path / 'run'}"]
    done = deadlines.run(
        [sys.executable, "-m", "sbpflow", "train", "-n", "2", "--config", CONFIG, *words],
        120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(CONFIG).parents[1],
    )
    assert done.returncode == 0, done.stderr
    (final,) = events(tmp_path / "run", "final")
    assert final["best_step"] < final["steps"]
    out = tmp_path / "s.csv"
    assert (
        predict(["--checkpoint", str(tmp_path / "run"), "--input", str(data), "--output", str(out)])
        == 0
    )
    assert scores_of(pl.read_csv(out)).auc == pytest.approx(final["auc"], abs=1e-5)
    assert final["auc"] != pytest.approx(final["last_auc"], abs=1e-4)


def test_a_damaged_best_checkpoint_ends_the_run_with_a_remedy(data, tmp_path, monkeypatch):
    load_weights = checkpoints.Checkpoints.load_weights

    def damaged(self: checkpoints.Checkpoints, step: int) -> None:
        file = tmp_path / "checkpoints" / f"step-{step}" / "rank-0.bin"
        file.write_bytes(file.read_bytes()[:-1])
        load_weights(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "load_weights", damaged)
        with pytest.raises(
            ConfigError, match=r"step-\d+.*contains the best weights of the run"
        ) as caught:
            run(data, tmp_path, STOP)
    best = int(re.search(r"step-(\d+)", str(caught.value))[1])
    del caught  # frees the run's lock, which the traceback keeps alive
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{best}")
    assert run(data, tmp_path, STOP) == 0
    assert "best_step" not in events(tmp_path, "final")[0]


def test_settings_without_best_weights_are_refused():
    model = WdlConfig()

    def refused(match: str, stop: StopConfig | None, **keys: Any) -> None:
        every = keys.pop("eval_every", 100)
        with pytest.raises(ConfigError, match=match):
            Config(
                model=model,
                train=TrainConfig(stop=stop, eval_every=every),
                checkpoint=CheckpointConfig(**keys),
            )

    stop = StopConfig(metric="logloss")
    refused(
        r"^train\.stop: .*checkpoint\.every is 0.*example, checkpoint\.every: 1000", stop, every=0
    )
    refused(r"^checkpoint\.keep_best: .*checkpoint\.every is 0", None, keep_best=True, every=0)
    refused(r"^checkpoint\.keep_best needs .*eval_every is 0", None, keep_best=True, eval_every=0)
    refused(
        r"^checkpoint\.keep_best is auc, but train\.stop\.metric is logloss", stop, keep_best="auc"
    )
    both = Config(
        model=model, train=TrainConfig(stop=stop), checkpoint=CheckpointConfig(keep_best=True)
    )
    assert both.best_metric == "logloss"
    alone = Config(model=model, checkpoint=CheckpointConfig(keep_best="gauc"))
    assert alone.watched == {"checkpoint.keep_best": "gauc"}

"""Tests that the search with Optuna in examples/search.py runs, prunes, and continues."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.deadlines import run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("optuna") is None, reason="needs optuna"),
]


def search(folder: Path, trials: int, *, fails: bool = False) -> str:
    command = [sys.executable, str(ROOT / "examples/search.py"), "--config", "run.yaml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run([*command, "--trials", str(trials)], 240, cwd=folder, env=env)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


def test_a_search_runs_prunes_and_continues(synth_set, tmp_path):
    import optuna
    from optuna.trial import TrialState

    tree = {
        "data": {"path": str(synth_set), "batch_size": 500},
        "model": {"hidden": [8], "embedding_dim": 4, "dropout": 0.0},
        "train": {"eval_every": 2, "max_steps": 8},
        "parallel": {"device": "cpu", "scheme": 1, "kernel": "torch"},
        "checkpoint": {"dir": str(tmp_path / "checkpoints")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    assert "best: trial 0, AUC on val" in search(tmp_path, 1)
    folder = tmp_path / "runs" / "search"
    storage = f"sqlite:///{folder}/study.db"
    study = optuna.load_study(study_name="sbpflow", storage=storage)
    (first,) = study.trials
    lines = [json.loads(x) for x in (folder / "trial-0/metrics.jsonl").read_text().splitlines()]
    assert first.value == lines[-1]["val_auc"]
    assert first.intermediate_values == {
        line["step"]: line["auc"]
        for line in lines
        if line["event"] == "eval" and line["split"] == "val"
    }
    assert set(first.intermediate_values) >= {2, 4, 6, 8}

    # Add an unfinished trial, and three better trials, so that the next real trial is pruned.
    for _ in range(3):
        better = dict.fromkeys(first.intermediate_values, 0.99)
        study.add_trial(
            optuna.create_trial(
                value=0.99,
                params=first.params,
                distributions=first.distributions,
                intermediate_values=better,
            )
        )
    killed = study.ask(first.distributions)
    # so the trial can end only by being pruned
    tree["train"] |= {"max_steps": 100_000, "epochs": 100_000}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    output = search(tmp_path, 5)
    trials = optuna.load_study(study_name="sbpflow", storage=storage).trials
    assert trials[killed.number].state == TrialState.FAIL
    (again,) = trials[killed.number + 1 :]
    assert again.state == TrialState.PRUNED
    assert again.params == killed.params
    assert list(again.intermediate_values) == [2]
    pruned = (folder / f"trial-{again.number}/metrics.jsonl").read_text()
    assert '"final"' not in pruned
    assert "best: trial 1, AUC on val 0.9900" in output

    assert "best: trial 1" in search(tmp_path, 5)  # no trials are left to run
    assert len(optuna.load_study(study_name="sbpflow", storage=storage).trials) == len(trials)

    # A trial does not resume the pruned one, although the configuration sets checkpoint.dir.
    assert "best: trial 1" in search(tmp_path, 6)

    (tmp_path / "run.yaml").write_text("model: {name: nosuch}")
    assert "exit code 2; see" in search(tmp_path, 7, fails=True)

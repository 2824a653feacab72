"""Search hyperparameters with Optuna: python examples/search.py --config clicks.yaml --trials 20

Needs `pip install optuna`. Each trial is a run of `sbpflow train`. A trial is pruned if its AUC on
val is below the median of earlier trials at the same step. The study is saved in SQLite, so the
same command continues an interrupted search, and a larger --trials extends the search.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState


def overrides(trial: optuna.Trial) -> list[str]:
    """Return the ``key=value`` overrides of one trial. Edit this list for your model."""
    return [
        f"optimizer.sparse.lr={trial.suggest_float('sparse_lr', 1e-3, 0.3, log=True)}",
        f"optimizer.dense.lr={trial.suggest_float('dense_lr', 1e-4, 1e-2, log=True)}",
        f"model.dropout={trial.suggest_float('dropout', 0.0, 0.5)}",
    ]


def train(trial: optuna.Trial, *, config: Path, ranks: int, folder: Path) -> float:
    """Train one model and return its final AUC on val."""
    run = folder / f"trial-{trial.number}"
    run.mkdir()
    command = [sys.executable, "-m", "sbpflow", "train", "-n", str(ranks), "--config", str(config)]
    command += [*overrides(trial), f"run.dir={run}", f"checkpoint.dir={run / 'checkpoints'}"]
    command += ["checkpoint.keep=1"]
    scores: dict[int, float] = {}
    with (run / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for event in events(run / "metrics.jsonl", process):
            if event["event"] == "final":
                return event["val_auc"]
            if event["event"] == "eval" and event["split"] == "val" and event["step"] not in scores:
                scores[event["step"]] = event["auc"]
                trial.report(event["auc"], event["step"])
                if trial.should_prune():
                    raise optuna.TrialPruned
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
    raise RuntimeError(f"the run ended with exit code {process.returncode}; see {log.name}")


def events(file: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events in ``file`` as they are written, until ``process`` ends."""
    position, is_running = 0, True
    while is_running:
        is_running = process.poll() is None
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(position)
                for line in stream:
                    if not line.endswith(b"\n"):  # the line is incomplete
                        break
                    position += len(line)
                    yield json.loads(line)
        time.sleep(0.2)


def main() -> None:
    """Run trials until the study contains the requested number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=20, help="total number of trials")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes per run")
    parser.add_argument("--folder", type=Path, default=Path("runs/search"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="sbpflow",
        storage=f"sqlite:///{args.folder}/study.db",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # left by a killed search
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    ended = len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
    objective = partial(train, config=args.config, ranks=args.ranks, folder=args.folder)
    study.optimize(objective, n_trials=max(args.trials - ended, 0))
    best = study.best_trial
    print(f"best: trial {best.number}, AUC on val {best.value:.4f}, {best.params}")
    print(f"its run: {args.folder / f'trial-{best.number}'}")


if __name__ == "__main__":
    main()

"""Tests whether models learn interactions between pairs of columns in generated rows.

    python -m benchmarks.pair_effects [--models dlrm] [--seeds 1 2 3]

In these rows, 60 % of the logit's variance comes from dot products between hidden vectors of two
columns' values (data synth --products), which no sum over single columns can express. The program
trains DCN-V2, DeepFM, DLRM, and Wide & Deep (with a weight per value of every column and without
crosses) for one epoch. It reports the AUC of each seed, the mean, and the best possible AUC. The
vocabularies are small, so that most values occur often enough to be learned in one epoch.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.cpu_criteo import run
from benchmarks.criteo_models import train
from benchmarks.record import Results

COLUMNS = ",".join(f"C{n + 1}" for n in range(26))
WORDS = {
    "wdl": ("model.wide.crosses=[]", f"model.wide.columns=[{COLUMNS}]", "model.dropout=0"),
    "dlrm": (),
    "deepfm": ("model.dropout=0",),
    "dcnv2": ("model.dropout=0",),
}
SPARSE = "optimizer.sparse={name: lazy_adam, lr: 3.0e-3}"
SYNTH = ("--rows", "400000", "--products", "0.6", "--vocab-scale", "0.0003")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help=f"a set made by data synth {' '.join(SYNTH)}")
    parser.add_argument("--models", nargs="+", default=tuple(WORDS), choices=tuple(WORDS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data, folder = args.data or Path(scratch) / "data", Path(scratch) / "run"
        if args.data is None:
            run("-m", "data", "synth", *SYNTH, "--output", str(data))
        best = json.loads((data / "manifest.json").read_text())["bayes"]["test"]
        for model in args.models:
            results = Results("pair_effects", f"pairs_{model}")
            scores: list[float] = []
            for seed in args.seeds:
                words = (f"run.seed={seed}", SPARSE, *WORDS[model])
                final = train(model, args.ranks, data, folder, *words)
                scores.append(final["auc"])
                results.add(seed=seed, auc=final["auc"], logloss=final["logloss"])
            results.add(
                mean_auc=round(statistics.mean(scores), 5),
                spread=round(max(scores) - min(scores), 5),
                best_possible={key: best[key] for key in ("auc", "logloss")},
            )


if __name__ == "__main__":
    main()

"""Generated rows whose logit has products of pairs: do models that pair fields find them?

    python -m benchmarks.pair_effects [--rows 400000] [--seeds 1 2 3]

60 % of the logit's variance are products of vectors of two columns' values (data synth --products),
which no sum over single columns can give. One epoch of DCN-V2, DeepFM, DLRM and Wide & Deep, all
without crosses of the data, of the same width; each seed, the means, and the best possible.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.cpu_criteo import run
from benchmarks.criteo_models import train
from benchmarks.record import Results

WORDS = {
    "wdl": ("model.wide.crosses=[]", "model.wide.columns=[{columns}]", "model.dropout=0"),
    "dlrm": (),
    "deepfm": ("model.dropout=0",),
    "dcnv2": ("model.dropout=0",),
}
ROWS = 400_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--products", type=float, default=0.6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    results = Results("pair_effects", recorded=args.rows == ROWS)
    columns = ",".join(f"C{n + 1}" for n in range(26))
    with tempfile.TemporaryDirectory() as scratch:
        data, folder = Path(scratch) / "data", Path(scratch) / "run"
        words = ("--rows", str(args.rows), "--products", str(args.products))
        run("-m", "data", "synth", *words, "--vocab-scale", "0.01", "--output", str(data))
        best = json.loads((data / "manifest.json").read_text())["bayes"]
        found: dict[str, list[float]] = {}
        for model, more in WORDS.items():
            chosen = [word.format(columns=columns) for word in more]
            for seed in args.seeds:
                final = train(model, args.ranks, data, folder, f"run.seed={seed}", *chosen)
                found.setdefault(model, []).append(final["auc"])
                line = {key: final[key] for key in ("auc", "logloss")}
                results.add(benchmark="pair_effects", model=model, seed=seed, **line)
    means = {model: round(statistics.mean(values), 5) for model, values in found.items()}
    spread = {model: round(max(v) - min(v), 5) for model, v in found.items()}
    results.add(
        benchmark="pair_effects_means",
        rows=args.rows,
        products=args.products,
        best_possible=best,
        means=means,
        spread=spread,
        beyond_wdl={model: round(mean - means["wdl"], 5) for model, mean in means.items()},
    )


if __name__ == "__main__":
    main()

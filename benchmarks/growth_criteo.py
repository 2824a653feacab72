"""Compares growing tables with vocabularies that are fitted to all training rows, on Criteo rows.

    python -m benchmarks.growth_criteo --input train.txt.gz [--seeds 16]

Without --input, the program uses the file in SBPFLOW_CRITEO_ROWS, or reports that the benchmark is
skipped. All runs train one epoch in file order on one rank, with ``configs/demo.yaml``, and share
rows and seeds. A growing table gives a key a row at its third occurrence. The vocabularies contain
the values with at least three, or at least two, occurrences in train. The result is the difference
of test AUC, with a 95% interval (Student's t) over the seeds.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.cpu_criteo import parse_with_rows, run
from benchmarks.planner_worker import half_interval
from benchmarks.record import Results
from sbpflow.data import load_manifest

ADMIT_COUNT = 3
FITTED = (3, 2)  # values of --min-count
GROWING = {"*": {"vocabulary": "dynamic", "admit_count": ADMIT_COUNT, "evict": {"max_rows": 2**19}}}


def test_auc(data: Path, folder: Path, seed: int, *words: str) -> float:
    """Train one epoch, and return the AUC on the test split."""
    words = (f"data.path={data}", f"run.dir={folder}", f"run.seed={seed}", *words)
    shared = ("data.shuffle=none", "train.epochs=1", "train.eval_every=0", "parallel.device=cpu")
    run("-m", "sbpflow", "train", "--config", "configs/demo.yaml", *shared, *words)
    return float(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["auc"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16)
    args = parse_with_rows(parser)
    if args is None:
        return
    results = Results("growth_criteo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def prepare(output: str, *words: str) -> Path:
            run("-m", "sbpflow", "prepare", "--input", args.input, "--output", output, *words)
            return Path(output)

        keyed = prepare(f"{folder}/keys", "--keys")
        fitted = {n: prepare(f"{folder}/fitted-{n}", "--min-count", str(n)) for n in FITTED}
        seeds, growing = range(1, args.seeds + 1), f"model.fields={json.dumps(GROWING)}"
        grown = [test_auc(keyed, folder / "run", seed, growing) for seed in seeds]
        for min_count, data in fitted.items():
            offline = [test_auc(data, folder / "run", seed) for seed in seeds]
            differences = [a - b for a, b in zip(grown, offline, strict=True)]
            results.add(
                case=f"one epoch in file order, configs/demo.yaml, admit_count {ADMIT_COUNT}",
                rows=sum(load_manifest(data).splits.values()),
                min_count=min_count,
                growing_auc=round(statistics.mean(grown), 6),
                fitted_auc=round(statistics.mean(offline), 6),
                difference=round(statistics.mean(differences), 6),
                plus_minus=round(half_interval(differences), 6),
                differences=[round(value, 6) for value in differences],
            )


if __name__ == "__main__":
    main()

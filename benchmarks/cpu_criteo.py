"""Trains on real Criteo rows; compares the test AUC with plain PyTorch, and losses between layouts.

    python -m benchmarks.cpu_criteo --input train.txt.gz [--ranks 2] [--seeds 1 2 3]

Without --input, the program uses the file in SBPFLOW_CRITEO_ROWS, or reports that the benchmark is
skipped. It prepares the rows (split by time 80/10/10, with vocabularies from train), and then makes
two comparisons.

* ``auc`` trains one epoch per seed with each sparse optimizer (lazy_adam 1e-3 and rowwise_adagrad
  0.05), both with sbpflow and with benchmarks/plain_wdl.py, which shares no model or engine code.
* ``drift`` compares the losses of dp and of schemes 1, 2, and 3 on --ranks ranks with the losses of
  one process, without dropout.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import Results

SCHEMES = ("dp", "scheme1", "scheme2", "scheme3")
SPARSE = {"lazy_adam": 1e-3, "rowwise_adagrad": 0.05}
Event = dict[str, float]


def run(*words: str) -> str:
    """Run a command from this checkout and return its output; exit the program if it fails."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def train(config: str, ranks: int, folder: Path, *words: str) -> list[Event]:
    """Run train_wdl.py once and return the run's events."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    run(*launch, "train_wdl.py", "--config", f"configs/{config}.yaml", f"run.dir={folder}", *words)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compare_auc(data: Path, folder: Path, ranks: int, seeds: list[int], results: Results) -> None:
    for sparse, lr in SPARSE.items():
        figures: dict[str, list[float]] = {"sbpflow": [], "plain torch": []}
        for seed in seeds:
            start = time.perf_counter()
            *_, final = train(
                "scheme1",
                ranks,
                folder,
                f"data.path={data}",
                "data.shuffle=rows",
                f"run.seed={seed}",
                f"optimizer.sparse={{name: {sparse}, lr: {lr}}}",
            )
            seconds = round(time.perf_counter() - start, 1)
            figures["sbpflow"].append(final["auc"])
            line = {key: final[key] for key in ("val_auc", "auc", "logloss", "samples_per_s")}
            results.add(
                benchmark="criteo_auc",
                model="sbpflow",
                sparse=sparse,
                seed=seed,
                world_size=ranks,
                run_s=seconds,
                **line,
            )
        words = ("--data", str(data), "--sparse", sparse, "--seeds", *map(str, seeds))
        for text in run("-m", "benchmarks.plain_wdl", *words).splitlines():
            event = json.loads(text)
            figures["plain torch"].append(event["test_auc"])
            results.add(benchmark="criteo_auc", world_size=1, **event)
        means = {name: statistics.mean(values) for name, values in figures.items()}
        results.add(
            benchmark="criteo_auc_means",
            sparse=sparse,
            means=means,
            difference=means["sbpflow"] - means["plain torch"],
        )


def compare_losses(data: Path, folder: Path, ranks: int, results: Results) -> None:
    words = (
        f"data.path={data}",
        "model.dropout=0",
        "train.max_steps=86",
        "train.log_every=1",
        "train.eval_every=0",
    )
    for dense in ("{name: sgd, lr: 0.1}", "{name: adam, lr: 1.0e-3}"):
        both = (*words, f"optimizer.dense={dense}")
        alone = _losses(train("dp", 1, folder, *both))
        for scheme in SCHEMES:
            losses = _losses(train(scheme, ranks, folder, *both))
            apart = [abs(a - b) / b for a, b in zip(losses, alone, strict=True)]
            results.add(
                benchmark="float32_drift",
                scheme=scheme,
                world_size=ranks,
                dense=dense,
                first_10_steps=max(apart[:10]),
                all_steps=max(apart),
                steps=len(apart),
            )


def _losses(events: list[Event]) -> list[float]:
    return [event["loss"] for event in events if event["event"] == "step"]


def parse_with_rows(parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """Add --input and parse the arguments; return None, with a message, if no rows are given."""
    parser.add_argument("--input", default=os.environ.get("SBPFLOW_CRITEO_ROWS"))
    args = parser.parse_args()
    if args.input:
        return args
    print("skipped: no real rows; use --input or set SBPFLOW_CRITEO_ROWS")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parse_with_rows(parser)
    if args is None:
        return
    results = Results("cpu_criteo")
    with tempfile.TemporaryDirectory() as scratch:
        data, folder = Path(scratch) / "criteo", Path(scratch) / "run"
        run("-m", "data", "prepare", "--input", args.input, "--output", str(data))
        compare_auc(data, folder, args.ranks, args.seeds, results)
        compare_losses(data, folder, args.ranks, results)


if __name__ == "__main__":
    main()

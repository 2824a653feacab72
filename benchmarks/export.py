"""Measures exports of a trained model: sizes, times, and the loss of AUC with fewer bits per row.

    python -m benchmarks.export --input train.txt.gz [--epochs 1]

Without --input, the program uses the file in SBPFLOW_CRITEO_ROWS or generates rows. The program
prepares the rows, trains Wide & Deep on one rank, exports the model in every row format, and
predicts the test split.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cpu_criteo import run
from benchmarks.record import Results

ROWS = ("as_trained", "float16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", default=os.environ.get("SBPFLOW_CRITEO_ROWS"))
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    results = Results("export")
    with tempfile.TemporaryDirectory() as scratch:
        data, folder = Path(scratch) / "set", Path(scratch) / "run"
        if args.input:
            run("-m", "data", "prepare", "--input", args.input, "--output", str(data))
        else:
            run("-m", "data", "synth", "--rows", "100000", "--vocab-scale", "0.01",
                "--output", str(data))  # fmt: skip
        run(
            *("train_wdl.py", "--config", "configs/scheme1.yaml", f"data.path={data}"),
            *(f"run.dir={folder}", "data.batch_size=1024", "model.hidden=[400, 400]"),
            *("data.shuffle=rows", f"train.epochs={args.epochs}", "train.eval_every=0"),
        )
        where = "genuine" if args.input else "generated"
        for rows in ROWS:
            results.add(benchmark="export", data=where, rows=rows, **export(folder, rows))
        start = time.perf_counter()
        output = Path(scratch) / "scores.parquet"
        run("-m", "sbpflow", "predict", "--checkpoint", str(folder), "--input", str(data),
            "--output", str(output))  # fmt: skip
        results.add(
            benchmark="predict",
            data=where,
            run_s=round(time.perf_counter() - start, 1),
            file_bytes=output.stat().st_size,
        )


def export(folder: Path, rows: str) -> dict[str, float]:
    """Return the measurements of one export."""
    output = folder / rows
    start = time.perf_counter()
    run("-m", "sbpflow", "export", "--checkpoint", str(folder), "--output", str(output),
        "--rows", rows)  # fmt: skip
    seconds = time.perf_counter() - start
    scores = json.loads((output / "model.json").read_text())["scores"]
    return {
        "run_s": round(seconds, 1),
        "safetensors_bytes": (output / "model.safetensors").stat().st_size,
        "auc": scores[rows]["auc"],
        "logloss": scores[rows]["logloss"],
        "auc_cost": scores["as_trained"]["auc"] - scores[rows]["auc"],
    }


if __name__ == "__main__":
    sys.exit(main())

"""Compares a growing table with a low row limit with a practically unlimited one on drifting rows.

    python -m benchmarks.growth_drift FOLDER              51 million rows, more than an hour
    python -m benchmarks.growth_drift FOLDER --rows 2000000

``FOLDER`` receives the generated set (270 bytes per row) and both runs, which train at the same
time, one rank each. In columns with many values, half of the values are replaced every million
rows; replaced values never return. Both runs admit a key at its second occurrence. One may use
131,072 rows per field, so it evicts least recently used keys; the other may use 2 million rows per
field and 8 million rows in the four largest fields, so it evicts hardly any. The last 2% of the
rows are the test split.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.proc import status_bytes
from benchmarks.record import Results

ROOT = Path(__file__).parents[1]
ROWS, DRIFT, BATCH, LIMIT = 51_000_000, 0.5, 128, 2**17
LARGEST = ("C3", "C12", "C16", "C21")
SAMPLE_EVERY_S = 5.0


def fields(*, limited: bool) -> str:
    """Return the value of ``model.fields``."""

    def rule(max_rows: int) -> dict[str, Any]:
        evict = {"max_rows": max_rows}
        return {
            "vocabulary": "dynamic",
            "admit_count": 2,
            "forget_after_samples": 500_000,
            "evict": evict,
        }

    if limited:
        return json.dumps({"*": rule(LIMIT)})
    return json.dumps({"*": rule(2**21), **{name: rule(2**23) for name in LARGEST}})


def start(folder: Path, *, limited: bool) -> subprocess.Popen[bytes]:
    """Start a run in ``folder``."""
    words = (
        *(f"data.path={folder.parent / 'set'}", f"run.dir={folder}", "data.shuffle=none"),
        *(f"data.batch_size={BATCH}", "model.hidden=[256, 128]", "parallel.device=cpu"),
        *("optimizer.sparse={name: rowwise_adagrad, lr: 0.05}", "train.log_every=1000"),
        f"model.fields={fields(limited=limited)}",
    )
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "sbpflow", "train", "--config", "configs/scheme2.yaml", *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )


def watch(runs: dict[str, subprocess.Popen[bytes]]) -> dict[str, list[float]]:
    """Wait for the runs; return the samples of their memory in MiB."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    while any(process.poll() is None for process in runs.values()):
        for name, process in runs.items():
            if process.poll() is None:
                samples[name].append(status_bytes("RssAnon", process.pid) / 2**20)
        time.sleep(SAMPLE_EVERY_S)
    failed = [name for name, process in runs.items() if process.returncode]
    if failed:
        raise RuntimeError(f"these runs failed; see their logs: {', '.join(failed)}")
    return samples


def summarize(folder: Path, memory: list[float]) -> dict[str, object]:
    """Return the results of a finished run."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "step"][-1]
    final = events[-1]
    count = len(memory)

    def total(what: str) -> int:
        names = (name for name in last if name.startswith("growth.") and name.endswith(what))
        return int(sum(last[name] for name in names))

    return {
        "steps": final["steps"],
        "training_s": round(final["steps"] * BATCH / final["samples_per_s"]),
        "auc": round(final["auc"], 6),
        "best_auc": round(final["best_auc"], 6),
        "logloss": round(final["logloss"], 6),
        "live": total(".live"),
        "evicted": total(".evicted"),
        "memory_mb_at_tenths": [round(memory[count * n // 10 - 1]) for n in range(1, 11)],
    }


def main() -> None:
    """Generate the rows, train both runs, and record the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.growth_drift", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int)
    arguments = parser.parse_args()
    rows, folder = arguments.rows or ROWS, arguments.folder.resolve()
    results = Results("growth_drift", recorded=arguments.rows is None)
    words = (
        *("--rows", str(rows), "--output", str(folder / "set"), "--keys", "--drift", str(DRIFT)),
        *("--vocab-scale", "0.02", "--split", "time:0.98,0,0.02"),
    )
    subprocess.run([sys.executable, "-m", "sbpflow", "synth", *words], check=True, cwd=ROOT)
    runs = {
        "limited": start(folder / "limited", limited=True),
        "unlimited": start(folder / "unlimited", limited=False),
    }
    memory = watch(runs)
    for name in runs:
        results.add(rows=rows, drift=DRIFT, run=name, **summarize(folder / name, memory[name]))


if __name__ == "__main__":
    main()

"""Scores many rows on two ranks, without interruption and with kills, and compares the score files.

    python -m benchmarks.predict build --folder F [--rows 20000000]
    python -m benchmarks.predict whole --folder F
    python -m benchmarks.predict killed --folder F [--kills 2]
    python -m benchmarks.predict row --folder F

``build`` generates a set, ``F/set``, with ``--rows`` test rows, and trains Wide & Deep on other
rows (the run ``F/run``). ``whole`` scores the test rows into ``F/whole`` and records the rows per
CPU second and the memory of the ranks. ``killed`` does the same with SIGKILLs of all ranks after
some finished blocks, and compares its files with those of ``whole``. ``row`` records the CPU time
of ``sbpflow predict`` for one raw row, and that of a Python process that only imports torch.
"""

import argparse
import filecmp
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu_criteo import run
from benchmarks.record import Results
from benchmarks.serving_tools import ROOT, memory_mb

RANKS = 2
ROWS = 20_000_000
BATCH_ROWS = 8192
REPEATS = 9


def build(folder: Path, rows: int) -> None:
    """Create ``folder/set``, whose test split has about ``rows`` rows, and ``folder/run``."""
    folder.mkdir(parents=True)
    total = rows * 100 // 96
    run("-m", "sbpflow", "synth", "--rows", str(total), "--vocab-scale", "0.1",
        "--split", "time:0.02,0.02,0.96", "--output", str(folder / "set"))  # fmt: skip
    run("train_wdl.py", "--config", "configs/demo.yaml", f"data.path={folder / 'set'}",
        f"run.dir={folder / 'run'}", "train.max_steps=50", "train.eval_every=0")  # fmt: skip


class Prediction:
    """A running ``sbpflow predict``, and the memory of its ranks over time."""

    def __init__(self, folder: Path, output: Path, block_rows: int) -> None:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        words = [
            "-m", "sbpflow", "predict", "--checkpoint", folder / "run", "--input", folder / "set",
            "--output", output, "--block-rows", block_rows, f"data.batch_size={BATCH_ROWS}",
        ]  # fmt: skip
        self.output, self.memory = output, list[float]()
        self._process = subprocess.Popen(
            [sys.executable, *launch, *map(str, words)], cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def wait(self, num_files: int | None = None) -> None:
        """Wait for the end, or until the output has ``num_files`` blocks, and then kill all
        processes.
        """
        while self._process.poll() is None:
            self._measure()
            if num_files is not None and self.num_files() >= num_files:
                for pid in (self._process.pid, *self._ranks()):
                    os.kill(pid, signal.SIGKILL)
                self._process.wait()
                return
            time.sleep(0.2)
        if self._process.returncode or num_files is not None:
            sys.exit(f"predict ended with exit code {self._process.returncode}")

    def _ranks(self) -> list[int]:
        pid = self._process.pid
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def num_files(self) -> int:
        return len(list(self.output.glob("part-*.parquet")))

    def _measure(self) -> None:
        """Record the anonymous memory of all ranks once the first block has been written."""
        ranks = self._ranks()
        if len(ranks) == RANKS and self.num_files():
            try:
                self.memory.append(sum(memory_mb(rank)["anonymous_mb"] for rank in ranks))
            except OSError:  # a rank has just ended
                return


def score(folder: Path, output: Path, block_rows: int, kills: int) -> dict[str, object]:
    """Score the rows, killing all ranks ``kills`` times; return the measurements."""
    shutil.rmtree(output, ignore_errors=True)
    manifest = json.loads((folder / "set" / "manifest.json").read_text())
    num_rows = sum(shard["rows"] for shard in manifest["splits"]["test"])
    num_files, begin = -(-num_rows // block_rows), time.time()
    for number in range(1, kills + 1):
        Prediction(folder, output, block_rows).wait(num_files * number // (kills + 1))
    last = Prediction(folder, output, block_rows)
    last.wait()
    half = len(last.memory) // 2
    found: dict[str, object] = {
        "rows": num_rows, "ranks": RANKS, "batch_rows": BATCH_ROWS, "files": num_files,
        "wall_s": round(time.time() - begin, 1),
        "anonymous_mb_highest_of_first_half": round(max(last.memory[:half]), 1),
        "anonymous_mb_highest_of_second_half": round(max(last.memory[half:]), 1),
    }  # fmt: skip
    if kills:  # the CPU time of killed ranks is not known
        return {**found, "kills": kills}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    return {**found, "cpu_s": round(cpu, 1), "rows_per_cpu_s": round(num_rows / cpu)}


def cpu_s_of(words: Sequence[str]) -> float:
    """Return the CPU time of a Python process, which must succeed."""
    # Python must be able to save compiled modules, as it does for users.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=ROOT, env=env, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(getattr(after, key) - getattr(before, key) for key in ("ru_utime", "ru_stime"))


def measure_row(folder: Path) -> None:
    """Record the CPU time of scoring one raw row, alternating with the import of torch."""
    rows, row, data, trained = (folder / name for name in ("text.tsv", "row.tsv", "text", "small"))
    folder.mkdir(parents=True, exist_ok=True)
    run("-m", "sbpflow", "synth", "--rows", "20000", "--vocab-scale", "0.1", "--format", "tsv",
        "--output", str(rows))  # fmt: skip
    run("-m", "sbpflow", "prepare", "--input", str(rows), "--output", str(data))
    run("train_wdl.py", "--config", "configs/demo.yaml", f"data.path={data}", f"run.dir={trained}")
    row.write_text(rows.read_text().splitlines()[-1] + "\n")
    words = ["-m", "sbpflow", "predict", "--checkpoint", trained, "--input", row,
             "--output", folder / "row.csv", "--overwrite"]  # fmt: skip
    predict, torch = [*map(str, words)], ["-c", "import torch"]
    cpu_s_of(predict)  # the first process saves compiled modules
    pairs = [(cpu_s_of(predict), cpu_s_of(torch)) for _ in range(REPEATS)]
    times = {"predict_cpu_s": [a for a, _ in pairs], "import_torch_cpu_s": [b for _, b in pairs]}
    Results("predict_row").add(
        **{name: round(statistics.median(values), 2) for name, values in times.items()},
        **{f"{name}_range": [round(f(v), 2) for f in (min, max)] for name, v in times.items()},
    )


def different_files(one: Path, other: Path) -> list[str]:
    """Return the names of files that are missing or differ."""
    names = {path.name for folder in (one, other) for path in folder.glob("part-*")}
    _, different, missing = filecmp.cmpfiles(one, other, sorted(names), shallow=False)
    return different + missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("build", "whole", "killed", "row"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--block-rows", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=2)
    args = parser.parse_args()
    folder = args.folder
    if args.what == "build":
        build(folder, args.rows)
        return
    if args.what == "row":
        measure_row(folder)
        return
    kills = args.kills if args.what == "killed" else 0
    found = score(folder, folder / args.what, args.block_rows, kills)
    if kills:
        found["different_files"] = len(different_files(folder / "whole", folder / "killed"))
    Results("predict", args.what).add(**found)
    assert not found.get("different_files"), "the scores differ from those of the uninterrupted run"


if __name__ == "__main__":
    sys.exit(main())

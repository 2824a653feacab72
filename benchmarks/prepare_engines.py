"""Measures CPU time and memory of ``prepare`` on every engine:
``python -m benchmarks.prepare_engines``.

Needs the extras ray and dask. Every round runs every engine with two workers on a small and on a
large input. The small input takes little CPU time beyond that of starting the engine, whose
processes import their packages. The additional CPU time for the large input therefore excludes the
start, and is compared with that of the threads engine. The CPU times and the anonymous memory of
all processes are read from /proc and added up, because the command does not wait for Ray's daemons.
Results go to benchmarks/results/prepare_engines.jsonl.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.proc import status_bytes
from benchmarks.record import Results
from sbpflow.data import load_manifest
from sbpflow.data.engine_backends import ENGINES
from sbpflow.data.synth.generate import synth
from sbpflow.data.synth.options import SynthOptions

FILES = 4
SMALL_ROWS = 2_000
WORKERS = 2
_POLL_S = 0.02


def write_inputs(scratch: Path, rows: int) -> tuple[Path, Path]:
    """Write ``FILES`` files of Criteo text as the large input, and the first lines of each file as
    the small input.
    """
    small, large = scratch / "small", scratch / "large"
    if not large.exists():
        synth(SynthOptions(rows=rows, output=scratch / "all.tsv", format="tsv"))
        small.mkdir()
        large.mkdir()
        with (scratch / "all.tsv").open("rb") as source:
            for number in range(FILES):
                name = f"day_{number}.tsv"
                with (small / name).open("wb") as few, (large / name).open("wb") as all_lines:
                    for row in range(rows // FILES):
                        line = source.readline()
                        all_lines.write(line)
                        if row < SMALL_ROWS:
                            few.write(line)
        (scratch / "all.tsv").unlink()
    return small, large


class Cost(NamedTuple):
    """The CPU time of a process and all its descendants, and the peak of their total anonymous
    memory.
    """

    cpu_s: float
    memory_gb: float


def cost_of(command: list[str]) -> Cost:
    """Run a command; return its cost."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    family, seconds, memory = {process.pid}, dict[int, float](), 0
    while process.poll() is None:
        processes = _processes()
        while born := {p for p, (parent, _) in processes.items() if parent in family} - family:
            family |= born
        seconds |= {p: cpu for p, (_, cpu) in processes.items() if p in family}
        memory = max(memory, sum(status_bytes("RssAnon", p) for p in processes.keys() & family))
        time.sleep(_POLL_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(sum(seconds.values()), memory / 1e9)


def _processes() -> dict[int, tuple[int, float]]:
    """Return the parent and the CPU seconds of every process on this machine."""
    processes: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        ticks = int(words[11]) + int(words[12])
        processes[int(path.parent.name)] = int(words[1]), ticks / os.sysconf("SC_CLK_TCK")
    return processes


def main() -> None:
    """Measure every engine in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, help="folder that is kept between runs")
    parser.add_argument("--rows", type=int, default=1_300_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        inputs = write_inputs(scratch, args.rows)
        costs: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in ENGINES}
        contents: set[str] = set()
        for _ in range(args.rounds):
            for engine in ENGINES:
                small, large = (_prepare(source, scratch / "set", engine) for source in inputs)
                costs[engine].append((small, large))
                contents.add(load_manifest(scratch / "set").fingerprint)
        assert len(contents) == 1, "the engines produced different sets"
        _record(costs, sum(path.stat().st_size for path in inputs[1].iterdir()) / 1e6)


def _prepare(source: Path, output: Path, engine: str) -> Cost:
    if output.exists():
        shutil.rmtree(output)
    arguments = ["--input", str(source), "--output", str(output), "--engine", engine]
    command = [sys.executable, "-m", "data", "prepare", *arguments, "--workers", str(WORKERS)]
    return cost_of(command)


def _record(costs: dict[str, list[tuple[Cost, Cost]]], megabytes: float) -> None:
    results = Results("prepare_engines")
    work = {name: [large.cpu_s - small.cpu_s for small, large in pairs]
            for name, pairs in costs.items()}  # fmt: skip
    for name, pairs in costs.items():
        ratios = [own / threads for own, threads in zip(work[name], work["threads"], strict=True)]
        results.add(
            engine=name,
            workers=WORKERS,
            megabytes=megabytes,
            small_input_cpu_s=statistics.median(small.cpu_s for small, _ in pairs),
            large_input_cpu_s=statistics.median(large.cpu_s for _, large in pairs),
            work_over_threads=statistics.median(ratios),
            least_work_over_threads=min(ratios),
            most_work_over_threads=max(ratios),
            small_input_memory_gb=statistics.median(small.memory_gb for small, _ in pairs),
            large_input_memory_gb=statistics.median(large.memory_gb for _, large in pairs),
            load=round(os.getloadavg()[0], 1),
        )


if __name__ == "__main__":
    main()

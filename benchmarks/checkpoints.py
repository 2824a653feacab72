"""Measures the cost of checkpoints: bandwidth compared with dd, and the effect of a save on
training.

    python -m benchmarks.checkpoints             tables and state of 4 GB, one rank
    python -m benchmarks.checkpoints --gb 0.5 during

Writing and reading alternate with dd for the same number of bytes on the same disk. Both programs
sync their writes, and files are dropped from the page cache before they are read. Models of a
quarter and of half the size are also measured; a line through the three times predicts the time for
40 GB.

Three effects on training are measured, each as a median over several saves: the time that steps
lose during a save, as a share of the save's duration; the time that the training thread spends on
the undo log; and the additional memory, both as counted by the save and as reported by the system
(peak resident size).
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.proc import reset_peak, status_bytes
from benchmarks.record import Results
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.config.schema import Config, DataConfig, OptimizerConfig
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import Job, start_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.saved.save import Saver
from sbpflow.runtime.ranks.world import World

TABLES, DIM, BATCH = 8, 16, 2048
ROW_BYTES = 3 * DIM * 4  # lazy Adam stores two more numbers per parameter


class Rows:
    """A batch of random ids, some of which are frequent."""

    def __init__(self, rows: int, generator: torch.Generator) -> None:
        ids = torch.rand(BATCH, TABLES, generator=generator) ** 3 * rows
        self.ids = ids.to(torch.int32)
        self.dense = torch.randn(BATCH, 1, generator=generator)
        self.labels = (torch.rand(BATCH, generator=generator) < 0.3).float()
        self.batch_size = BATCH


def make_job(world: World, rows: int) -> Job:
    """Create a job with tables of ``rows`` rows."""
    config = Config(
        data=DataConfig(batch_size=BATCH),
        model=WdlConfig(embedding_dim=DIM, hidden=(256, 128), wide=WideConfig(crosses=())),
        parallel=ParallelConfig(device="cpu", scheme="3", kernel="auto"),
        optimizer=OptimizerConfig(sparse=LazyAdam()),
    )
    fields = Fields.of(("I1",), {f"C{n}": rows for n in range(TABLES)}, {})
    return start_job(config, fields, Boxing(world))


def dd(source: str, target: str, num_bytes: int, *words: str) -> float:
    """Return the seconds that dd takes."""
    count = [f"if={source}", f"of={target}", "bs=8M", f"count={num_bytes // 2**23}", *words]
    start = time.perf_counter()
    subprocess.run(["dd", *count], check=True, capture_output=True)
    return time.perf_counter() - start


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def bandwidth(job: Job, folder: Path, repeats: int) -> dict[str, float]:
    """Measure the GB/s of saving, loading, and dd in alternating runs; ratios compare consecutive
    runs.
    """
    saver = Saver(folder, job.boxing, job.state, run="cost", deadline_s=600)
    times: dict[str, list[float]] = {"save": [], "dd_write": [], "load": [], "dd_read": []}
    plain = folder / "plain"
    size = saved_bytes(saver, 1)

    def save(step: int) -> None:
        start = time.perf_counter()
        saver.save(step, {})
        times["save"].append(time.perf_counter() - start)

    def load(step: int) -> None:
        path = folder / f"step-{step}"
        forget(path / "rank-0.bin")
        start = time.perf_counter()
        job.restore(open_checkpoint(path))
        times["load"].append(time.perf_counter() - start)

    def write_plain(step: int) -> None:
        times["dd_write"].append(dd("/dev/zero", str(plain), size, "conv=fsync"))

    def read_plain(step: int) -> None:
        forget(plain)
        times["dd_read"].append(dd(str(plain), "/dev/null", size))

    for step in range(2, repeats + 2):
        for pair in ((save, write_plain), (load, read_plain)):
            for measure in pair if step % 2 else reversed(pair):
                measure(step)
        shutil.rmtree(folder / f"step-{step}")
        plain.unlink()
    shares = {
        f"{ours}_of_dd": statistics.median(
            b / a for a, b in zip(times[ours], times[theirs], strict=True)
        )
        for ours, theirs in (("save", "dd_write"), ("load", "dd_read"))
    }
    seconds = {f"{name}_s": statistics.median(some) for name, some in times.items()}
    return {"bytes": size, **seconds, **shares, "repeats": repeats}


def saved_bytes(saver: Saver, step: int) -> int:
    """Save and delete a checkpoint; return its size. The first save also decides which rank writes
    which piece.
    """
    path = saver.save(step, {})
    size = open_checkpoint(path).num_bytes
    shutil.rmtree(path)
    return size


def extrapolated(measured: list[dict[str, float]], gb: float) -> dict[str, float]:
    """Predict the seconds for a model of ``gb`` GB from a line through the measured sizes."""
    sizes = [run["bytes"] / 1e9 for run in measured]
    values: dict[str, float] = {"gb": gb}
    for name in ("save", "dd_write", "load", "dd_read"):
        slope, start = statistics.linear_regression(sizes, [run[f"{name}_s"] for run in measured])
        values |= {f"{name}_s_per_gb": slope, f"{name}_s": start + slope * gb}
    return values


class During:
    """Measures saves during training. Each save is compared with the steps before and after it,
    because speed drifts.
    """

    def __init__(self, job: Job, rows: int, folder: Path) -> None:
        self._job, self._rows, self._folder = job, rows, folder
        self._generator = torch.Generator().manual_seed(1)
        self._saver = Saver(
            folder,
            job.boxing,
            job.state,
            run="cost",
            deadline_s=600,
            stores=job.embeddings.stores,
        )
        self._steps(20)
        self._alone = self._steps(60)

    def _step(self) -> float:
        batch = Rows(self._rows, self._generator)
        start = time.perf_counter()
        self._job.trainer.step(batch)
        return time.perf_counter() - start

    def _steps(self, count: int) -> list[float]:
        return [self._step() for _ in range(count)]

    def save(self) -> dict[str, float]:
        """Measure the stall and the memory of one save."""
        saver, done = self._saver, list[float]()
        reset_peak()
        resident = status_bytes("VmRSS")
        begin = time.perf_counter()
        saver.start(1000, {}, lambda: done.append(time.perf_counter()))
        started_s = time.perf_counter() - begin
        meanwhile: list[float] = []
        while not done:
            meanwhile.append(self._step())
            saver.check()
        saver.wait()
        cost = saver.last_cost
        if cost is None:
            raise RuntimeError("the save during training did not record its cost")
        most_resident = status_bytes("VmHWM")
        before, self._alone = self._alone, self._steps(60)
        alone = before + self._alone
        duration = done[0] - begin
        lost = started_s + sum(meanwhile) - statistics.fmean(alone) * len(meanwhile)
        size = open_checkpoint(self._folder / "step-1000").num_bytes
        shutil.rmtree(self._folder / "step-1000")
        return {
            "bytes": size,
            "save_s": duration,
            "steps_meanwhile": len(meanwhile),
            "step_ms": 1e3 * statistics.median(alone),
            "step_meanwhile_ms": 1e3 * statistics.median(meanwhile),
            "start_s": started_s,
            "lost_s": lost,
            "lost_of_save": lost / duration,
            "logging_of_save": cost.logging_s / duration,
            "undo_log_of_bytes": cost.log_bytes / size,
            "extra_memory_of_bytes": cost.extra_bytes / size,
            "more_resident_of_bytes": (most_resident - resident) / size,
            "spilled_of_bytes": cost.spilled_bytes / size,
        }


def during(job: Job, rows: int, folder: Path, repeats: int) -> dict[str, object]:
    """Return medians over several saves, and the stall of each save."""
    runs = During(job, rows, folder)
    saves = [runs.save() for _ in range(repeats)]
    middle = {key: statistics.median(save[key] for save in saves) for key in saves[0]}
    each = [round(save["lost_of_save"], 4) for save in saves]
    return {**middle, "lost_of_each_save": each, "threads": torch.get_num_threads()}


def main() -> None:
    """Run the benchmarks of this module."""
    parser = argparse.ArgumentParser(description="Measure the cost of a checkpoint.")
    parser.add_argument("questions", nargs="*", metavar="waiting|during", help="default both")
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="the folder on the disk to measure")
    args = parser.parse_args()
    if other := set(args.questions) - {"waiting", "during"}:
        parser.error(f"{', '.join(sorted(other))}: use waiting or during")
    for question in args.questions or ("waiting", "during"):
        results = Results("checkpoints", question, recorded=args.gb >= 4)
        with World.start("cpu") as world, tempfile.TemporaryDirectory(dir=args.dir) as name:
            found: list[dict[str, float]] = []
            for share in (0.25, 0.5, 1.0):
                rows = int(share * args.gb * 1e9 / ROW_BYTES / TABLES)
                job = make_job(world, rows)
                job.trainer.step(Rows(rows, torch.Generator().manual_seed(0)))
                if question == "during":
                    results.add(**during(job, rows, Path(name), args.repeats))
                else:
                    found.append(bandwidth(job, Path(name), args.repeats))
                    results.add(**found[-1])
                del job
        if question == "waiting":
            results.add(**extrapolated(found, 40.0))


if __name__ == "__main__":
    main()

"""Tests that with torchrun --max-restarts, a job resumes after losing a rank or a machine."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.commands import train
from tests.deadlines import Deadline
from tests.launch.machines import ROOT, needs_namespaces, two_machines
from tests.torchrun import torchrun

pytestmark = pytest.mark.slow

STEPS = 600
# time limit in seconds for one wait: for ranks to start, for torchrun, or for the end of the run
END_S = 120.0
CONFIG = ROOT / "configs" / "scheme3.yaml"
# Make a step take at least 60 ms, so that machines join and leave during the run.
ENTRY = """
import sys, time
from sbpflow.runtime.processes.launch import run_main
class Slow:
    def step(self, *figures): pass
    def evaluation(self, *scores): pass
    def advance(self, step, loss): time.sleep(0.06)
def main():
    from sbpflow.commands.train import run_rank as train
    return train(sys.argv[1], sys.argv[2:], lambda rank: Slow())
run_main(main)
"""


class Job:
    """Runs the same command on machines that share a disk, and that join and leave."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.folder = folder
        self.entry = folder / "entry.py"
        self.entry.write_text(ENTRY)
        self.words = [
            *(str(self.entry), str(CONFIG), f"data.path={data}", f"run.dir={folder / 'run'}"),
            *("data.batch_size=100", "model.hidden=[16]", "parallel.dtype=float64"),
            *("train.epochs=1000", f"train.max_steps={STEPS}", "train.eval_every=0"),
            *("train.log_every=1", "checkpoint.every=20", "data.loader=memmap"),
            *("parallel.timeout_s=15", "parallel.kernel=torch"),
        ]

    def events(self) -> list[dict]:
        path = self.folder / "run" / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == "step"]

    def saved_by(self) -> int:
        """Return the number of ranks that wrote the newest checkpoint; 0 without a checkpoint."""
        checkpoints = list_checkpoints(self.folder / "run" / "checkpoints")
        return len(open_checkpoint(checkpoints[0]).index.files) if checkpoints else 0

    def wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = Deadline(END_S)
        while not done():
            assert not deadline.over(), f"{what}; {self.output()[-6000:]}"
            time.sleep(0.1)

    def output(self) -> str:
        logs = sorted(self.folder.glob("log*"))
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)

    def losses(self) -> list[float]:
        """Return losses by step, after checking that every step was reported once."""
        assert [event["step"] for event in self.events()] == list(range(1, STEPS + 1))
        return [event["loss"] for event in self.events()]


@pytest.fixture(scope="module")
def undisturbed(synth_set, tmp_path_factory) -> list[float]:
    """Return the losses of an undisturbed run on one rank."""
    job = Job(synth_set, tmp_path_factory.mktemp("undisturbed"))
    train.main(["--config", *job.words[1:]])
    return job.losses()


@needs_namespaces
def test_a_job_continues_when_machines_leave_and_join(synth_set, tmp_path, undisturbed):
    job = Job(synth_set, tmp_path)
    with two_machines() as (first, second):
        for machine in (first, second):
            machine.elastic(job.words, tmp_path / f"log{machine.number}")
        job.wait(lambda: job.saved_by() == 2, "two machines did not start")
        second.kill()
        job.wait(lambda: job.saved_by() == 1, "the first did not go on alone")
        assert "died or stopped responding" in job.output()
        second.elastic(job.words, tmp_path / "log2")
        job.wait(lambda: job.saved_by() == 2, "the second was not let in")
        assert "stopped by SIGTERM" in job.output(), "the rank that was alone was told, and saved"
        job.wait(lambda: all(m.process.poll() is not None for m in (first, second)), "no end")
        assert [m.process.returncode for m in (first, second)] == [0, 0], job.output()
    assert job.losses() == pytest.approx(undisturbed, rel=0, abs=1e-9)


def test_torchrun_restarts_ranks_after_one_was_killed(synth_set, tmp_path, undisturbed):
    job = Job(synth_set, tmp_path)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*torchrun(tmp_path), "--max-restarts", "2", *job.words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        for step in (40, 120):
            job.wait(lambda step=step: len(job.events()) > step, "it did not start")
            os.kill(children(process.pid)[0], signal.SIGKILL)
        job.wait(lambda: process.poll() is not None, "no end")
        assert process.returncode == 0, job.output()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert job.output().count("resuming after step") == 2
    assert job.losses() == pytest.approx(undisturbed, rel=0, abs=1e-9)


def children(pid: int) -> list[int]:
    """Return the process IDs of torchrun's ranks."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]

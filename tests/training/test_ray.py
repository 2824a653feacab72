"""Tests examples/launchers/ray_train.py with two workers on a local Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sbpflow.commands import train
from tests.deadlines import Deadline, output_of

pytest.importorskip("ray", reason="make test-slow runs this test in .venv-engines")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "launchers" / "ray_train.py"
CONFIG = ROOT / "configs" / "scheme3.yaml"
STEPS, END_S = 60, 300.0


def words(data: Path, run: Path) -> list[str]:
    return [
        *("--config", str(CONFIG), f"data.path={data}", f"run.dir={run}"),
        *("data.batch_size=100", "model.hidden=[16]", "parallel.dtype=float64"),
        *(f"train.max_steps={STEPS}", "train.log_every=1", "train.eval_every=0"),
        *("train.epochs=10", "data.loader=memmap", "parallel.kernel=torch"),
    ]


def events(run: Path, event: str) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    return [event["loss"] for event in events(run, "step")] if path.exists() else []


def log_of(run: Path) -> Path:
    return run.with_name("ray.log")


@contextmanager
def ray_trainer(data: Path, run: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """Run the example with two workers; its output goes to the file ``log_of(run)``."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Ray starts workers with niceness 15, so on a busy machine they would get hardly any CPU.
    env |= {"RAY_RESULTS": str(run.parent / "ray"), "RAY_worker_niceness": "0"}
    env |= {"RAY_ADDRESS": "local"}  # never a cluster that runs on this machine
    command = [sys.executable, str(EXAMPLE), "--workers=2", "--cpus=0.5", *words(data, run), *more]
    with log_of(run).open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # kills all processes of the local Ray


def test_two_ray_workers_train_like_one_process(synth_set, tmp_path):
    run, expected = tmp_path / "run", tmp_path / "expected"
    with ray_trainer(synth_set, run) as process:
        output_of(process, END_S)
    output = log_of(run).read_text()
    assert process.returncode == 0, output[-6000:]
    (final,) = events(run, "final")
    assert final["steps"] == STEPS
    assert len(final["peak_memory_bytes"]) == 2, "two ranks trained"
    train.main(words(synth_set, expected))
    assert losses(run) == pytest.approx(losses(expected), rel=0, abs=1e-9)


def test_a_run_resumes_after_one_of_the_ray_workers_was_killed(synth_set, tmp_path):
    run, expected = tmp_path / "run", tmp_path / "expected"
    steps = ["train.max_steps=400", "checkpoint.every=20"]
    with ray_trainer(synth_set, run, *steps) as process:
        deadline = Deadline(END_S)
        while len(losses(run)) < 50:
            assert process.poll() is None, log_of(run).read_text()[-6000:]
            assert not deadline.over(), "the workers did not train"
            time.sleep(0.1)
        os.kill(train_workers(process.pid)[0], signal.SIGKILL)
        output_of(process, END_S)
    output = log_of(run).read_text()
    assert process.returncode == 0, output[-6000:]
    assert output.count("resuming after step") == 1, output[-6000:]
    train.main([*words(synth_set, expected), *steps])
    assert losses(run) == pytest.approx(losses(expected), rel=0, abs=1e-9)


def test_the_workers_can_check_their_machines(synth_set, tmp_path):
    run = tmp_path / "run"
    with ray_trainer(synth_set, run, "--check", str(tmp_path)) as process:
        output_of(process, END_S)
    output = log_of(run).read_text()
    assert process.returncode == 0, output[-6000:]
    assert "link        2 ranks on 1 machine: " in output
    assert "nothing is broken" in output
    assert not run.exists(), "the workers did not train"


def train_workers(parent: int) -> list[int]:
    """Return the process IDs of the training workers in the session ``parent``."""
    command = ["ps", "-o", "pid=,args=", "--sid", str(parent)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
    return [int(pid) for pid, args in lines if "RayTrainWorker" in args]

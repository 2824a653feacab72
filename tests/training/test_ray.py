"""Tests examples/launchers/ray_train.py with two workers of a local Ray."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sbpflow.commands import train
from tests.deadlines import output_of

pytest.importorskip("ray", reason="make test-slow runs this test in .venv-engines")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "launchers" / "ray_train.py"
CONFIG = ROOT / "configs" / "scheme3.yaml"
STEPS = 60


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


def test_two_ray_workers_train_like_one_process(synth_set, tmp_path):
    run, expected = tmp_path / "run", tmp_path / "expected"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Ray starts workers with niceness 15, so on a busy machine they would get hardly any CPU.
    env |= {"RAY_RESULTS": str(tmp_path / "ray"), "RAY_worker_niceness": "0"}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--workers=2", "--cpus=0.5", *words(synth_set, run)],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = output_of(process, 300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # kills all processes of the local Ray
    assert process.returncode == 0, output[-6000:]
    (final,) = events(run, "final")
    assert final["steps"] == STEPS
    assert len(final["peak_memory_bytes"]) == 2, "two ranks trained"
    train.main(words(synth_set, expected))
    losses = [[event["loss"] for event in events(folder, "step")] for folder in (run, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-9)

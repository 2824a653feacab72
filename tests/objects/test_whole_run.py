"""Prepares, trains, kills, resumes, and predicts with all files on an S3 server, and compares the
results with local files.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from sbpflow.checkpoint.folder import list_checkpoints
from sbpflow.commands import train as train_command
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.commands.export import export
from sbpflow.commands.predict import predict
from sbpflow.data import load_manifest
from sbpflow.data.__main__ import main as data_main
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.runtime.files import remote_path
from sbpflow.runtime.files.remote_path import RemotePath
from tests.data.rows import text_rows, write_rows
from tests.deadlines import Deadline, run
from tests.objects.server import SECRET, Proxy, Request

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8


def words(data, folder, *more):
    return [
        *("--config", str(ROOT / "configs/scheme3.yaml")),
        *(f"data.path={data}", f"run.dir={folder}", "data.batch_size=200", "data.loader=memmap"),
        *("model.hidden=[16]", "optimizer.sparse.name=lazy_adam", "parallel.kernel=torch"),
        *(f"train.max_steps={STEPS}", "train.eval_every=4", "train.log_every=1"),
        *("checkpoint.every=2", "checkpoint.deltas=2", "checkpoint.keep=2"),
        *more,
    ]


def train(*given):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sbpflow", "train", "--ranks", "2", *words(*given)]
    return run(command, 300.0, env=env, cwd=ROOT)


def train_until(s3: Proxy, stop, *given) -> None:
    """Train; kill all processes of the run at the first request that ``stop`` selects."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sbpflow", "train", "--ranks", "2", *words(*given)]
    process = subprocess.Popen(
        command, env=env, cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    killed = []

    def fault(request: Request) -> str:
        if not killed and stop(request):
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.killpg(process.pid, signal.SIGKILL)
            for rank in map(int, ranks):  # each rank has a process group of its own
                os.killpg(rank, signal.SIGKILL)
            killed.append(request)
        return "drop" if killed else ""

    s3.fault = fault
    deadline = Deadline(300.0)
    while process.poll() is None:
        assert not deadline.over()
    s3.clear()
    assert killed, f"ended with {process.returncode} before the kill"


def events(folder):
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("event", "step", "loss", "auc", "logloss", "split")
    # The steps at which "ranks" events are written depend on timing.
    logged = [event for event in logged if event["event"] != "ranks"]
    return [{key: event[key] for key in kept if key in event} for event in logged]


def prepare(output, *inputs):
    more = ["--crosses", "C1xC2,C3xC4", "--workers", "2"]
    assert data_main(["prepare", "--input", *map(str, inputs), "--output", str(output), *more]) == 0


def prepared(folder: Path, cache: Path) -> tuple[RemotePath, Path]:
    """Prepare equal sets from local files and from files in the store."""
    url = RemotePath("s3://bucket/job")
    (folder / "in").mkdir()
    for number in range(2):
        file = write_rows(folder / f"in/day_{number}.tsv", text_rows(1500, seed=number))
        (url / f"in/day_{number}.tsv").write_bytes(file.read_bytes())
    prepare(folder / "set", folder / "in")
    prepare(url / "set", url / "in")
    assert not any((cache / "prepare").iterdir())
    local, remote = load_manifest(folder / "set"), load_manifest(url / "set")
    assert local.fingerprint == remote.fingerprint
    return url, local.path


class Interrupted(Exception):
    """Simulates a kill: no code of the run executes afterwards."""


@pytest.mark.slow
def test_an_interrupted_run_on_s3_equals_a_run_on_local_files(s3, cache, tmp_path, monkeypatch):
    url, local = prepared(tmp_path, cache)
    quiet = "checkpoint.background=false"
    assert train_command.main(words(local, tmp_path / "local", quiet)) == 0
    given = (url / "set", tmp_path / "run", f"checkpoint.dir={url / 'run'}", quiet)

    def interrupt(request: Request) -> str:
        """Make all requests fail, starting with the first request for step 6's index."""
        nonlocal is_over
        is_over |= request.method == "PUT" and request.path.startswith("/bucket/job/run/step-6/i")
        return "503" if is_over else ""

    is_over = False
    monkeypatch.setattr(remote_path, "_FIRST_PAUSE_S", 0.001)
    s3.fault = interrupt
    with pytest.raises(CheckpointError, match=r"run/step-6 cannot be written \(.* \(5 tries"):
        train_command.main(words(*given))
    s3.clear()
    assert [path.name for path in list_checkpoints(url / "run")] == ["step-4", "step-2"]
    assert train_command.main(words(*given)) == 0
    assert events(tmp_path / "run") == events(tmp_path / "local")
    assert not [r for r in s3.requests if r.path.startswith("/bucket/job/set/train")], "cached"
    assert {name.partition("/")[0] for name in (url / "run").sizes()} >= {"data", "run.json"}
    shutil.rmtree(cache / "sets")  # another machine would have no cache
    same_predictions(url, tmp_path)
    with pytest.raises(ConfigError, match="sbpflow cannot rename them at a URL"):
        train_command.main(words(*given))
    output = url / "model"
    argv = ["--checkpoint", str(url / "run"), "--output", str(output)]
    assert export(argv) == 0
    order = [r.path for r in s3.requests if r.method == "PUT" and "/model/" in r.path]
    assert order[-1] == "/bucket/job/model/model.json"
    with pytest.raises(ConfigError, match="already exists"):
        export(argv)
    text = (tmp_path / "run/start.txt").read_text()
    saved = b"".join((url / "run" / name).read_bytes() for name in (url / "run").sizes())
    assert SECRET not in text
    assert SECRET.encode() not in saved


@pytest.mark.slow
@pytest.mark.parametrize("s3", ["moto", "rclone"], indirect=True)
def test_a_killed_run_of_two_ranks_on_s3_equals_a_run_on_local_files(s3, cache, tmp_path):
    url, local = prepared(tmp_path, cache)
    done = train(local, tmp_path / "local")
    assert done.returncode == 0, done.stderr
    given = (url / "set", tmp_path / "run", f"checkpoint.dir={url / 'run'}")
    given += (f"data.cache.dir={tmp_path / 'sets'}",)

    def in_save(request: Request) -> bool:  # a rank's file exists, but not the index
        return request.method == "PUT" and "/run/step-6/rank-1." in request.path

    train_until(s3, in_save, *given)
    steps = [path.name for path in list_checkpoints(url / "run")]
    assert steps[0] == "step-4"
    s3.clear()
    done = train(*given)
    assert done.returncode == 0, done.stderr
    assert events(tmp_path / "run") == events(tmp_path / "local")
    assert "resuming after step 4" in (tmp_path / "run/start.txt").read_text() + done.stderr
    shards = [r.path for r in s3.requests if r.path.startswith("/bucket/job/set/train")]
    assert len(shards) == 0, "the files of the killed run are in the cache"
    same_predictions(url, tmp_path)


def same_predictions(url: RemotePath, folder: Path) -> None:
    scores = []
    for saved, source in ((folder / "local", folder / "in"), (url / "run", url / "in")):
        output = folder / f"scores-{len(scores)}.parquet"
        argv = ["--checkpoint", str(saved), "--input", str(source), "--output", str(output)]
        assert predict(argv) == 0
        scores.append(pl.read_parquet(output))
    assert scores[0].equals(scores[1])
    assert checkpoint(["verify", str(url / "run")]) == 0
    assert checkpoint(["compact", str(url / "run")]) == 0
    assert checkpoint(["diff", str(url / "run"), str(folder / "local")]) == 1  # the paths differ

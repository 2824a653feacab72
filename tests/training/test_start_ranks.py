"""Tests that ``sbpflow train -n N`` starts ranks and ends with their exit code and a single
message.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbpflow.errors import ConfigError
from sbpflow.runtime.processes.start_ranks import _exit_code, start_ranks
from tests.deadlines import Deadline, output_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(synth_set, tmp_path) -> Iterator:
    """Start ranks (by default, two) with additional arguments in a new process group."""
    processes = []

    def start(*words: str, ranks: int = 2) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sbpflow", "train", "-n", str(ranks)]
        command += ["--config", "configs/scheme1.yaml", f"data.path={synth_set}"]
        command += [f"run.dir={tmp_path / 'run'}", "model.hidden=[16]", "data.batch_size=500"]
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        processes.append(
            subprocess.Popen(
                [*command, "parallel.kernel=torch", *words],
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_steps(folder: Path, limit_s: float = 60) -> None:
    deadline = Deadline(limit_s)
    while '"loss"' not in (folder.read_text() if folder.exists() else ""):
        assert not deadline.over(), "no step came"
        time.sleep(0.05)


def rank_pids(launcher: int) -> list[int]:
    """Return the process IDs of the launcher's ranks, rank 0 first."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    words = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    ranks = {
        int(word.removeprefix(b"RANK=")): pid
        for pid, environment in words.items()
        for word in environment
        if word.startswith(b"RANK=")
    }
    return [ranks[rank] for rank in sorted(ranks)]


@pytest.mark.slow
def test_two_ranks_train_and_report_once(started, tmp_path):
    done = started()
    text = output_of(done, 120)
    assert done.returncode == 0, text
    assert text.count("INFO end") == 1
    events = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert events[-1]["event"] == "final"
    assert "on 2 ranks" in text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mistake_is_one_message_and_exit_status_2(started, tmp_path, ranks):
    done = started("optimizer.dense.lr=-1", ranks=ranks)
    text = output_of(done, 60)
    assert done.returncode == 2
    (line,) = filter(None, text.splitlines())
    assert "optimizer.dense.lr must be > 0 and <= 1e+30, got -1" in line


@pytest.mark.slow
def test_a_rank_that_dies_is_named_last(started, tmp_path):
    done = started("train.epochs=1000")
    wait_for_steps(tmp_path / "run/metrics.jsonl")
    os.kill(rank_pids(done.pid)[1], signal.SIGKILL)
    text = output_of(done, 60)
    assert done.returncode == 3, text
    assert "rank 1" in text.splitlines()[-1]
    assert "Traceback" not in text


@pytest.mark.parametrize("to", ["launcher", pytest.param("all", marks=pytest.mark.slow)])
def test_an_interrupt_saves_and_ends_with_130(started, tmp_path, to):
    done = started("train.epochs=1000", "checkpoint.every=1000")
    wait_for_steps(tmp_path / "run/metrics.jsonl")
    (os.kill if to == "launcher" else os.killpg)(done.pid, signal.SIGINT)
    text = output_of(done, 60)
    assert done.returncode == 130, text
    assert "Traceback" not in text
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    step = saved.name.removeprefix("step-")
    last = f"; step {step} is saved in {saved}; the same command resumes the run from it"
    assert text.splitlines()[-1].startswith("stopped by ")
    assert "death signal" not in text, "a message of torch's launcher"
    assert text.rstrip().endswith(last)


def train_with(module: str, synth_set: Path, folder: Path, *more: str) -> None:
    """Train one step on two ranks, which run ``module``."""
    words = ["--config", "configs/scheme1.yaml", f"data.path={synth_set}"]
    words += [f"run.dir={folder / 'run'}", "model.hidden=[8]", "data.batch_size=1000"]
    words += ["parallel.kernel=torch", "train.max_steps=1", *more]
    program = (
        "from sbpflow.runtime.processes.start_ranks import start_ranks\n"
        f"code = start_ranks({words!r}, 2, '-n', module={module!r})\n"
        "raise SystemExit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ranks_wait_until_the_files_of_an_earlier_run_have_been_moved(synth_set, tmp_path):
    """A faster rank would use a folder that rank 0 is about to move."""
    train_with("tests.training.slow_to_move", synth_set, tmp_path)
    assert list(tmp_path.glob("run/checkpoints/step-*"))
    assert not list(tmp_path.glob("run/previous-*")), "a new run has no earlier files"


@pytest.mark.slow
def test_ranks_wait_while_others_download_a_set(synth_set, tmp_path):
    more = ("parallel.timeout_s=8", "checkpoint.every=1")
    train_with("tests.training.slow_to_download", synth_set, tmp_path, *more)
    assert list(tmp_path.glob("run/checkpoints/step-1"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_launcher_waits_until_slow_ranks_have_saved(tmp_path, number):
    program = (
        "from sbpflow.runtime.processes.launch import run_main\n"
        "from sbpflow.runtime.processes.start_ranks import start_ranks\n"
        f"words = [{str(tmp_path)!r}]\n"
        "run_main(lambda: start_ranks(words, 2, '-n', module='tests.launch.slow_to_save'))\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = Deadline(60)
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert not deadline.over(), "the ranks did not start"
            time.sleep(0.05)
        launcher.send_signal(number)
        assert launcher.wait(60) == 130
        # Ranks need the launcher until they exit, because it hosts their store.
        assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([3], 3),
        ([-9], 137),
        ([130], 130),
        ([-9, 3], 3),
        ([2, -15], 2),
        ([130, -9], 3),  # the launcher stopped the other ranks after one was killed
        ([130, -9, 2], 2),
    ],
)
def test_the_exit_code_names_the_fault(codes, code):
    assert _exit_code(dict(enumerate(codes))) == code


def test_impossible_numbers_of_ranks_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"^-n must be 1 or more, got 0; for example, -n 2$"):
        start_ranks(["train"], 0, "-n")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"^-n is 2, but this process is already rank 1 of"):
        start_ranks(["train"], 2, "-n")


@pytest.fixture
def configs(monkeypatch) -> list:
    """Return the configurations with which torch's launcher is called; it starts no ranks."""
    configs = []

    def launch(config, program):
        configs.append(config)
        return lambda *words: None

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    return configs


def test_ranks_continue_after_a_logout_under_nohup(configs):
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):  # nohup ignores SIGHUP
            signal.signal(signal.SIGHUP, handler)
            assert start_ranks(["train"], 2, "-n") == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    handled = [config.signals_to_handle.split(",") for config in configs]
    assert ["SIGHUP" in names for names in handled] == [True, False]
    assert all({"SIGTERM", "SIGINT"} <= {*names} for names in handled)


def test_ranks_find_each_other_even_if_the_name_of_this_machine_does_not_resolve(configs):
    assert start_ranks(["train"], 2, "-n") == 0
    assert configs[0].local_addr == "127.0.0.1"


def test_no_heartbeat_of_torch_s_launcher_can_abort_the_exit(configs):
    """After a signal, torch leaves the thread of the heartbeats running. If a heartbeat is under
    way when Python exits, the process ends with SIGABRT.
    """
    assert start_ranks(["train"], 2, "-n") == 0
    assert configs[0].rdzv_configs["keep_alive_interval"] >= 24 * 3600


def test_no_folder_is_left_in_the_folder_for_temporary_files(configs, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert start_ranks(["train"], 2, "-n") == 0
    assert not list(tmp_path.iterdir())

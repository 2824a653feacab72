"""Tests the output of a run: log, files, summaries."""

import errno
import fcntl
import io
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from sbpflow.commands import fit
from sbpflow.config.load import load_config
from sbpflow.errors import ConfigError
from sbpflow.models.registry import MODELS
from sbpflow.runtime.files.run_folder import RunLock
from sbpflow.training.loop import Result
from sbpflow.training.metrics import Evaluation
from sbpflow.training.progress import Progress
from sbpflow.training.report import MetricsWriter, Report, _ProgressBarHandler, setup_logging

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {{dir: {tmp_path / 'run'}}}\nmodel: {{hidden: [8, 4]}}\n")
    return load_config(path, models=MODELS)


def events(config):
    text = (config.run.dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def run_report(config, rank=0, test=None):
    test = test or Evaluation(50, 0.4, 0.75)
    report = Report(
        config,
        rank=rank,
        num_steps=4,
        devices=["cpu of host a", "cpu of host b"],
        sections={"layouts": "deep.C1 S(1)@[0, 1]\nwide.C1xC2 B"},
        best=(0.8, 0.3),
    )
    with report:
        for step in range(1, 5):
            report.advance(step, 0.5)
        report.step(4, 0.5, 1000.0, {"data_ms": 1.5})
        report.evaluation("val", 4, Evaluation(50, 0.5, 0.7))
        val = Evaluation(50, 0.5, 0.7)
        result = Result(
            steps=4, samples_per_s=900.0, timed_steps=3, loss=0.5, val=val, test=test, overlap=""
        )
        report.final(result)


def test_metrics_file_holds_the_documented_events(config):
    run_report(config)
    step, score, final = events(config)
    assert {
        "event": "step",
        "step": 4,
        "loss": 0.5,
        "samples_per_s": 1000.0,
    }.items() <= step.items()
    assert step["data_ms"] == 1.5
    assert (step["lr_sparse"], step["lr_dense"]) == (0.05, 1e-3)
    for event in (step, score, final):
        age = datetime.now(UTC) - datetime.fromisoformat(event.pop("time"))
        assert 0 <= age.total_seconds() < 600
    assert {"event": "eval", "step": 4, "split": "val", "auc": 0.7}.items() <= score.items()
    assert final == {
        "event": "final",
        "val_auc": 0.7,
        "auc": 0.75,
        "logloss": 0.4,
        "samples_per_s": 900.0,
        "steps": 4,
        "best_auc": 0.8,
        "best_logloss": 0.3,
    }


def test_summaries_show_config_versions_devices_sections_and_result(config, caplog):
    caplog.set_level(logging.INFO)
    run_report(config)
    short = next(text for text in caplog.messages if text.startswith("start: "))
    assert short.splitlines() == [
        "start: wdl on 2 ranks (1 x cpu of host a; 1 x cpu of host b)",
        "  4 steps of 16,384 rows from None, seed 7",
        f"  python {platform.python_version()}, torch {torch.__version__}",
        f"  configuration, versions and plan: {config.run.dir / 'start.txt'}",
    ]
    start = (config.run.dir / "start.txt").read_text()
    for part in ("hidden: [8, 4]", "torch 2.", "rank 1: cpu of host b", "  deep.C1 S(1)@[0, 1]"):
        assert part in start
    end = caplog.records[-1].getMessage()
    for part in ("auc            0.75", "best_auc       0.8", "metrics.jsonl"):
        assert part in end


def test_other_ranks_write_nothing(config):
    run_report(config, rank=1)
    assert not config.run.dir.exists()


def test_splits_of_one_class_report_why_they_have_no_auc(config, caplog):
    caplog.set_level(logging.INFO)
    report = Report(config, rank=0, num_steps=1, devices=["cpu"], sections={})
    with report:
        report.evaluation("val", 1, Evaluation(9, 0.5, None, "all 9 rows are negative"))
    assert events(config)[0]["auc"] is None
    assert "AUC none (all 9 rows are negative)" in caplog.text


def test_files_of_earlier_runs_are_moved_to_separate_folders(config, caplog):
    caplog.set_level(logging.INFO)
    folder = config.run.dir
    for number in range(3):
        run_report(config, test=Evaluation(50, 0.1, number / 10))
        (folder / "tensorboard").mkdir(exist_ok=True)
        (folder / "tensorboard" / f"events of {number}").touch()
    assert events(config)[-1]["auc"] == 0.2
    for number in range(2):
        earlier = folder / f"previous-{number + 1}"
        last = json.loads((earlier / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["auc"] == number / 10
        assert list((earlier / "tensorboard").glob("events of *")) == [
            earlier / "tensorboard" / f"events of {number}"
        ]
        assert f"from {folder} to {earlier}" in caplog.text
    assert not (folder / "previous-3").exists()


def test_a_folder_can_be_used_by_only_one_run_at_a_time(tmp_path):
    folder = tmp_path / "wdl"
    folder.mkdir()
    (tmp_path / "wdl-2").mkdir()
    first = RunLock(folder, rank=0)
    with pytest.raises(ConfigError) as caught:
        RunLock(folder, rank=0)
    assert str(caught.value).startswith(
        f"run.dir: {folder} is in use by another run (process {os.getpid()} on {platform.node()});"
    )
    assert f"run.dir={folder}-3)" in str(caught.value)
    RunLock(folder, rank=1)  # ranks other than 0 need no lock
    first.close()
    RunLock(folder, rank=0).close()


def test_folder_names_may_have_blanks_or_be_empty(tmp_path, monkeypatch):
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    first = RunLock(Path("."), rank=0)
    with pytest.raises(ConfigError, match=rf"for example, run\.dir='{tmp_path}/a b-2'.,"):
        RunLock(Path("."), rank=0)
    first.close()


def test_a_lock_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"run\.dir: .*/run\.lock cannot be opened \(is a directory\); remove it, or",
    ):
        RunLock(tmp_path, rank=0)


def test_killed_runs_release_their_lock(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; "
        "from sbpflow.runtime.files.run_folder import RunLock; "
        "lock = RunLock(Path(sys.argv[1]), rank=0); print(flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    with pytest.raises(ConfigError, match=rf"in use by another run \(process {holder.pid} on"):
        RunLock(tmp_path, rank=0)
    holder.kill()
    holder.communicate()
    RunLock(tmp_path, rank=0).close()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    RunLock(tmp_path, rank=0).close()
    assert (
        "cannot be locked ([Errno 37] No locks available); do not start a second run" in caplog.text
    )


def test_resumed_runs_cut_later_metrics(tmp_path, caplog):
    writer = MetricsWriter(tmp_path, rank=0)
    writer.write("step", {"step": 1})
    length = writer.length
    writer.write("step", {"step": 2})  # a step after the last checkpoint
    writer.close()
    writer = MetricsWriter(tmp_path, rank=0, resumed=(1, length))
    assert writer.length == length
    for step in (2, 3):
        writer.write("step", {"step": step})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    (tmp_path / "metrics.jsonl").write_text("")
    MetricsWriter(tmp_path, rank=0, resumed=(1, length)).close()
    assert re.search(f"metrics.jsonl has 0 bytes.* {length} at", caplog.text)
    # After a power failure, the file may end within a line.
    (tmp_path / "metrics.jsonl").write_text(f"{lines[0]}\n{lines[1][:9]}")
    writer = MetricsWriter(tmp_path, rank=0, resumed=(1, 3 * length))
    writer.write("step", {"step": 3})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]


@pytest.mark.parametrize("last", ["step", "final"])
def test_a_resumed_run_moves_the_files_of_another_run(tmp_path, last):
    """With checkpoint.dir, a run can resume in the run folder of another run, whose file may be
    shorter.
    """
    other = f'{{"event": "step", "step": 1}}\n{{"event": "{last}", "step": 2}}\n'
    length = {"step": 40, "final": 400}[last]
    (tmp_path / "metrics.jsonl").write_text(other)
    (tmp_path / "start.txt").touch()
    (tmp_path / "checkpoints").mkdir()
    MetricsWriter(tmp_path, rank=0, resumed=(1, length)).close()
    assert (tmp_path / "previous-1" / "metrics.jsonl").read_text() == other
    assert (tmp_path / "previous-1" / "start.txt").exists()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "checkpoints").is_dir()


def test_the_last_step_is_read_from_the_end_of_a_long_file(tmp_path, monkeypatch):
    file, began = tmp_path / "metrics.jsonl", datetime.now(UTC)
    writer = MetricsWriter(tmp_path, rank=0)
    for step in range(1, 5000):
        writer.write("step", {"step": step, "loss": 0.5, "samples_per_s": 9.0, "last_step": 9999})
    writer.write("eval", {"step": 4999, "split": "val", "num_rows": 5})
    writer.close()
    monkeypatch.setattr(fit, "_READ_BYTES", 1000)
    tracemalloc.start()
    event = fit._last_step(file, began.replace(microsecond=0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (event["step"], event["last_step"]) == (4999, 9999)
    assert peak < file.stat().st_size / 5
    assert fit._last_step(file, datetime.now(UTC) + timedelta(seconds=9)) is None
    assert fit._last_step(tmp_path / "none", began) is None


def test_lines_are_valid_json_even_for_nan(tmp_path):
    writer = MetricsWriter(tmp_path, rank=0)
    writer.write("step", {"step": 1, "loss": float("nan"), "samples_per_s": float("inf")})
    # Read the file before it is closed: a killed run must keep its lines.
    text = (tmp_path / "metrics.jsonl").read_text()
    writer.close()
    line = json.loads(text)
    del line["time"]
    assert line == {"event": "step", "step": 1, "loss": None, "samples_per_s": None}
    assert "NaN" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_shows_loss_rate_and_total(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = Progress(4, visible=True)
    for step in range(1, 5):
        progress.advance(step)
    progress.interval(4, 0.25, 1234.0, {})
    progress.close()
    assert "4/4" in screen.getvalue()
    assert "loss 0.2500, 1,234 samples/s" in screen.getvalue()


@pytest.mark.parametrize(("visible", "bar"), [(False, True), (True, False)])
def test_no_bar_for_other_ranks_or_when_switched_off(monkeypatch, visible, bar):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = Progress(1, visible=visible, bar=bar)
    progress.advance(1)
    progress.close()
    assert screen.getvalue() == ""


def test_a_run_of_one_step_shows_no_rate(caplog):
    caplog.set_level(logging.INFO)
    Progress(1, visible=True).interval(1, 0.25, float("nan"), {"epoch": 1})
    assert caplog.messages == ["step 1/1, loss 0.25000, epoch 1"]


def test_a_rate_that_follows_a_schedule_is_written(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"run: {{dir: {tmp_path}}}\noptimizer: {{schedule: {{warmup_steps: 4}}}}\n")
    given = load_config(path, models=MODELS)
    with Report(given, rank=0, num_steps=4, devices=["cpu"], sections={}) as report:
        report.step(1, 0.5, 10.0, {})
    (step,) = events(given)
    assert step["lr_dense"] == pytest.approx(1e-3 / 5)


def test_without_a_terminal_each_interval_logs_a_line(caplog):
    caplog.set_level(logging.INFO)
    times = iter([10.0, 13.0])
    progress = Progress(10, visible=True, clock=lambda: next(times))
    for step in range(1, 5):
        progress.advance(step)
    progress.interval(4, 0.25, 1234.0, {"data_ms": 1.5, "growth_live": 16_230.0})
    # The 3 steps after the first took 3 s, so the 6 remaining steps take 6 s.
    expected = (
        "step 4/10, loss 0.25000, 1,234 samples/s, data_ms 1.5, growth_live 16,230, ETA 00:06"
    )
    assert [record.getMessage() for record in caplog.records] == [expected]


@pytest.mark.parametrize(("rank", "shown"), [(0, ["info", "warning"]), (1, ["warning"])])
def test_log_lines_name_the_rank_and_other_ranks_log_only_warnings(rank, shown, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    root = logging.getLogger()
    before = root.handlers[:], root.level
    ours = [logging.getLogger(name) for name in ("sbpflow", "models", "data", "planner")]
    levels = [logger.level for logger in ours]
    try:
        setup_logging(rank)
        logging.getLogger("sbpflow.test").info("info")
        logging.info("of another package")
        logging.getLogger("sbpflow.test").warning("warning")
    finally:
        root.handlers, root.level = before
        for logger, level in zip(ours, levels, strict=True):
            logger.setLevel(level)
    lines = screen.getvalue().splitlines()
    assert [line.split()[-1] for line in lines] == shown
    assert all(f"rank {rank}" in line for line in lines)


def test_a_run_continues_after_its_terminal_was_closed(monkeypatch):
    class ClosedTerminal(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    handler = _ProgressBarHandler()
    handler.handle(logging.makeLogRecord({"msg": "step 5"}))

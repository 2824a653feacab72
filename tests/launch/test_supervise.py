"""Tests the restart loop, which restarts failed jobs, forwards signals, and finally gives up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.deadlines import outputs_of

LOOP = Path(__file__).resolve().parents[2] / "examples" / "supervise.sh"


def start(folder: Path, job: str, **settings: str) -> subprocess.Popen[str]:
    (folder / "job.sh").write_text(job)
    return subprocess.Popen(
        [LOOP, "sh", "job.sh"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "WAIT_S": "0", **settings},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_failing_job_is_restarted_until_it_succeeds(tmp_path):
    job = "echo x >> starts; [ $(wc -l < starts) -ge 3 ] || exit 3"
    process = start(tmp_path, job)
    _, stderr = outputs_of(process, 30)
    assert process.returncode == 0
    assert (tmp_path / "starts").read_text().split() == ["x"] * 3
    assert stderr.splitlines() == [
        "supervise: ended with code 3; restarting in 0 s (19 restarts left)",
        "supervise: ended with code 3; restarting in 0 s (18 restarts left)",
    ]


def test_the_loop_gives_up_after_repeated_short_runs(tmp_path):
    process = start(tmp_path, "echo x >> starts; exit 2", RESTARTS="2")
    _, stderr = outputs_of(process, 30)
    assert process.returncode == 2
    assert (tmp_path / "starts").read_text().split() == ["x"] * 3
    assert stderr.endswith("supervise: ended with code 2; giving up after 2 restarts\n")


def test_long_runs_do_not_count_as_failures(tmp_path):
    job = "echo x >> starts; [ $(wc -l < starts) -ge 4 ] || exit 3"
    process = start(tmp_path, job, RESTARTS="1", SHORT_S="0")
    outputs_of(process, 30)
    assert process.returncode == 0


def test_sigterm_is_forwarded_and_the_job_may_save(tmp_path):
    job = "trap 'echo saved > saved; exit 130' TERM; touch ready; while :; do sleep 0.05; done"
    process = start(tmp_path, job)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, stderr = outputs_of(process, 30)
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert process.returncode == 130
    assert "restarting in" not in stderr


def test_ctrl_c_in_a_terminal_is_one_signal_for_the_job(tmp_path):
    """A terminal sends SIGINT to the whole process group, which includes the loop."""
    (tmp_path / "job.py").write_text(
        "import pathlib, signal, sys, time\n"
        "received = []\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, lambda number, frame: received.append(number))\n"
        "pathlib.Path('ready').touch()\n"
        "while not received: time.sleep(0.02)\n"
        "time.sleep(0.5)\n"
        "print(*(int(number) for number in received), file=sys.stderr)\n"
        "sys.exit(130)\n"
    )
    process = start(tmp_path, f"exec {sys.executable} job.py")
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = outputs_of(process, 30)
    assert stderr.splitlines() == [str(int(signal.SIGTERM))]
    assert process.returncode == 130


def test_a_launcher_that_hangs_after_its_ranks_is_killed(tmp_path):
    (tmp_path / "hang.py").write_text(
        "import pathlib, signal, subprocess, sys\n"
        "if pathlib.Path('once').exists(): sys.exit(0)\n"
        "pathlib.Path('once').touch()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "rank = subprocess.Popen(['sleep', '1.5'])\n"
        "rank.wait()\n"
        "signal.pause()\n"
    )
    process = start(tmp_path, f"exec {sys.executable} hang.py", STUCK_S="1")
    _, stderr = outputs_of(process, 30)
    assert process.returncode == 0
    # The shell may print "Killed" between the lines.
    assert [line for line in stderr.splitlines() if line.startswith("supervise")] == [
        "supervise: torchrun is still running 1 s after its ranks ended; killing it",
        "supervise: ended with code 137; restarting in 0 s (19 restarts left)",
    ]

"""Tests that workers are replaced when they die, and end when the supervisor ends."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

from sbpflow.commands.serve import serve
from tests.deadlines import Deadline, output_of

ROOT = Path(__file__).resolve().parents[2]
WORKERS = r"""
import os, signal, socket, sys, time
from sbpflow.serving.supervisor import Supervisor

def say(text):
    os.write(1, f"{text}\n".encode())  # whole lines, also of two processes

def work(number):
    if sys.argv[1] == "fails":
        raise RuntimeError("no worker works")
    if sys.argv[1] in ("works", "loads", "stops"):
        signal.signal(signal.SIGTERM, lambda *_: (say(f"end {number}"), os._exit(0)))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(f"start {number} {os.getpid()}")
    while True:
        time.sleep(1)

def between():
    if sys.argv[1] == "between":
        say("between")
    elif sys.argv[1] == "loads":
        os.kill(os.getpid(), signal.SIGTERM)
        for pid, _ in list(supervisor._workers.items()):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with socket.socket() as client:
            client.settimeout(10)
            say("refused" if client.connect_ex(address) else "connected")

def restarted():
    say("restart")
    if sys.argv[1] == "stops":
        os.kill(os.getpid(), signal.SIGTERM)

listener = socket.create_server(("127.0.0.1", 0))
address = listener.getsockname()
supervisor = Supervisor(work, listener, 2, restarted, between, 0.1)
sys.exit(supervisor.run(float(sys.argv[2])))
"""


def start(how: str, grace_s: float = 20) -> subprocess.Popen[str]:
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    command = [sys.executable, "-c", WORKERS, how, str(grace_s)]
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=both, text=True)


def test_a_killed_worker_is_replaced_and_all_end_with_the_supervisor():
    with start("works") as process:
        pids = {}
        for _ in range(2):
            _, number, pid = process.stdout.readline().split()
            pids[number] = int(pid)
        assert pids.keys() == {"0", "1"}
        os.kill(pids["1"], signal.SIGKILL)
        lines = [process.stdout.readline() for _ in range(3)]
        assert "worker 1" in lines[0]
        assert "signal 9" in lines[0]
        assert lines[1] == "restart\n"
        assert lines[2].startswith("start 1 ")
        assert int(lines[2].split()[2]) != pids["1"]
        process.terminate()
        assert sorted(output_of(process, 20).splitlines()) == ["end 0", "end 1"]
        assert process.returncode == 0


def test_the_supervisor_works_between_replacements():
    with start("between", 0.2) as process:
        while process.stdout.readline() != "between\n":
            pass
        process.terminate()
        output_of(process, 20)
        assert process.returncode == 0


def test_the_server_closes_before_the_work_that_a_signal_interrupts():
    with start("loads") as process:
        assert output_of(process, 20).splitlines()[-1] == "refused"
        assert process.returncode == 0


def test_no_worker_is_started_after_a_signal():
    with start("stops") as process:
        pids = [int(process.stdout.readline().split()[2]) for _ in range(2)]
        os.kill(pids[0], signal.SIGKILL)
        printed = output_of(process, 20)
        assert process.returncode == 0
    assert "restart\n" in printed
    assert "start " not in printed


def test_a_worker_that_fails_at_its_start_ends_the_command():
    with start("fails") as process:
        printed = output_of(process, 20)
        assert process.returncode == 1
    assert "RuntimeError: no worker works" in printed
    assert "right after its start" in printed


def test_a_worker_that_ignores_the_signal_is_killed():
    with start("ignores", grace_s=0.2) as process:
        pids = [int(process.stdout.readline().split()[2]) for _ in range(2)]
        process.terminate()
        output_of(process, 20)
    deadline = Deadline(10)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert not deadline.over()
        time.sleep(0.05)


def test_the_server_opens_as_many_files_as_the_system_permits(tmp_path, monkeypatch):
    """A worker accepts 1024 connections, so the usual limit of 1024 files is too low."""
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = Mock(side_effect=lambda *_: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    monkeypatch.setattr("sbpflow.serving.server.run_server", limit)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(low, high - 1), high))
        assert serve([str(tmp_path)]) == high
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))

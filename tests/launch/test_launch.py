"""Tests the ways in which a run can end: exit code, one message, and all ranks gone within
seconds.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sbpflow.__main__
from tests.deadlines import Deadline, output_of
from tests.torchrun import run_script

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "tests" / "launch" / "entry.py"
START_S = 60
END_S = 60  # time limit in seconds for all ranks to exit; a collective would wait 20 minutes
SUBCOMMANDS = {
    "checkpoint": [["ls"], ["verify"], ["diff"], ["prune"], ["compact"], ["erase"], ["to-keys"]]
}


class Run:
    """Runs torchrun with entry.py and two ranks, in its own process group."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--log-dir", str(folder / "torchrun")]
        self.process = subprocess.Popen(
            [*command, str(ENTRY), mode, str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def pids(self) -> list[int]:
        """Return the process IDs of both ranks once both have passed init_process_group."""
        deadline = Deadline(START_S)
        files = [self.folder / f"rank{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            assert not deadline.over(), "the ranks did not start"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        return [int(file.read_text()) for file in files]

    def output(self, limit_s: float) -> str:
        """Return the output of torchrun and all ranks."""
        return output_of(self.process, limit_s)

    def close(self) -> None:
        """Kill and report processes that a failing test left behind; ranks have their own
        sessions.
        """
        pids = [int(file.read_text()) for file in self.folder.glob("rank*")]
        left = [pid for pid in pids if _alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        assert not left, f"processes {left} outlived the run"


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    started = Run(request.param, tmp_path)
    yield started
    started.close()


def own_traceback(output: str) -> bool:
    """Return whether the text contains a traceback from sbpflow, which, unlike torchrun's
    tracebacks, contains run_main.
    """
    return "sbpflow/runtime/processes/launch.py" in output


@pytest.mark.parametrize("run", ["mistake_on_one"], indirect=True)
def test_a_mistake_on_one_rank_is_printed_and_ends_all(run: Run) -> None:
    run.pids()
    output = run.output(END_S)
    assert output.count("error: ") == 1
    assert "error: shard 3: row 7 is cut short [rank 1]" in output
    assert not own_traceback(output)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["crash_on_all"], indirect=True)
def test_an_error_of_the_program_prints_the_traceback_of_one_rank(run: Run) -> None:
    output = run.output(START_S)
    assert output.count("SbpError: matmul: [2, 3] x [4, 5] has no common dim") == 1
    assert (
        output.count("Traceback (most recent call last)") - output.count("torch/distributed/") < 2
    )
    assert 'raise SbpError("matmul: [2, 3] x [4, 5] has no common dim")' in output


@pytest.mark.parametrize(
    "run", [pytest.param("own_words_on_one", marks=pytest.mark.slow)], indirect=True
)
def test_an_unexpected_error_keeps_its_traceback_regardless_of_its_text(run: Run) -> None:
    """The text of the user's error resembles torch's message for a lost peer."""
    run.pids()
    output = run.output(END_S)
    assert output.count("RuntimeError: Timed out waiting for my own queue") == 1
    assert own_traceback(output)
    assert "error: " not in output
    assert "died" not in output


@pytest.mark.slow
@pytest.mark.parametrize("run", ["exit_on_one"], indirect=True)
def test_a_rank_that_exits_is_named_with_its_code_and_line(run: Run) -> None:
    run.pids()
    output = run.output(END_S)
    lines = ENTRY.read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.strip() == "sys.exit(7)")
    message = f"the program exited with code 7: sys.exit(7) at {ENTRY}:{line}, in fail"
    assert output.count(message) == 1
    assert f"{message}\n[rank 1]\n" in output
    assert "died" not in output


@pytest.mark.slow
@pytest.mark.parametrize("run", ["killed"], indirect=True)
def test_survivors_name_the_rank_that_died(run: Run) -> None:
    run.pids()
    output = run.output(END_S)
    assert output.count("error: rank 1 died or stopped responding") == 1
    assert "dmesg" in output
    assert not own_traceback(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signum",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM],
    ids=["int", "term"],
)
@pytest.mark.parametrize("run", ["stuck"], indirect=True)
def test_a_signal_ends_ranks_inside_a_collective(run: Run, signum: signal.Signals) -> None:
    """Both ranks are blocked in C++, where Python signal handlers do not run."""
    run.pids()
    time.sleep(0.5)
    run.process.send_signal(signum)
    output = run.output(END_S)
    assert output.count("stopped by") == 1
    assert "error: " not in output
    assert not own_traceback(output)
    assert run.process.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("run", ["ok"], indirect=True)
def test_a_successful_run_is_silent_and_closes_its_groups(run: Run) -> None:
    output = run.output(START_S)
    assert run.process.returncode == 0
    assert output.count("group open: False") == 2
    assert "error" not in output


@pytest.mark.parametrize("end", ["return None", "sys.exit()", "sys.exit(0)"])
def test_a_rank_that_succeeds_ends_its_listener_before_python_shuts_down(end: str) -> None:
    """Otherwise, ``--help`` on several ranks hangs or aborts, because the listener waits in C++."""
    code = f"""
import sys
from sbpflow.runtime.processes import launch

class Met(launch.Meeting):
    def listen(self, on_exit):
        print("listens")

    def over(self):
        print("over")

def main():
    {end}

launch.Meeting.connect = lambda: Met(0, 2, None)
launch.run_main(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "listens\nover\n", "")


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_describes_every_command(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["sbpflow", *words])
    assert sbpflow.__main__.main() == 0
    shown = capsys.readouterr().out
    for name in sbpflow.__main__.COMMANDS:
        assert re.search(rf"^  {name} +\w", shown, re.M), name


@pytest.mark.parametrize("name", sbpflow.__main__.COMMANDS)
def test_every_option_has_a_help_line(monkeypatch, name):
    shown: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(
        argparse.ArgumentParser, "print_help", lambda parser, file=None: shown.append(parser)
    )
    subcommands = SUBCOMMANDS.get(name, [[]])
    for words in subcommands:
        with pytest.raises(SystemExit):
            sbpflow.__main__.COMMANDS[name]([*words, "--help"])
    assert len(shown) == len(subcommands)
    bare = [str(action.dest) for parser in shown for action in parser._actions if not action.help]
    assert bare == []


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sbpflow", "--version"])
    assert sbpflow.__main__.main() == 0
    assert capsys.readouterr().out == f"sbpflow {sbpflow.__version__}\n"


@pytest.mark.parametrize("lines", [10, 100_000], ids=["within the buffer", "beyond it"])
def test_a_command_ends_quietly_if_its_output_pipe_is_closed(lines: int) -> None:
    """A program whose output is closed early, as in ``explain | head``, ends without a traceback,
    with SIGPIPE's exit code.
    """
    code = f"""
from sbpflow.runtime.processes.launch import dispatch, run_main

def show(words):
    print("a line\\n" * {lines})
    return 0

run_main(lambda: dispatch("prog", {{"show": show}}, ["show"]))
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_ends_quietly_if_its_output_pipe_is_closed(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sbpflow", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("closed", "end", "code", "message"),
    [
        (">&-", "0", 0, ""),
        (">&-", "ConfigError('no')", 2, "\nerror: no\n"),
        ("2>&-", "0", 0, ""),
        (">&- 2>&-", "ConfigError('no')", 2, ""),
    ],
)
def test_a_program_whose_output_is_closed_keeps_its_exit_code(closed, end, code, message):
    """Services may start a program with closed standard streams, as `>&-` does."""
    program = "from sbpflow.errors import ConfigError\n"
    program += "from sbpflow.runtime.processes.launch import run_main\n"
    program += "import sys\n"
    program += f"def main():\n    sys.stdout.write('a line')\n    end = {end}\n"
    program += "    if end:\n        raise end\n    return end\n\nrun_main(main)\n"
    words = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (code, message)


def test_programs_that_use_triton_end_without_a_report_of_leaks():
    pytest.importorskip("triton")
    program = "import triton\nfrom sbpflow.runtime.processes.launch import run_main\n"
    words = [sys.executable, "-c", program + "run_main(lambda: 0)"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_program_can_start_several_worlds_in_turn(tmp_path):
    script = """
        import torch
        from sbpflow import Boxing, GlobalTensor, Layout, Placement, World

        for number in range(3):
            with World.start("cpu", timeout_s=60) as world:
                line = Placement.line("cpu", world.size)
                terms = GlobalTensor.from_local(
                    torch.full((2,), float(number + 1)), Layout(line, "P"), (2,), Boxing(world)
                )
                total = terms.to("B").part.tolist()
            if world.rank == 0:
                print(f"world {number}: {total}", flush=True)
    """
    done = run_script(tmp_path, script, seconds=180)
    lines = [line for line in done.stdout.splitlines() if line.startswith("world ")]
    sums = [f"world {number}: {[2.0 * (number + 1)] * 2}" for number in range(3)]
    assert lines == sums, done.stderr[-2000:]

"""Tests that a rank that is killed, stopped, or out of memory ends the run with one message, in any
move of a step without early rows and clipping, and on both transports.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sbpflow.runtime.processes.launch import EXIT_LOST_PEER
from sbpflow.training.step_schedule import OF_A_BATCH, OF_A_STEP
from tests.deadlines import output_of
from tests.launch.test_by_hand import free_port

ROOT = Path(__file__).resolve().parents[2]
MOVES = [move.name for move in (*OF_A_BATCH, *OF_A_STEP)]
TRANSPORTS = ("shared memory", "gloo")
TIMEOUT_S = 4
pytestmark = pytest.mark.slow


def start(rank: int, fault: str, move: str, port: int, transport: str, words: list[str]):
    where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRANSPORT": transport}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests/training/faulty_rank.py"), fault, move, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **where},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(synth_set: Path, folder: Path, fault: str, move: str, transport: str) -> list:
    """Return the exit code and output of both ranks; rank 1 fails."""
    words = ["--config", "configs/scheme3.yaml", f"data.path={synth_set}"]
    words += [f"run.dir={folder / 'run'}", "model.hidden=[16]", "data.batch_size=256"]
    words += [f"parallel.timeout_s={TIMEOUT_S if fault == 'stop' else 300}"]
    words += ["parallel.kernel=torch", "train.epochs=2", "train.log_every=1"]
    port = free_port()
    ranks = [start(rank, fault, move, port, transport, words) for rank in (0, 1)]
    try:
        first = output_of(ranks[0], 90)
        if fault == "stop":
            ranks[1].send_signal(signal.SIGKILL)
        return [(ranks[0].returncode, first), (ranks[1].wait(60), ranks[1].communicate()[0])]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("move", MOVES)
def test_a_killed_rank_ends_the_other_at_once(synth_set, tmp_path, move, transport):
    (code, output), (killed, _) = run(synth_set, tmp_path, "kill", move, transport)
    assert killed == -signal.SIGKILL
    assert code == EXIT_LOST_PEER, output
    assert output.count("error: ") == 1, output
    assert "error: rank 1 died" in output, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("move", MOVES)
def test_a_stopped_rank_ends_the_other_after_the_timeout(synth_set, tmp_path, move, transport):
    (code, output), _ = run(synth_set, tmp_path, "stop", move, transport)
    assert code == EXIT_LOST_PEER, output
    assert output.count("error: ") == 1, output
    assert re.search(r"error: (rank 1|another rank) .*stopped responding", output), output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("move", MOVES)
def test_a_rank_without_memory_ends_both(synth_set, tmp_path, move, transport):
    ranks = run(synth_set, tmp_path, "memory", move, transport)
    assert [code for code, _ in ranks] == [EXIT_LOST_PEER, 2], ranks
    text = "".join(output for _, output in ranks)
    assert text.count("error: ") == 1, text
    assert "error: out of memory: no memory for this buffer" in text, text
    assert "Traceback" not in text, text

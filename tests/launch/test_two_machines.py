"""Tests faults between machines: both machines report the real cause, and no rank hangs."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadlines import Deadline
from tests.launch.machines import Machine, needs_namespaces, two_machines, wait_for_ranks

pytestmark = needs_namespaces

END_S = 40  # time limit in seconds for all ranks to exit; torchrun takes most of it


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def start(machines: tuple[Machine, Machine], folder: Path, mode: str = "train") -> dict[int, int]:
    """Start both machines, wait until both train, and return process IDs by rank; rank numbers
    depend on the order of joining.
    """
    for machine in machines:
        machine.start(mode, folder, TIMEOUT_S="20")
    pids = wait_for_ranks(folder)
    time.sleep(0.5)
    return pids


def wait_until_gone(pids: dict[int, int]) -> None:
    deadline = Deadline(END_S)
    while any(is_alive(pid) for pid in pids.values()):
        assert not deadline.over(), "a rank hangs"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def messages(machine: Machine) -> list[str]:
    """Return the messages of a machine's rank."""
    assert machine.process is not None
    if machine.process.poll() is None:
        time.sleep(2)  # torchrun forwards its ranks' output, but may hang on a lost store
        machine.process.kill()
    text = machine.output(20)
    return [line for line in text.splitlines() if line.startswith(("error: ", "stopped by "))]


def rank_of(machine: Machine, pids: dict[int, int]) -> int:
    namespace = Path(f"/var/run/netns/{machine.name}").stat().st_ino
    found = {rank: Path(f"/proc/{pid}/ns/net").stat().st_ino for rank, pid in pids.items()}
    return next(rank for rank, inode in found.items() if inode == namespace)


@pytest.mark.slow
def test_a_cut_cable_is_reported_on_both_machines_and_no_rank_hangs(machines, tmp_path):
    pids = start(machines, tmp_path)
    ranks = [rank_of(machine, pids) for machine in machines]
    machines[1].pull_cable()
    wait_until_gone(pids)
    for machine, other in zip(machines, reversed(ranks), strict=True):
        (message,) = messages(machine)
        assert message.startswith(f"error: rank {other} on ")
        assert "died or stopped responding" in message
        assert "Timed out waiting 20000ms" in message
    assert "the store at 10.77.0.1:" in message, "the machine without the store names it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    [0, pytest.param(1, marks=pytest.mark.slow)],
    ids=["of the store", "away from the store"],
)
def test_a_preempted_machine_is_named_on_both_machines(machines, tmp_path, which):
    pids = start(machines, tmp_path)
    stopped = rank_of(machines[which], pids)
    machines[which].terminate()
    wait_until_gone(pids)
    for machine in machines:
        (message,) = messages(machine)
        assert message.startswith(f"stopped by SIGTERM, sent to rank {stopped} on ")


@pytest.mark.slow
def test_differences_between_machines_are_reported_on_both_before_they_connect(machines, tmp_path):
    sets = ["/data/a: 1f2e", "/data/a: 9c0d"]
    for machine, prepared in zip(machines, sets, strict=True):
        machine.start("train", tmp_path, FACTS=json.dumps({"data.path": prepared}))
    for machine in machines:
        text = machine.output(120)
        (message,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert message.startswith("error: rank 1 differs from rank 0 (data.path: /data/a: ")
        assert all(prepared in message for prepared in sets)
    assert not list(tmp_path.glob("rank*")), "no process group was created"

"""Tests that ranks listen only on the interface in use: loopback if all are on this machine."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sbpflow.runtime.processes import store as module
from sbpflow.runtime.processes.store import open_store
from tests.launch.test_by_hand import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
LOOPBACK = "0100007F"  # 127.0.0.1 in the kernel's notation
PROGRAM = """
import os, sys, time
from pathlib import Path

def main():
    import torch.distributed as dist
    from sbpflow.runtime.ranks.world import World
    from tests.launch.test_listens import listening

    world = World.start("cpu", timeout_s=60)
    world.link(range(world.size), "late")  # through the store that rank 0 serves
    world.barrier()
    found = f"{os.environ.get('GLOO_SOCKET_IFNAME')} {' '.join(listening(os.getpid()))}"
    Path(sys.argv[1], str(world.rank)).write_text(found)
    world.barrier()
    world.close()

if os.environ.get("WRAPPED"):
    from sbpflow.runtime.processes.launch import run_main
    run_main(main)
main()
"""


def listening(pid: int) -> list[str]:
    """Return the addresses at which a process listens, in the kernel's hexadecimal format."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    mine = {link for link in links if link.startswith("socket:")}
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def started(command: Sequence[str], folder: Path, **env: object) -> subprocess.Popen[str]:
    drop = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    clean = {key: value for key, value in os.environ.items() if key not in drop}
    given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [*command, str(program), str(folder)],
        env=clean | given | {name: str(value) for name, value in env.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def found_by(processes: list[subprocess.Popen[str]], folder: Path) -> list[list[str]]:
    """Return gloo's interface and the listening addresses of each rank."""
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    assert not any("listens on all interfaces" in text for text in outputs), outputs
    return [(folder / str(rank)).read_text().split() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "wrapped"),
    [
        ("127.0.0.1", ""),
        pytest.param("localhost", "1", marks=pytest.mark.slow),
        pytest.param("127.0.0.1", "1", marks=pytest.mark.slow),
        pytest.param("localhost", "", marks=pytest.mark.slow),
    ],
)
def test_ranks_started_by_hand_on_one_machine_listen_on_loopback(tmp_path, host, wrapped):
    port = free_port()
    env = {"WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": port, "WRAPPED": wrapped}
    ranks = [started([sys.executable], tmp_path, RANK=rank, **env) for rank in range(2)]
    first, second = found_by(ranks, tmp_path)
    assert f"{LOOPBACK}:{port:04X}" in first
    for interface, *addresses in (first, second):
        assert interface == "lo"
        assert addresses, "gloo listens"
        assert {address.partition(":")[0] for address in addresses} == {LOOPBACK}


@pytest.mark.slow
def test_ranks_of_torchrun_on_one_machine_listen_on_loopback(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = started([*command, "--nproc-per-node", "2"], tmp_path)
    for interface, *addresses in found_by([process], tmp_path):
        assert interface == "lo"
        assert {address.partition(":")[0] for address in addresses} == {LOOPBACK}


def resolve(monkeypatch, *addresses: str) -> None:
    def found(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses
        ]

    monkeypatch.setattr(module.socket, "getaddrinfo", found)


@pytest.mark.parametrize(
    ("name", "addresses", "why"),
    [
        (
            "own-name",
            ["127.0.1.1"],
            "the name may have different addresses on different machines",
        ),  # as in /etc/hosts on Debian
        (
            "two-cards",
            ["10.0.0.1", "10.1.0.1"],
            "the name may have different addresses on different machines",
        ),
        ("service", ["192.0.2.7"], r"192\.0\.2\.7 is not an address of this machine"),
    ],
)
def test_a_store_that_listens_on_all_interfaces_warns_with_the_reason(
    monkeypatch, caplog, name, addresses, why
):
    """If a name may have several addresses, or none of this machine, rank 0 listens on all
    interfaces, and ranks connect by name.
    """
    resolve(monkeypatch, *addresses)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", name)
    port = free_port()
    listener = module._listener(name, module._address_of(name, port), port)
    assert listener is None
    (message,) = caplog.messages
    pattern = f"MASTER_ADDR={name}: rank 0 listens on all interfaces at port {port}, because {why}"
    assert re.match(pattern, message)
    assert message.endswith("see SECURITY.md")


def test_the_host_name_is_loopback_if_all_ranks_are_on_this_machine(monkeypatch):
    resolve(monkeypatch, "::1", "127.0.1.1")
    monkeypatch.setenv("MASTER_ADDR", "own-name")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert module._address_of("own-name", 1) == "127.0.1.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert module._address_of("own-name", 1) == ""


def test_a_process_can_open_its_store_twice(monkeypatch, caplog):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    one = open_store(True)
    other = open_store(True)
    one.set("key", "value")
    assert other.get("key") == "value"
    assert [at for at in listening(os.getpid()) if at.endswith(f":{port:04X}")] == [
        f"{LOOPBACK}:{port:04X}"
    ]
    assert not caplog.messages

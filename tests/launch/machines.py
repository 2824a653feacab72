"""Simulates two machines as network namespaces connected by one cable; needs root and iproute2."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from tests.deadlines import Deadline, output_of

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "tests" / "launch" / "entry.py"
PORT = 29400  # cannot clash, because each namespace has its own ports
START_S = 60

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and the program ip",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Machine:
    """A network namespace with a torchrun process; ``output`` is what torchrun and its ranks
    print.
    """

    def __init__(self, number: int, name: str, interface: str) -> None:
        self.number, self.name, self.interface = number, name, interface
        self.interface_for_gloo, self.local_addr = interface, True
        self.process: subprocess.Popen[str] | None = None

    def start(self, mode: str, folder: Path, **env: str) -> None:
        """Start torchrun with entry.py, with one rank on each machine."""
        self._run([*self._torchrun(), str(ENTRY), mode, str(folder)], subprocess.PIPE, env)

    def run(self, words: list[str]) -> None:
        """Start torchrun with the arguments ``words``."""
        self._run([*self._torchrun(), *words], subprocess.PIPE, {})

    def supervise(self, words: list[str], log: Path, **env: str) -> None:
        """Start torchrun with the arguments ``words`` in the restart loop; all output goes to
        ``log``."""
        loop = str(ROOT / "examples" / "supervise.sh")
        with log.open("a") as file:
            self._run([loop, *self._torchrun(), *words], file, {"WAIT_S": "1", **env})

    def elastic(self, words: list[str], log: Path, **env: str) -> None:
        """Start an elastic torchrun (one or two machines) with the arguments ``words``.

        Torch 2.13 lets machines join later only if the shared rendezvous store is disabled.
        """
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        waits = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        torchrun = self._torchrun("--max-restarts", "3", nnodes="1:2", conf=f",{waits}")
        with log.open("a") as file:
            self._run([*torchrun, *words], file, env)

    def _torchrun(self, *more: str, nnodes: str = "2", conf: str = "") -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", nnodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-id", "test", "--rdzv-endpoint", f"10.77.0.1:{PORT}"),
            *("--rdzv-conf", f"is_host={int(self.number == 1)}{conf}"),
            *(("--local-addr", f"10.77.0.{self.number}") if self.local_addr else ()),
            *more,
        ]

    def _run(self, command: list[str], output: IO[str] | int, env: dict[str, str]) -> None:
        here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if self.interface_for_gloo:
            here["GLOO_SOCKET_IFNAME"] = self.interface_for_gloo
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=ROOT,
            env={**os.environ, **here, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def output(self, limit_s: float) -> str:
        assert self.process is not None
        return output_of(self.process, limit_s)

    def terminate(self) -> None:
        """Send SIGTERM to torchrun, like a preemption."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def pull_cable(self) -> None:
        ip("-n", self.name, "link", "set", self.interface, "down")

    def plug_in(self) -> None:
        ip("-n", self.name, "link", "set", self.interface, "up")

    def slow_down(self, rate: str) -> None:
        """Limit the outgoing rate (for example, to 2mbit)."""
        limit = ["rate", rate, "burst", "32kbit", "latency", "400ms"]
        words = ["tc", "qdisc", "replace", "dev", self.interface, "root", "tbf", *limit]
        subprocess.run(["ip", "netns", "exec", self.name, *words], check=True, capture_output=True)

    def kill(self) -> None:
        """Kill all processes at once, like a power failure."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def pids(self) -> list[int]:
        """Return the IDs of all processes in the namespace."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in done.stdout.split()]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    names = [f"sbpflow-{os.getpid()}-{number}" for number in (1, 2)]
    ends = [f"sf{os.getpid() % 10**7}.{number}" for number in (1, 2)]
    machines = [Machine(number + 1, names[number], ends[number]) for number in range(2)]
    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", ends[0], "netns", names[0], "type", "veth",
           "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        for machine in machines:
            ip("-n", machine.name, "addr", "add", f"10.77.0.{machine.number}/24",
               "dev", machine.interface)  # fmt: skip
            for interface in ("lo", machine.interface):
                ip("-n", machine.name, "link", "set", interface, "up")
        yield machines[0], machines[1]
    finally:
        for machine in machines:
            if machine.process is not None and machine.process.poll() is None:
                machine.process.kill()
                machine.process.communicate()
        for machine in machines:
            for pid in machine.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "del", machine.name)


def wait_for_ranks(folder: Path) -> dict[int, int]:
    """Return the process ID of each rank once both ranks are connected."""
    deadline = Deadline(START_S)
    files = {rank: folder / f"rank{rank}" for rank in range(2)}
    while not all(file.exists() and file.read_text() for file in files.values()):
        assert not deadline.over(), "the ranks did not start"
        time.sleep(0.05)
    return {rank: int(file.read_text()) for rank, file in files.items()}

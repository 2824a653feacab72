"""Runs embedding servers as processes for ``faults`` and ``cache_servers``."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.network import free_port
from benchmarks.proc import cpu_s

ROOT = Path(__file__).parents[1]
START_S = 60.0
END_S = 20.0


class RunningServers(NamedTuple):
    """Addresses and processes of running servers."""

    addresses: list[str]
    secret_file: str
    pids: list[int]

    def to_text(self) -> str:
        """Return this value as JSON."""
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str) -> "RunningServers":
        """Restore the value from the result of ``to_text``."""
        return cls(**json.loads(text))

    def cpu_s(self) -> float:
        """Return the CPU time of all servers."""
        return sum(map(cpu_s, self.pids))


class ServerProcesses:
    """Controls the servers at ``addresses``; ``prefixes`` are command prefixes that run a command
    on a server's host.
    """

    def __init__(
        self, folder: Path, addresses: Sequence[str], prefixes: Sequence[Sequence[str]]
    ) -> None:
        self.addresses = list(addresses)
        self.secret_file = folder / "secret"
        self.secret_file.unlink(missing_ok=True)  # an existing file would keep its mode
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(secrets.token_hex(32))
        self._prefixes, self._log = prefixes, folder / "servers.log"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for index in range(len(addresses)):
            self.start(index)

    @classmethod
    def on_loopback(cls, folder: Path, count: int) -> "ServerProcesses":
        """Start servers on free ports."""
        ports: set[int] = set()
        while len(ports) < count:
            ports.add(free_port())
        return cls(folder, [f"127.0.0.1:{port}" for port in ports], [[]] * count)

    def rule(self, cache: str, used: Sequence[int] | None = None) -> str:
        """Return a storage rule in YAML that uses the servers ``used`` (by default, all
        servers).
        """
        indices = range(len(self.addresses)) if used is None else used
        addresses = ", ".join(f"'{self.addresses[index]}'" for index in indices)
        return (
            f"{{kind: servers, cache: {cache}, addresses: [{addresses}], "
            f"secret_file: {self.secret_file}}}"
        )

    def start(self, index: int) -> None:
        """Start a server, and wait until it listens."""
        size = self._log.stat().st_size if self._log.exists() else 0
        words = ["--config", "configs/scheme3.yaml", "--index", f"{index}/{len(self.addresses)}"]
        rule = f"parallel.storage={{'deep.*': {self.rule('10%')}}}"
        with self._log.open("ab") as log:
            self._processes[index] = subprocess.Popen(
                [
                    *(*self._prefixes[index], sys.executable, "-m", "sbpflow", "embedding-server"),
                    *(*words, rule),
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + START_S
        while b" listens on " not in self._log.read_bytes()[size:]:
            if self._processes[index].poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"a server did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def kill(self, index: int) -> None:
        """Send SIGKILL to a server, and wait until it has ended."""
        self._processes[index].send_signal(signal.SIGKILL)
        self._processes[index].wait(END_S)

    @property
    def running(self) -> "RunningServers":
        """Return what other processes need to use the servers."""
        pids = [process.pid for process in self._processes.values()]
        return RunningServers(self.addresses, str(self.secret_file), pids)

    def close(self) -> None:
        """Kill all servers."""
        for index in self._processes:
            self.kill(index)

"""Starts embedding servers on this machine for ``sbpflow train --servers``."""

import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sbpflow.errors import ConfigError

_END_S = 10.0


@contextmanager
def local_servers(path: Path, overrides: Sequence[str], count: int) -> Generator[list[str]]:
    """Yield ``overrides`` with the addresses and the secret of ``count`` new servers.

    The servers listen on loopback and exit when the context or this process ends.
    """
    if count < 1:
        raise ConfigError(f"--servers must be 1 or more, got {count}; for example, --servers 2")
    from sbpflow.config.load import load_config
    from sbpflow.models.registry import MODELS

    rules = load_config(path, overrides, models=MODELS).parallel.storage
    patterns = [pattern for pattern, rule in rules.items() if rule.kind == "servers"]
    if not patterns:
        raise ConfigError(
            f"--servers is {count}, but no rule of parallel.storage has kind: servers; remove "
            '--servers, or add such a rule (for example, \'parallel.storage={"*.C1": {kind: '
            "servers, cache: 10%}}')"
        )
    for pattern in patterns:
        if rules[pattern].addresses is not None:
            raise ConfigError(
                f"--servers {count} cannot be combined with parallel.storage.{pattern}.addresses, "
                "which lists servers that are already running; remove one of the two"
            )
    options = _options(path, count)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="sbpflow-")))
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        listeners = [
            opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        addresses = ", ".join(f"127.0.0.1:{sock.getsockname()[1]}" for sock in listeners)
        words = list(overrides)
        for pattern in patterns:
            key = f"parallel.storage.{pattern}"
            words += [f"{key}.addresses=[{addresses}]", f"{key}.secret_file={secret}"]
        for index, listener in enumerate(listeners):
            given = [*options, "--index", f"{index}/{count}", *words]
            opened.callback(_stop, _start(given, listener))
            listener.close()
        yield words


def _options(path: Path, count: int) -> list[str]:
    """Return the options of all servers, which share the memory of this machine."""
    from sbpflow.runtime.compute.devices import memory_bytes

    options = ["--config", str(path)]
    if (memory := memory_bytes("cpu")) is not None:
        options += ["--memory-gb", f"{memory / count / 1e9:.6f}"]
    return options


def _start(words: Sequence[str], listener: socket.socket) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "sbpflow", "embedding-server", *words]
    command += ["--listener", str(listener.fileno())]
    # Ctrl-C must reach only the ranks; the servers exit later, when their stdin is closed.
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )


def _stop(server: "subprocess.Popen[bytes]") -> None:
    if server.stdin is not None:
        server.stdin.close()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()

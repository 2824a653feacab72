"""Starts a benchmark's ranks on loopback or in two network namespaces joined by a slower link.

The namespaces act as hosts on one machine and need root and the commands ip and tc. A link slower
than loopback makes waits for the network visible.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOSTS = tuple(f"sbp{os.getpid()}-{number}" for number in range(2))  # names unique to this process
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "wire"
BURST_S, LEAST_BURST = 0.002, 1 << 16
# TCP uses cubic, Linux's default, even if the machine's default differs.
_CUBIC = f"ip route replace 10.77.0.0/24 dev {INTERFACE} congctl cubic".split()


def sending_rates(rate: str) -> list[str]:
    """Return the rates at which the two hosts send: one rate is used by both, and two rates are
    separated by a comma, such as "1gbit,250mbit".
    """
    rates = rate.split(",")
    if len(rates) > len(HOSTS):
        raise SystemExit(f"--link {rate}: use one or two rates, such as 1gbit,250mbit")
    return rates * (len(HOSTS) // len(rates))


def _shape_of(device: str, rate: str) -> list[str]:
    """Return the command that limits the rate at which ``device`` sends.

    After a pause, tbf sends a burst at full speed. The burst is limited to 2 ms at the given rate,
    or one large packet; with larger bursts, the transfers of short steps would be free.
    """
    match = re.fullmatch(r"(\d+)([gm])bit", rate)
    if match is None:
        raise SystemExit(f"--link {rate}: use a rate such as 1gbit or 100mbit")
    bytes_per_s = int(match[1]) * {"g": 1e9, "m": 1e6}[match[2]] / 8
    burst = round(max(BURST_S * bytes_per_s, LEAST_BURST))
    words = f"tc qdisc add dev {device} root tbf rate {rate} burst {burst}b latency 50ms"
    return words.split()


@contextmanager
def two_hosts(rate: str) -> Iterator[list[list[str]]]:
    """Yield, for each host, a command prefix that runs a command on it.

    ``rate`` is, for example, "1gbit" or "100mbit"; see ``sending_rates``.
    """
    rates = sending_rates(rate)
    try:
        for host in HOSTS:
            _run("ip", "netns", "add", host)
        _run("ip", "link", "add", HOSTS[0], "type", "veth", "peer", "name", HOSTS[1])
        for host, address, sending in zip(HOSTS, ADDRESSES, rates, strict=True):
            _run("ip", "link", "set", host, "netns", host)
            inside = ("ip", "netns", "exec", host)
            _run(*inside, "ip", "link", "set", host, "name", INTERFACE)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run(*inside, "ip", "link", "set", INTERFACE, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, *_shape_of(INTERFACE, sending))
            _run(*inside, *_CUBIC)
        yield [["ip", "netns", "exec", host] for host in HOSTS]
    finally:
        _delete(HOSTS)


@contextmanager
def switched_hosts(rates: Sequence[str]) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Yield command prefixes and addresses of hosts that are connected to one switch.

    ``rates`` limits the link of each host in both directions, such as "100mbit".
    """
    names = [f"sbp{os.getpid()}-h{number}" for number in range(len(rates))]
    switch = f"sbp{os.getpid()}-switch"
    addresses = [f"10.77.0.{number + 1}" for number in range(len(rates))]
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
        inside = ("ip", "netns", "exec", switch)
        _run(*inside, "ip", "link", "add", "bridge", "type", "bridge")
        _run(*inside, "ip", "link", "set", "bridge", "up")
        for number, (name, rate) in enumerate(zip(names, rates, strict=True)):
            port = f"port{number}"
            _run(
                *inside, "ip", "link", "add", port, "type", "veth", "peer", INTERFACE, "netns", name
            )
            _run(*inside, "ip", "link", "set", port, "master", "bridge", "up")
            host = ("ip", "netns", "exec", name)
            _run(*host, "ip", "addr", "add", f"{addresses[number]}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _run(*host, "ip", "link", "set", device, "up")
            _run(*host, *_CUBIC)
            for place, device in ((inside, port), (host, INTERFACE)):
                _run(*place, *_shape_of(device, rate))
        yield [["ip", "netns", "exec", name] for name in names], addresses
    finally:
        _delete((*names, switch))


def ranks_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the options that ``result_of_ranks`` adds; ``doc`` is the docstring of
    the benchmark.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser


def result_of_ranks(module: str, world_size: int, *words: str, link: str | None) -> Any:  # noqa: ANN401 (what the benchmark writes)
    """Run the ranks with the options of this program and then ``words``, as ``start_ranks`` does;
    return the JSON value that rank 0 writes to the file ``--output``.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        start_ranks(module, world_size, [*sys.argv[1:], *words, "--output", str(output)], link=link)
        return json.loads(output.read_text())


def start_ranks(
    module: str,
    world_size: int,
    words: Sequence[str],
    *,
    link: str | None,
    folder: Path | None = None,
) -> None:
    """Run ``python -m module --worker WORDS`` on every rank; raise SystemExit if a rank fails.

    If ``link`` is a rate or two (``sending_rates``), each half of the ranks runs in a namespace.
    ``folder`` is the checkout that contains the module; the default is the current folder.
    """
    if link is None:
        code = _run_ranks(module, world_size, words, "127.0.0.1", [[]], {}, folder)
    elif world_size % len(HOSTS):
        raise SystemExit(
            f"--link divides the ranks over {len(HOSTS)} hosts; use an even number of ranks"
        )
    else:
        interface = {"GLOO_SOCKET_IFNAME": INTERFACE}
        with two_hosts(link) as prefixes:
            code = _run_ranks(module, world_size, words, ADDRESSES[0], prefixes, interface, folder)
    if code:
        raise SystemExit(f"a rank ended with status {code}")


def _run_ranks(
    module: str,
    world_size: int,
    words: Sequence[str],
    address: str,
    prefixes: list[list[str]],
    environment: dict[str, str],
    folder: Path | None,
) -> int:
    """Return the first nonzero exit status, or 0; each of ``prefixes`` runs a command on a host."""
    each = world_size // len(prefixes)
    shared = os.environ | {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(each),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    ranks = [
        subprocess.Popen(
            [*prefixes[rank // each], sys.executable, "-m", module, "--worker", *words],
            cwd=folder,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % each)},
        )
        for rank in range(world_size)
    ]
    return next((code for code in [process.wait() for process in ranks] if code), 0)


def free_port() -> int:
    """Return a port that no process uses."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def _delete(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}; this needs root, ip and tc")

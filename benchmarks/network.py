"""Two "hosts" on one machine: network namespaces joined by a link of a given rate.

Needs root and the commands ip and tc. Rates below loopback's show what waits for the network.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

HOSTS = ("sbpflow0", "sbpflow1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "wire"


@contextmanager
def two_hosts(rate: str) -> Iterator[list[list[str]]]:
    """Command prefixes that run inside each host; ``rate`` as tc writes it, such as "1gbit"."""
    _take_down()
    try:
        for host in HOSTS:
            _run("ip", "netns", "add", host)
        _run("ip", "link", "add", "wire0", "type", "veth", "peer", "name", "wire1")
        for index, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
            _run("ip", "link", "set", f"wire{index}", "netns", host)
            inside = ("ip", "netns", "exec", host)
            _run(*inside, "ip", "link", "set", f"wire{index}", "name", INTERFACE)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run(*inside, "ip", "link", "set", INTERFACE, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            shape = ("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf")
            _run(*inside, *shape, "rate", rate, "burst", "256kb", "latency", "50ms")
        yield [["ip", "netns", "exec", host] for host in HOSTS]
    finally:
        _take_down()


def _take_down() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}; this needs root, ip and tc")

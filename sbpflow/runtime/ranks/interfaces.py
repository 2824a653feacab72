"""Chooses the network interface through which gloo connects the ranks.

gloo publishes the address to which this machine's own name resolves. On many machines, such as
those with Debian's /etc/hosts, this is a loopback address, so ranks on other machines would connect
to themselves. In this case, each rank of a run on several hosts uses the interface that leads to
another host.
"""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
import sys

from sbpflow.errors import ConfigError
from sbpflow.runtime.processes.environment import machine_name
from sbpflow.runtime.processes.startup import gather
from sbpflow.runtime.processes.store import TimedStore, all_ranks_here
from sbpflow.runtime.ranks.topology import Topology

LOG = logging.getLogger(__name__)

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921  # ioctl request codes; see netdevice(7).
_ANY_PORT = 9  # Any port: connecting a UDP socket sends nothing.


def choose_interface(
    store: TimedStore | None, rank: int, topology: Topology, timeout_s: float
) -> None:
    """Set GLOO_SOCKET_IFNAME for this process if it is needed and not yet set. All ranks must call
    this function.

    Raises ConfigError if this machine's name resolves to no address or to a loopback address, and
    no interface leads to the other hosts.
    """
    main = os.environ.get("MASTER_ADDR", "")
    if store is None or not main:
        return
    if len(topology.hosts) == 1 or all_ranks_here():  # a file may describe several hosts
        # gloo does not authenticate peers, so ranks of a single host use only the loopback
        # interface, which is the first interface on every machine.
        os.environ.setdefault(_INTERFACE, socket.if_indextoname(1))
        return
    # On rank 0's own machine, the name in MASTER_ADDR may resolve to the loopback interface. That
    # machine therefore uses its route to another host's address instead.
    mine = source_address(main)
    by_rank = gather(store, "address", rank, topology.size, mine, timeout_s)
    own = own_addresses()
    if _INTERFACE in os.environ or (own and not is_loopback(own[0])):
        return
    here = topology.host_of(rank)
    others = [text for n, text in enumerate(by_rank) if text and topology.host_of(n) != here]
    for address in [mine, *map(source_address, others)]:
        if name := interface_of(address):
            os.environ[_INTERFACE] = name
            LOG.info(
                "%s resolves to %s on its own machine; using %s (%s) to reach the other hosts",
                *(socket.gethostname(), own[0] if own else "nothing", name, address),
            )
            return
    raise ConfigError(
        f"the name of this machine, {machine_name()}, resolves to {own[0] if own else 'nothing'}, "
        "so other machines cannot reach its ranks, and no interface to the other hosts was "
        f"found; set {_INTERFACE} to the interface that reaches them (for example, "
        f"{_INTERFACE}=eth0), or correct the address of this name in /etc/hosts"
    )


def own_addresses() -> list[str]:
    """Return the addresses that this machine's own name resolves to, the preferred one first."""
    return resolve(socket.gethostname())


def resolve(name: str) -> list[str]:
    """Return the addresses of a name, without duplicates; [] if the name does not resolve."""
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))


def is_loopback(address: str) -> bool:
    """Return whether this is a loopback address, which leads each machine to itself."""
    return ipaddress.ip_address(address).is_loopback


def source_address(target: str) -> str:
    """Return this machine's IPv4 address on the route to ``target``, or "" if there is no route or
    it uses the loopback interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _ANY_PORT))
        except (OSError, UnicodeError):
            return ""
        address = str(probe.getsockname()[0])
    return "" if is_loopback(address) else address


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address, or ""."""
    if not sys.platform.startswith("linux"):
        return ""
    for _, name in socket.if_nameindex():
        answer = _ask(name, _SIOCGIFADDR)
        if answer is not None and address == socket.inet_ntoa(answer[20:24]):
            return name
    return ""


def mtu_of(interface: str) -> int | None:
    """Return the MTU of an interface in bytes, or None if it is unknown."""
    answer = _ask(interface, _SIOCGIFMTU) if sys.platform.startswith("linux") else None
    return None if answer is None else struct.unpack_from("i", answer, 16)[0]


def _ask(interface: str, request: int) -> bytes | None:
    """Return the kernel's reply about an interface, or None if the request fails."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return fcntl.ioctl(any_socket, request, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None

"""The key-value store through which ranks find each other, with a time limit for each operation.

torch's store listens on all interfaces without authentication. If ranks are started by hand, rank 0
serves the store on the interface of MASTER_ADDR only, where possible.

torch's client has no timeout for sends and receives, so it blocks forever if the store's host drops
off the network. Therefore each operation runs in its own thread, which is abandoned at the time
limit.
"""

import errno
import functools
import ipaddress
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sbpflow.errors import AbsentError, ConfigError, PeerLostError
from sbpflow.runtime.processes.background import in_background
from sbpflow.runtime.processes.environment import env_int

if TYPE_CHECKING:
    from torch.distributed import Store

LOG = logging.getLogger(__name__)

CONNECT_S = 60.0  # Time limit for rank 0 to start listening, long enough for all ranks to start.
_MISLED_S = 10.0  # The same limit if the host name probably resolves to the wrong machine.
ANSWER_S = 5.0  # Time limit for one operation, which usually takes 1 ms (100 ms if busy).
# Wait at least ``_GREET_S`` for the listening process to prove that it is rank 0.
_GREET_S = 5.0
_POLL_S = 0.2
_BACKLOG = 4096  # all ranks connect at the same time; torch uses the same value

Result = TypeVar("Result")


def within(limit_s: float, call: Callable[[], Result], what: str) -> Result:
    """Return the result of ``call``, or raise its error; raise PeerLostError after ``limit_s``.

    ``call`` runs in a thread, which is abandoned at the limit.
    """
    future = in_background(call, what)
    wait([future], limit_s)
    if not future.done():
        raise PeerLostError(f"{what}: no answer within {limit_s:g} s")
    return future.result()


def polls(first_s: float, longest_s: float) -> Generator[None]:
    """Yield forever: first immediately, then after pauses that grow from ``first_s`` to
    ``longest_s``.
    """
    pause = first_s
    while True:
        yield
        time.sleep(pause)
        pause = min(1.2 * pause, longest_s)


class TimedStore:
    """Wraps a store so that operations raise PeerLostError if they fail or time out.

    After the first failure, every later operation fails immediately. Values are strings.
    """

    def __init__(self, store: "Store", where: str) -> None:
        self.torch_store = store
        self.where = where
        self.answer_s = ANSWER_S
        self._lost: PeerLostError | None = None

    def set(self, key: str, value: str) -> None:
        """Write one value."""
        self._talk("set", lambda: self.torch_store.set(key, value))

    def set_all(self, values: dict[str, str]) -> None:
        """Write several values."""
        keys, texts = list(values), list(values.values())
        store = cast("Any", self.torch_store)  # torch's type stub lacks ``multi_set``
        self._talk("set", partial(store.multi_set, keys, texts))

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Return the values of existing keys."""
        if not keys:
            return []
        raw = self._talk("get", lambda: self.torch_store.multi_get(list(keys)))
        return [value.decode() for value in raw]

    def get(self, key: str) -> str:
        """Return the value of an existing key."""
        return self.get_all([key])[0]

    def claim(self, key: str, value: str) -> str:
        """Write ``value`` if the key does not exist; then return the key's value."""
        raw = self._talk("claim", lambda: self.torch_store.compare_set(key, "", value))
        return raw.decode()

    def add(self, key: str, number: int) -> int:
        """Add to a counter that starts at 0; return its new value."""
        return self._talk("add", lambda: self.torch_store.add(key, number))

    def forget(self, keys: Sequence[str]) -> None:
        """Delete keys."""
        for key in keys:
            self._talk("delete", partial(self.torch_store.delete_key, key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return self._talk("check", lambda: self.torch_store.check(list(keys)))

    def _talk(self, name: str, call: Callable[[], Result]) -> Result:
        if self._lost is not None:
            raise self._lost
        what = f"the store at {self.where}, {name}"
        try:
            return within(self.answer_s, call, what)
        except PeerLostError as error:
            self._lost = error
            raise
        except RuntimeError as error:  # torch's stores raise only this error class
            self._lost = PeerLostError(f"{what}: {first_line(error)}")
            raise self._lost from error


def store_of_group(name: str) -> TimedStore:
    """Return a key-value store for the ranks of torch's default process group, with a separate set
    of keys per ``name``. The store has its own connection, because a connection performs one
    operation at a time."""
    from torch.distributed import PrefixStore, distributed_c10d

    # torch has no public function for the default store, and its type stub lacks ``clone``.
    store = cast("Any", distributed_c10d._get_default_store())  # pyright: ignore[reportPrivateUsage]
    return TimedStore(PrefixStore(name, store.clone()), "the ranks' rendezvous address")


def open_store(serves: bool) -> TimedStore:
    """Open the store that the launcher's environment describes, which this process ``serves`` or
    joins.

    Raises ConfigError if the environment is invalid or the port is taken, and AbsentError if rank 0
    does not answer.
    """
    from torch.distributed import TCPStore

    host, port = os.environ.get("MASTER_ADDR", ""), env_int("MASTER_PORT", -1)
    if not host or not 0 <= port < 2**16:
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port} must be the address and port of rank 0, "
            "because WORLD_SIZE is above 1; start with torchrun, or set, for example, "
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29501"
        )
    try:
        address = _address_of(host, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR={host!r}: this name does not resolve ({first_line(error)}); use "
            "the name or address of rank 0's machine (MASTER_ADDR=127.0.0.1 works if all ranks "
            "are on this machine)"
        ) from error
    if address and ipaddress.ip_address(address).is_loopback:
        host = address  # if a name has IPv4 and IPv6 addresses, torch tries IPv6 first
    end = time.monotonic() + CONNECT_S
    listener = _listener(host, address, port) if serves else None
    if not serves:
        misled = _misled(host, port)
        _await_listener(
            host, port, min(end, time.monotonic() + _MISLED_S) if misled else end, misled
        )
    left_s = max(end - time.monotonic(), _GREET_S)

    def serve_or_join() -> "Store":
        store = TCPStore(
            host,
            port,
            None,
            serves,
            timedelta(seconds=left_s),
            wait_for_workers=False,
            multi_tenant=True,
            # torch takes ownership of the socket.
            master_listen_fd=None if listener is None else listener.detach(),
        )
        store.set_timeout(timedelta(seconds=CONNECT_S))
        return store

    try:
        # The constructor ignores its timeout if the listener is not a TCPStore.
        store = within(
            left_s, serve_or_join, "the process listening there is not a rank of this run"
        )
    except RuntimeError as error:  # includes torch's DistNetworkError
        raise no_store(host, port, serves, error) from error
    return TimedStore(store, f"{host}:{port}")


def loopback_name(host: str) -> bool:
    """Return whether ``host`` is a loopback address or name, which leads each machine to itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address_of(host: str, port: int) -> str:
    """Return the address of ``host``, or "" if ranks may see different addresses. Ranks may see
    different addresses if the name has several addresses, or if the run includes other machines and
    the name is this machine's own, which resolves to 127.0.1.1 on Debian.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))
    loopback = [address for address in addresses if ipaddress.ip_address(address).is_loopback]
    if loopback:
        return min(loopback, key=lambda address: ":" in address) if all_ranks_here() else ""
    return addresses[0] if len(addresses) == 1 else ""


def all_ranks_here() -> bool:
    """Return whether all ranks are on this machine according to the launcher's environment."""
    local, size = env_int("LOCAL_WORLD_SIZE", 0), env_int("WORLD_SIZE", 1)
    return local == size or loopback_name(os.environ.get("MASTER_ADDR", ""))


def _misled(host: str, port: int) -> str:
    """Return why torchrun's address of rank 0 probably leads to this machine instead, or "" if it
    does not. torchrun publishes the name that rank 0's machine has for itself. torchrun's store
    listens before the ranks start, so a closed port means a wrong address.
    """
    if env_int("GROUP_RANK", 0) == 0:
        return ""
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port)}
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return ""
    return (
        f"torchrun on rank 0's machine published the name {host}, which resolves to this machine "
        "itself "
        f"({', '.join(sorted(addresses))}); start torchrun on every machine with --local-addr and "
        "an address of that machine (for example, --local-addr 10.0.0.1)"
    )


def _listener(host: str, address: str, port: int) -> socket.socket | None:
    """Return a socket that listens only at ``address``, or None to let torch create a socket.

    torch's socket listens on all interfaces, so returning None logs a warning, unless the port is
    in use: torch then either reuses its own socket in this process or raises an error that names
    the port.
    """
    why = "the name may have different addresses on different machines"
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            why = f"{address} is not an address of this machine ({first_line(error)})"
        else:
            return listener
    _warn_of_all_interfaces(host, port, why)
    return None


@functools.cache  # a process may open its store several times
def _warn_of_all_interfaces(host: str, port: int, why: str) -> None:
    LOG.warning(
        "MASTER_ADDR=%s: rank 0 listens on all interfaces at port %d, because %s; see SECURITY.md",
        *(host, port, why),
    )


def _await_listener(host: str, port: int, end: float, misled: str = "") -> None:
    """Wait until a process listens at the store's address. Raise AbsentError at time ``end``
    (time.monotonic()), with the reason ``misled``, if any. torch's store would also wait, but would
    log a C++ stack trace for every attempt.
    """
    while True:
        left_s = end - time.monotonic()
        patience_s = min(max(left_s, _POLL_S), _GREET_S)
        try:
            socket.create_connection((host, port), timeout=patience_s).close()
        except OSError as error:
            if left_s < _POLL_S and misled:
                raise AbsentError(f"MASTER_ADDR: {misled}") from error
            if left_s < _POLL_S:
                why = (error.strerror or str(error)).lower()
                raise no_store(
                    host, port, False, ConnectionError(f"no process listens there: {why}")
                ) from error
            time.sleep(_POLL_S)
        else:
            return


def no_store(host: str, port: int, serves: bool, error: BaseException) -> Exception:
    """Return the error for a process that cannot serve or join the store."""
    if "EADDRINUSE" in str(error) or "ddress already in use" in str(error):
        return ConfigError(
            f"MASTER_PORT: port {port} is in use, probably by another run; start with torchrun "
            f"--standalone, or use a free port such as --master-port {port % 60000 + 1101}"
        )
    if serves:
        return ConfigError(
            f"MASTER_ADDR, MASTER_PORT: rank 0 cannot listen on {host}:{port} "
            f"({first_line(error)}); use an address of rank 0's own machine and a port that it "
            "may use, such as 29501"
        )
    return AbsentError(
        f"rank 0 did not answer at MASTER_ADDR, MASTER_PORT {host}:{port} within {CONNECT_S:g} s "
        f"({first_line(error)}); read the output of rank 0, and check that it was started, that "
        "its address and port are right, and that no firewall blocks the connection"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error without the source position and stack that torch adds."""
    line = str(error).strip().split("\n", 1)[0]
    line = re.sub(r"^\[/\S+\]\s*", "", line).split(". ", 1)[0]
    return line.encode("ascii", "replace").decode() or type(error).__name__

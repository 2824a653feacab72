"""The store through which ranks find each other, and the promise that talking to it ends.

torch's store listens on all interfaces and asks nobody who they are; where rank 0 of ranks started
by hand serves one, it listens on the interface that MASTER_ADDR names.

torch's store waits without limit where its host has gone from the network: a send or a receive of
its client has no timeout. So each operation here runs in a thread of its own and is given up.
"""

import errno
import functools
import ipaddress
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sbpflow.errors import AbsentError, ConfigError, PeerLostError
from sbpflow.runtime.processes.environment import env_int

if TYPE_CHECKING:
    from torch.distributed import Store

LOG = logging.getLogger(__name__)

CONNECT_S = 60.0  # for rank 0 to be up: ranks of one run start within this of each other
ANSWER_S = 5.0  # of one operation: an answer takes a millisecond, on a busy machine a tenth of one
_GREET_S = 5.0  # of the first at least, for who listens there to show that it is rank 0
_POLL_S = 0.2
_BACKLOG = 4096  # as torch's own: all ranks connect at once

Result = TypeVar("Result")


def within(limit_s: float, call: Callable[[], Result], what: str) -> Result:
    """What ``call`` returns or raises; PeerLostError if it is not back in time.

    It runs in a thread, which is left behind then.
    """
    done: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if not done:
        raise PeerLostError(f"{what}: no answer within {limit_s:g} s")
    return done[0]


class TimedStore:
    """A store whose operations end: PeerLostError where it fails or does not answer.

    After the first such failure every operation fails at once. Values are text.
    """

    def __init__(self, store: "Store", where: str, *, answer_s: float = ANSWER_S) -> None:
        self.torch_store = store
        self.where = where
        self.answer_s = answer_s
        self._lost: PeerLostError | None = None

    def set(self, key: str, value: str) -> None:
        """Write one value."""
        self._talk("set", lambda: self.torch_store.set(key, value))

    def set_all(self, values: dict[str, str]) -> None:
        """Write several values."""
        keys, texts = list(values), list(values.values())
        store = cast("Any", self.torch_store)  # the stub lacks it
        self._talk("set", partial(store.multi_set, keys, texts))

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """The values of keys that are there."""
        if not keys:
            return []
        raw = self._talk("get", lambda: self.torch_store.multi_get(list(keys)))
        return [value.decode() for value in raw]

    def get(self, key: str) -> str:
        """The value of a key that is there."""
        return self.get_all([key])[0]

    def claim(self, key: str, value: str) -> str:
        """Write ``value`` if the key is not there; what is there then."""
        raw = self._talk("claim", lambda: self.torch_store.compare_set(key, "", value))
        return raw.decode()

    def add(self, key: str, number: int) -> int:
        """Add to a counter that starts at 0; its value then."""
        return self._talk("add", lambda: self.torch_store.add(key, number))

    def forget(self, keys: Sequence[str]) -> None:
        """Take keys away with their values."""
        for key in keys:
            self._talk("delete", partial(self.torch_store.delete_key, key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
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
        except RuntimeError as error:  # all that torch's stores raise
            self._lost = PeerLostError(f"{what}: {first_line(error)}")
            raise self._lost from error


def open_store(serves: bool) -> TimedStore:
    """The store of the launcher's environment; this process ``serves`` it, or joins it.

    ConfigError where the environment does not fit or the port is taken, AbsentError where nobody
    answers.
    """
    from torch.distributed import TCPStore

    host, port = os.environ.get("MASTER_ADDR", ""), env_int("MASTER_PORT", -1)
    if not host or not 0 <= port < 2**16:
        raise ConfigError(
            f"MASTER_ADDR={host!r} MASTER_PORT={port}: WORLD_SIZE is above 1, so the ranks need a "
            "place to meet; start with torchrun, or set for example MASTER_ADDR=127.0.0.1 "
            "MASTER_PORT=29501"
        )
    try:
        address = _address_of(host, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR={host!r}: this name does not resolve ({first_line(error)}); give "
            "the name or address of the machine of rank 0, for example MASTER_ADDR=127.0.0.1 if "
            "all ranks are on this one"
        ) from error
    if address and ipaddress.ip_address(address).is_loopback:
        host = address  # torch tries IPv6 first and waits there, where the name has both
    end = time.monotonic() + CONNECT_S
    listener = _listener(host, address, port) if serves else None
    if not serves:
        _await_listener(host, port, end)
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
            # torch takes the socket over, and closes it.
            master_listen_fd=None if listener is None else listener.detach(),
        )
        store.set_timeout(timedelta(seconds=CONNECT_S))
        return store

    try:
        # In a thread: against a listener that is no TCPStore the constructor ignores its timeout.
        store = within(left_s, serve_or_join, "the listener there is not a rank of this run")
    except RuntimeError as error:  # DistNetworkError among them
        raise no_store(host, port, serves, error) from error
    return TimedStore(store, f"{host}:{port}")


def loopback_name(host: str) -> bool:
    """Whether ``host`` means this machine to every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address_of(host: str, port: int) -> str:
    """The address that ``host`` means to all ranks; "" where they may see different ones.

    As a name with several addresses, or one that is this machine's own name and resolves to
    127.0.1.1 here, as on Debian, while other machines may be in the run.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))
    loopback = [one for one in found if ipaddress.ip_address(one).is_loopback]
    if loopback:
        return min(loopback, key=lambda one: ":" in one) if all_ranks_here() else ""
    return found[0] if len(found) == 1 else ""


def all_ranks_here() -> bool:
    """Whether the launcher says that all ranks are on this machine."""
    local, size = env_int("LOCAL_WORLD_SIZE", 0), env_int("WORLD_SIZE", 1)
    return local == size or loopback_name(os.environ.get("MASTER_ADDR", ""))


def _listener(host: str, address: str, port: int) -> socket.socket | None:
    """A socket that listens at ``address`` alone; None where torch is to make one.

    torch's listens on all interfaces, which a warning says, or is one that it has in this process
    already; where another process has the port, torch's error names it.
    """
    why = "it is not one address to all machines"
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


@functools.cache  # a process opens its store more than once
def _warn_of_all_interfaces(host: str, port: int, why: str) -> None:
    LOG.warning(
        "MASTER_ADDR=%s: rank 0 listens on all interfaces at port %d, for %s; see SECURITY.md",
        *(host, port, why),
    )


def _await_listener(host: str, port: int, end: float) -> None:
    """Return once somebody listens there; AbsentError at ``end``, in time.monotonic().

    torch's store would wait as well, but its log has frames of C++ for every attempt.
    """
    while True:
        left_s = end - time.monotonic()
        patience_s = min(max(left_s, _POLL_S), _GREET_S)
        try:
            socket.create_connection((host, port), timeout=patience_s).close()
        except OSError as error:
            if left_s < _POLL_S:
                why = (error.strerror or str(error)).lower()
                raise no_store(
                    host, port, False, ConnectionError(f"nobody listens there: {why}")
                ) from error
            time.sleep(_POLL_S)
        else:
            return


def no_store(host: str, port: int, serves: bool, error: BaseException) -> Exception:
    """What to raise when the store could not be served, or was not there."""
    if is_port_in_use(error):
        return port_in_use(port)
    if serves:
        return ConfigError(
            f"MASTER_ADDR, MASTER_PORT: cannot listen on {host}:{port} ({first_line(error)}); rank "
            "0 needs a name of its own machine and a port that it may use"
        )
    return AbsentError(
        f"rank 0 did not answer at MASTER_ADDR, MASTER_PORT {host}:{port} within {CONNECT_S:g} s "
        f"({first_line(error)}); check that it was started and what it printed, that its name and "
        "port are right, and that no firewall is between"
    )


def is_port_in_use(error: BaseException) -> bool:
    """Whether a store could not be served because somebody else has its port."""
    return "EADDRINUSE" in str(error) or "ddress already in use" in str(error)


def port_in_use(port: int | str) -> ConfigError:
    """The message for it, with what to do."""
    return ConfigError(
        f"MASTER_PORT: port {port} is in use, probably by another run; start with torchrun "
        f"--standalone, or give a free port such as --master-port {int(port) % 60000 + 1101}"
    )


def first_line(error: BaseException) -> str:
    """What an error says, without the source position and the frames that torch adds."""
    line = str(error).strip().split("\n", 1)[0]
    line = re.sub(r"^\[/\S+\]\s*", "", line).split(". ", 1)[0]
    return line.encode("ascii", "replace").decode() or type(error).__name__

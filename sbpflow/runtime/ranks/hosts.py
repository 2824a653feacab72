"""Which ranks share a host: found by all of them together, once, when they start.

A host is a network namespace: inside it ranks reach each other without a link. Names cannot tell
hosts apart, for containers on one machine share its boot ID and may share its host name and
/dev/shm although a limited link joins them. So the ranks of a host find each other through an
abstract Unix socket. All try to bind one name, which the kernel gives to a single process of a
namespace; the others read from that one who it is. This takes one connection per rank, leaves no
file, and the name is free again when its process ends.
"""

import contextlib
import errno
import json
import logging
import socket
import sys
import threading
import time
import uuid
from collections.abc import Generator, Sequence

from sbpflow.errors import AbsentError, ConfigError
from sbpflow.runtime.compute.devices import memory_bytes
from sbpflow.runtime.processes.environment import env_int
from sbpflow.runtime.processes.startup import gather
from sbpflow.runtime.processes.store import TimedStore, all_ranks_here, first_line
from sbpflow.runtime.ranks.topology import HostsSource, Topology

LOG = logging.getLogger(__name__)

_RETRY_S = 0.01
_LONGEST_ANSWER = 64  # bytes


def find_topology(
    store: TimedStore | None, rank: int, size: int, device_type: str, timeout_s: float
) -> Topology:
    """Who shares a host with whom, and the memory of each rank; the same value on all ranks.

    All ranks that ``store`` joins must call it; a second call returns the same. AbsentError, with
    the ranks, where some do not take part within ``timeout_s``.
    """
    if store is None or size == 1:
        return assumed_topology(size, device_type)
    store.answer_s = max(timeout_s, store.answer_s)
    mine, end = f"host/{rank}", time.monotonic() + timeout_s
    with contextlib.ExitStack() as until_all_know:
        if store.check([mine]):  # this process has asked before
            said = store.get(mine)
        else:
            secret = store.claim("host secret", uuid.uuid4().hex)
            leader, source = until_all_know.enter_context(_leader_here(secret, rank, size, end))
            said = json.dumps([leader, source, memory_bytes(device_type)])
        found = [json.loads(one) for one in gather(store, "host", rank, size, said, timeout_s)]
    leaders, sources, memory = zip(*found, strict=True)
    source: HostsSource = "assumed" if "assumed" in sources else "handshake"
    return _topology(leaders, source, memory, device_type)


def assumed_topology(size: int, device_type: str) -> Topology:
    """All ranks on one host like this machine."""
    return _topology([0] * size, "assumed", [memory_bytes(device_type)] * size, device_type)


def _topology(
    leaders: Sequence[int], source: HostsSource, memory: Sequence[int | None], device_type: str
) -> Topology:
    """From each rank's leader and the memory that it sees: of a GPU its own, else its host's."""
    by_leader: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        by_leader.setdefault(leader, []).append(rank)
    shares = [1 if device_type == "cuda" else len(by_leader[leader]) for leader in leaders]
    known = [
        total // share for total, share in zip(memory, shares, strict=True) if total is not None
    ]
    return Topology(
        hosts=tuple(map(tuple, by_leader.values())),
        hosts_source=source,
        memory_bytes=tuple(known) if len(known) == len(leaders) else None,
    )


@contextlib.contextmanager
def _leader_here(
    secret: str, rank: int, size: int, end: float
) -> Generator[tuple[int, HostsSource]]:
    """The rank that leads this rank's host, and how it is known; answers others until left.

    ``secret`` is of this start of the job: half of it names the socket, the other half shows that
    who answers belongs to it. Raises AbsentError where the leader does not answer until ``end``.
    """
    name, token = f"\0sbpflow/{secret[:16]}", secret[16:]
    with contextlib.ExitStack() as stack:
        while True:
            try:
                if time.monotonic() >= end:
                    raise TimeoutError
                leader = _ask(name, token, end)
                if leader is None:
                    stack.enter_context(_answering(name, f"{token} {rank}"))
                    leader = rank
            except TimeoutError as error:
                raise AbsentError(
                    "the first rank on this host does not answer through its Unix socket, and "
                    f"rank {rank} has waited until its limit; check that no rank is stopped, and "
                    "that parallel.timeout_s is longer than the slowest start"
                ) from error
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    yield _leader_by_environment(rank, size, error), "assumed"
                    return
                time.sleep(_RETRY_S)  # taken meanwhile: ask who has it
            else:
                yield leader, "handshake"
                return


def _ask(name: str, token: str, end: float) -> int | None:
    """The rank that holds ``name`` in this namespace; None where nobody does (any more)."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.EAFNOSUPPORT, f"{sys.platform} has no abstract Unix sockets")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(max(end - time.monotonic(), _RETRY_S))
        try:
            peer.connect(name)
            with peer.makefile("rb") as answer:
                said = answer.read(_LONGEST_ANSWER).decode(errors="replace").split()
        except (ConnectionError, BlockingIOError):  # nobody listens, has ended, or is asked by many
            return None
    return int(said[1]) if len(said) == 2 and said[0] == token else None


@contextlib.contextmanager
def _answering(name: str, answer: str) -> Generator[None]:
    """Hold ``name``, and say ``answer`` to each that asks; EADDRINUSE where another holds it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(socket.SOMAXCONN)

        def answer_all() -> None:
            with contextlib.suppress(OSError):  # as shutdown makes accept raise
                while True:
                    peer, _ = listener.accept()
                    with peer, contextlib.suppress(OSError):  # it may have ended
                        peer.sendall(answer.encode())

        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _leader_by_environment(rank: int, size: int, error: OSError) -> int:
    """By LOCAL_WORLD_SIZE, with ranks in order, where no socket can say; ConfigError without it."""
    local = size if all_ranks_here() else env_int("LOCAL_WORLD_SIZE", 0)
    if local < 1 or size % local:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local or 'unset'}: which of the {size} ranks share a host cannot "
            f"be found here ({first_line(error)}); start with torchrun and equally many ranks on "
            "each host, or describe the hosts in a file: parallel.topology=hosts.yaml"
        )
    if rank % local == 0:
        LOG.warning(
            "ranks %d..%d are assumed to share a host, as LOCAL_WORLD_SIZE or MASTER_ADDR says: %s",
            *(rank, rank + local - 1, first_line(error)),
        )
    return rank - rank % local

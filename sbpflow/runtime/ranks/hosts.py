"""Discovers, when the ranks start, which of them share a host.

A host is a network namespace: ranks in the same namespace communicate without a network link. Names
cannot distinguish hosts: containers on one machine share the machine's boot ID, and may share its
host name and /dev/shm, even if only a slow link connects the containers. Therefore the ranks of a
host find each other through an abstract Unix socket. All ranks try to bind the same name, but the
kernel lets only one process per namespace succeed. The other ranks connect to that process and read
its rank. The search takes one connection per rank and creates no file. The kernel frees the name
when the process ends.
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
_MAX_ANSWER_BYTES = 64


def find_topology(
    store: TimedStore | None,
    rank: int,
    size: int,
    device_type: str,
    timeout_s: float,
    given: Topology | None = None,
) -> Topology:
    """Return the hosts and memory of all ranks, with the same result on every rank.

    Every rank connected to ``store`` must call this function. Later calls return the same value.
    With ``given``, return this topology, but first check that the ranks that it puts on one host
    share one. Raises AbsentError, naming the missing ranks, if some ranks do not call this function
    within ``timeout_s``, and ConfigError, on every rank, if ``given`` is wrong.
    """
    if store is None or size == 1:
        return given or assumed_topology(size, device_type)
    store.answer_s = max(timeout_s, store.answer_s)
    key, end = f"host/{rank}", time.monotonic() + timeout_s
    with contextlib.ExitStack() as until_all_ranks_know:
        if store.check([key]):  # an earlier call has found the leader
            text = store.get(key)
        else:
            secret = store.claim("host secret", uuid.uuid4().hex)
            source: HostsSource = "handshake"
            try:
                leader = until_all_ranks_know.enter_context(_leader(secret, rank, end))
            except OSError as error:
                source = "assumed"
                leader = _leader_by_environment(rank, size, error) if given is None else rank
            text = json.dumps([leader, source, memory_bytes(device_type)])
        by_rank = map(json.loads, gather(store, "host", rank, size, text, timeout_s))
        leaders, sources, memory = zip(*by_rank, strict=True)
    is_assumed = "assumed" in sources
    if given is not None:
        if not is_assumed:
            _check_given(given, leaders)
        return given
    return _topology(leaders, "assumed" if is_assumed else "handshake", memory, device_type)


def assumed_topology(size: int, device_type: str) -> Topology:
    """Return a topology with all ranks on a single host like this machine."""
    return _topology([0] * size, "assumed", [memory_bytes(device_type)] * size, device_type)


def _topology(
    leaders: Sequence[int], source: HostsSource, memory: Sequence[int | None], device_type: str
) -> Topology:
    """Build the topology from the host leader and the visible memory of each rank.

    On CUDA, a rank's memory is its GPU's memory. On CPU, the ranks of a host share the host's
    memory.
    """
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


def _check_given(given: Topology, leaders: Sequence[int]) -> None:
    """Raise ConfigError if ``given`` puts ranks with different leaders on one host."""
    for host in given.hosts:
        by_leader: dict[int, list[int]] = {}
        for rank in host:
            by_leader.setdefault(leaders[rank], []).append(rank)
        if len(by_leader) > 1:
            parts = " and ".join(str(ranks) for ranks in by_leader.values())
            raise ConfigError(
                f"parallel.topology: ranks {list(host)} are listed as one host, but {parts} are in "
                "different network namespaces; list them as separate hosts, or remove "
                "parallel.topology, so that the hosts are detected"
            )


@contextlib.contextmanager
def _leader(secret: str, rank: int, end: float) -> Generator[int]:
    """Yield the leading rank of this rank's host.

    A leader answers the other ranks inside the context. ``secret`` is unique per launch: one half
    is part of the socket's name, and the other half proves that an answer is from this launch.
    Raises AbsentError if the leader does not answer before ``end``, and OSError if this process
    cannot use the socket.
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
                    f"rank {rank} timed out, because the first rank on this host does not answer "
                    "on its Unix socket; check that no rank is suspended, and that "
                    "parallel.timeout_s is longer than the slowest start"
                ) from error
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(_RETRY_S)  # another rank has just bound the name, so ask that rank
            else:
                yield leader
                return


def _ask(name: str, token: str, end: float) -> int | None:
    """Return the rank that has bound ``name`` in this namespace, or None if no rank of this launch
    answers.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(errno.EAFNOSUPPORT, f"{sys.platform} has no abstract Unix sockets")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(max(end - time.monotonic(), _RETRY_S))
        try:
            peer.connect(name)
            with peer.makefile("rb") as answer:
                words = answer.read(_MAX_ANSWER_BYTES).decode(errors="replace").split()
        except (ConnectionError, BlockingIOError):  # no listener, or its backlog is full
            return None
    return int(words[1]) if len(words) == 2 and words[0] == token else None


@contextlib.contextmanager
def _answering(name: str, answer: str) -> Generator[None]:
    """Inside the context, send ``answer`` to every peer that connects to ``name``.

    Raises OSError if the name is already bound.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(socket.SOMAXCONN)

        def answer_all() -> None:
            with contextlib.suppress(OSError):  # accept raises an error after shutdown
                while True:
                    peer, _ = listener.accept()
                    with peer, contextlib.suppress(OSError):  # the peer may have ended
                        peer.sendall(answer.encode())

        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _leader_by_environment(rank: int, size: int, error: OSError) -> int:
    """Derive the leader from LOCAL_WORLD_SIZE, assuming consecutive ranks; raise ConfigError if
    this fails.

    This is used on systems without abstract Unix sockets.
    """
    local = size if all_ranks_here() else env_int("LOCAL_WORLD_SIZE", 0)
    if local < 1 or size % local:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local or 'unset'} does not show which of the {size} ranks share a "
            f"host ({first_line(error)}); start with torchrun and the same number of ranks on "
            "every host, or describe the hosts in a file: parallel.topology=hosts.yaml"
        )
    if rank % local == 0:
        LOG.warning(
            "ranks %d..%d are assumed to share a host because of LOCAL_WORLD_SIZE or MASTER_ADDR: "
            "%s",
            *(rank, rank + local - 1, first_line(error)),
        )
    return rank - rank % local

"""Passes messages between the ranks of a host through shared memory.

Each rank owns an arena, an anonymous memory file (memfd) that the other ranks of its host map. A
message is copied into the sender's arena and later into the receiver's tensor, so sending never
waits for the receiver. For every channel, each sender and receiver share a counter of sent messages
(a futex) and a ring of descriptors. The receiver marks the descriptors of copied messages so that
the sender can reuse their memory. The kernel frees an arena when the last process that maps it
ends.

The ranks pass the files to each other through abstract Unix sockets, which exist only within a
network namespace. Ranks in different namespaces therefore do not share memory, even on one machine,
and their data uses the link between the namespaces, whose rate may be limited.
"""

import contextlib
import errno
import logging
import mmap
import os
import platform
import select
import socket
import struct
import sys
import time
import uuid
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.runtime.processes.startup import gather
from sbpflow.runtime.processes.store import TimedStore
from sbpflow.runtime.ranks.shared_messages import (
    ARENA_BYTES,
    MAX_CHANNELS,
    Arena,
    Arriving,
    Copy,
    Receiving,
    Ring,
    Sending,
)

LOG = logging.getLogger(__name__)

MOST_BYTES = 1 << 28  # Maximum message size; longer messages use the process group.
# Maximum size of all messages of a rank in an all-gather, and of the values of an all-reduce. Each
# receiver gets its own copy, and the sender keeps the memory for later messages.
MOST_GATHERED = 1 << 26
# With two threads, torch copies 4 MB in 68 instead of 88 us, but 0.9 MB in the same time (Zen 4).
_LEAST_SPLIT = 1 << 21
_CHECK_S = 0.02  # Time between checks for signals and dead peers.
_IDS = struct.Struct("3i")  # Process, user, and group of a socket's peer.


class SharedMemory:
    """Manages the memory that this rank shares with the other ranks of its host."""

    def __init__(self, arenas: dict[int, Arena], rank: int, timeout_s: float) -> None:
        from sbpflow.runtime.ranks import shared_loops

        self.loops = shared_loops
        self.arenas, self.rank, self._timeout_s = arenas, rank, timeout_s
        self.peers = frozenset(arenas) - {rank}
        self._limit = np.array([0, int(_CHECK_S * 1e9)], dtype=np.int64)
        self._poll = select.poll()
        for peer in self.peers:
            self._poll.register(arenas[peer].connection, select.POLLRDHUP)

    def channel(self, number: int) -> "SharedChannel":
        """Return channel ``number``; equal numbers on two ranks denote the same channel."""
        if number >= MAX_CHANNELS:
            raise SbpError(
                f"a world can have at most {MAX_CHANNELS} process groups, but channel {number} was "
                "requested"
            )
        return SharedChannel(self, number)

    def await_message(self, ring: Ring, number: int, peer: int) -> None:
        """Wait until ``peer`` has sent message ``number``.

        Raises RuntimeError if the peer has ended or does not send within the time limit.
        """
        end = 0.0
        while not self.loops.wait_until(ring.sent, ring.waiting, number + 1, self._limit):
            now = time.monotonic()
            end = end or now + self._timeout_s
            ended = {handle for handle, _ in self._poll.poll(0)}
            if self.arenas[peer].connection in ended:
                if self.loops.wait_until(ring.sent, ring.waiting, number + 1, self._limit):
                    return
                raise RuntimeError(f"Connection closed by peer: rank {peer} has ended")
            if now > end:
                raise RuntimeError(
                    f"Timed out waiting {1000 * self._timeout_s:.0f}ms for rank {peer}"
                )

    def close(self) -> None:
        """Notify the peers that this rank has ended."""
        for peer in self.peers:
            with contextlib.suppress(OSError):
                os.close(self.arenas[peer].connection)
        self.peers = frozenset()


class SharedChannel:
    """Exchanges messages between the ranks of a host on one channel; both sides count messages."""

    def __init__(self, shared: SharedMemory, number: int) -> None:
        self._shared = shared
        own, arenas = shared.arenas[shared.rank], shared.arenas
        self._sending = {peer: Sending(own, own.ring(number, peer)) for peer in shared.peers}
        self._receiving = {
            peer: Receiving(arenas[peer], arenas[peer].ring(number, shared.rank), peer)
            for peer in shared.peers
        }

    def takes(self, peer: int, message: Tensor) -> bool:
        """Return whether ``message``, to or from ``peer``, goes through shared memory."""
        return peer in self._sending and message.numel() * message.itemsize <= MOST_BYTES

    def connects(self, ranks: Iterable[int]) -> bool:
        """Return whether this rank shares memory with all of ``ranks``, which may include it."""
        return all(rank == self._shared.rank or rank in self._sending for rank in ranks)

    def send(self, peer: int, message: Tensor) -> None:
        """Send a contiguous CPU tensor; the tensor may be changed as soon as this method
        returns."""
        message, copy_bytes = message.resolve_conj().resolve_neg(), self._shared.loops.copy_bytes
        count = message.nbytes

        def copy(memory: Tensor, offset: int) -> None:
            if _use_several_threads(count):
                memory[offset : offset + count].copy_(_bytes_of(message))
            else:
                copy_bytes(memory.data_ptr() + offset, message.data_ptr(), count)

        self.write(peer, count, copy)

    def receive(self, peer: int, target: Tensor) -> Arriving:
        """Receive a message into a contiguous CPU tensor of the same size."""
        count, copy_bytes = target.nbytes, self._shared.loops.copy_bytes

        def copy(memory: Tensor, offset: int) -> None:
            if _use_several_threads(count):
                _bytes_of(target).copy_(memory[offset : offset + count])
            else:
                copy_bytes(target.data_ptr(), memory.data_ptr() + offset, count)

        return self.read(peer, count, copy)

    def write(self, peer: int, count: int, copy: Copy) -> None:
        """Send a message of ``count`` bytes, which ``copy`` writes into its memory."""
        self._sending[peer].send(count, copy, self._shared)

    def read(self, peer: int, count: int, copy: Copy) -> Arriving:
        """Receive a message of ``count`` bytes, which ``copy`` reads from its memory."""
        return self._receiving[peer].next_message(count, copy, self._shared)


def _use_several_threads(count: int) -> bool:
    """Return whether torch copies a message of ``count`` bytes, with several threads, faster than
    the compiled copy.
    """
    return count >= _LEAST_SPLIT and torch.get_num_threads() > 1


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes; strides of 0 are allowed for tensors of at most one
    element.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def share_memory(
    store: TimedStore, rank: int, size: int, neighbors: Sequence[int], timeout_s: float
) -> SharedMemory | None:
    """Connect the ranks ``neighbors`` on this rank's host; return None if they cannot share memory.
    Every rank connected to ``store`` must call this function. Memory is shared only if all ranks of
    the host support it; otherwise, each rank logs the reason given by the first rank that does not.
    """
    arenas: dict[int, Arena] = {}
    secret = store.claim("shared memory secret", uuid.uuid4().hex)
    fault = _obstacle() if len(neighbors) > 1 else "alone"
    with contextlib.ExitStack() as stack:
        listener: socket.socket | None = None
        own = Greeting(secret, rank, size, -1)
        if not fault:
            try:
                memory, handle = _make_arena()
                stack.callback(os.close, handle)
                own, arenas[rank] = Greeting(secret, rank, size, handle), Arena(memory, size)
                listener = stack.enter_context(_listening(secret, rank, len(neighbors)))
            except OSError as error:
                fault = f"rank {rank}: {error}"
        ready = gather(store, "listens", rank, size, fault, timeout_s)
        faults = [ready[other] for other in neighbors if ready[other]]
        if listener is not None and not faults:
            try:
                for other in neighbors:
                    if other < rank:
                        arenas |= _connect(own, other, timeout_s)
                    elif other > rank:
                        arenas |= _accept(own, listener, timeout_s)
            except (OSError, ValueError) as error:
                fault = f"rank {rank}: {error or type(error).__name__}"
        connected = gather(store, "connected", rank, size, fault, timeout_s)
    faults = [connected[other] for other in neighbors if connected[other]] or faults
    if not faults:
        return SharedMemory(arenas, rank, timeout_s)
    for other, arena in arenas.items():
        if other != rank:
            os.close(arena.connection)
    if faults[0] != "alone":
        LOG.info("ranks of this host do not share memory: %s", faults[0])
    return None


@dataclass(frozen=True, slots=True)
class Greeting:
    """The data that a rank sends to each peer when they connect."""

    secret: str
    rank: int
    size: int
    handle: int  # file descriptor of the rank's arena

    def exchange(self, peer: socket.socket) -> dict[int, Arena]:
        """Send this rank's number and arena; return the peer's number and arena.

        Raises OSError if the peer belongs to another user or is not a rank.
        """
        peer_ids = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _IDS.size)
        if _IDS.unpack(peer_ids)[1] != os.getuid():
            raise OSError(errno.EPERM, "a process of another user connected")
        token = self.secret[16:]
        words = f"{token} {self.rank:8d}".encode()
        socket.send_fds(peer, [words], [self.handle])
        answer, handles, _, _ = socket.recv_fds(peer, len(words), 1)
        try:
            answered = answer.decode(errors="replace").split()
            if len(answered) != 2 or answered[0] != token or len(handles) != 1:
                raise OSError(errno.EPROTO, "a process that is not a rank answered")
            return {int(answered[1]): Arena(_mapped(handles[0]), self.size, peer.detach())}
        finally:
            for received in handles:
                os.close(received)


def _obstacle() -> str:
    """Return the reason why this process cannot share memory, or "" if it can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no futex"
    if find_spec("numba") is None:
        return "numba is not installed"
    from sbpflow.runtime.ranks.shared_loops import FUTEX_CALLS

    machine = platform.machine()
    return (
        ""
        if machine in FUTEX_CALLS
        else f"the number of the futex system call on {machine} is not known"
    )


def _make_arena() -> tuple[Tensor, int]:
    handle = os.memfd_create("sbpflow")
    try:
        os.ftruncate(handle, ARENA_BYTES)
        return _mapped(handle), handle
    except BaseException:
        os.close(handle)
        raise


def _mapped(handle: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, ARENA_BYTES), dtype=torch.uint8)


def _name(secret: str, rank: int) -> str:
    return f"\0sbpflow-memory/{secret[:16]}/{rank}"


@contextlib.contextmanager
def _listening(secret: str, rank: int, backlog: int) -> Generator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(_name(secret, rank))
        listener.listen(backlog)
        yield listener


def _connect(own: Greeting, other: int, timeout_s: float) -> dict[int, Arena]:
    """Connect to the listening rank ``other`` and exchange arenas."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout_s)
        peer.connect(_name(own.secret, other))
        return own.exchange(peer)


def _accept(own: Greeting, listener: socket.socket, timeout_s: float) -> dict[int, Arena]:
    """Accept the next connection and exchange arenas with that rank."""
    listener.settimeout(timeout_s)
    peer, _ = listener.accept()
    with peer:
        peer.settimeout(timeout_s)
        return own.exchange(peer)

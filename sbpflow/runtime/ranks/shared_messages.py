"""Defines the messages in shared memory: arenas, rings, and both ends of a channel."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sbpflow.errors import SbpError

if TYPE_CHECKING:
    from sbpflow.runtime.ranks.shared_memory import SharedMemory

ARENA_BYTES = 1 << 36  # Reserved address space; only pages in use take memory.
IN_FLIGHT = 1024  # Maximum number of messages in flight per pair and channel.
MAX_CHANNELS = 512
_LINE = 16  # Number of int32 words per cache line.
# Number of int64 words per descriptor: the message's offset, size in bytes, and number, and the
# number plus 1 once the message has been copied.
_ENTRY = 4
_RING_BYTES = 4 * 2 * _LINE + 8 * _ENTRY * IN_FLIGHT
_SMALLEST = 256

Copy = Callable[[Tensor], object]
"""Copies a message into or out of its memory, a flat uint8 tensor that starts at a multiple of 256
bytes."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The descriptors of the messages from one rank to another on one channel."""

    sent: int  # Address of the count of sent messages, an int32.
    waiting: int  # Address of an int32 that is not 0 while the receiver sleeps.
    entries: np.ndarray  # Shape [IN_FLIGHT, _ENTRY], int64.


@dataclass(slots=True)
class Arena:
    """The shared memory of one rank: rings by channel and receiver, followed by the messages."""

    memory: Tensor  # Shape [ARENA_BYTES], uint8.
    size: int  # Number of ranks.
    connection: int = -1  # File descriptor of the socket to the peer that owns the arena.
    free: dict[int, list[int]] = field(default_factory=dict)  # Offsets by size.
    end: int = 0

    def __post_init__(self) -> None:
        self.end = MAX_CHANNELS * self.size * _RING_BYTES

    def ring(self, channel: int, receiver: int) -> Ring:
        """Return the ring of messages to ``receiver`` on a channel."""
        start = (channel * self.size + receiver) * _RING_BYTES
        raw = self.memory[start : start + _RING_BYTES].numpy()
        address = int(raw.ctypes.data)
        entries = raw[4 * 2 * _LINE :].view(np.int64).reshape(IN_FLIGHT, _ENTRY)
        return Ring(address, address + 4 * _LINE, entries)

    def take(self, count: int) -> tuple[int, int]:
        """Allocate at least ``count`` bytes; return the offset and the size of the block."""
        step = max(_SMALLEST, 1 << max(count.bit_length() - 3, 0))
        size = -(-count // step) * step
        pieces = self.free.get(size)
        if pieces:
            return pieces.pop(), size
        if self.end + size > ARENA_BYTES:
            raise SbpError(
                "the messages in flight between the ranks of this host are too large "
                f"({self.end:,} bytes); set parallel.shared_memory: false"
            )
        self.end += size
        return self.end - size, size

    def give_back(self, offset: int, size: int) -> None:
        """Free a block that ``take`` returned."""
        self.free.setdefault(size, []).append(offset)


class Sending:
    """Sends the messages of a channel to one rank."""

    def __init__(self, arena: Arena, ring: Ring) -> None:
        self._arena, self._ring = arena, ring
        self._number = 0
        # (offset, size) of messages, oldest first
        self._in_flight: deque[tuple[int, int]] = deque()

    def send(self, count: int, copy: Copy, shared: "SharedMemory") -> None:
        """Copy a message of ``count`` bytes into the arena and notify the receiver."""
        entries = self._ring.entries
        while self._in_flight:
            oldest = self._number - len(self._in_flight)
            if entries[oldest % IN_FLIGHT, 3] != oldest + 1:
                break
            offset, size = self._in_flight.popleft()
            self._arena.give_back(offset, size)
        if len(self._in_flight) == IN_FLIGHT:
            raise SbpError(
                f"{IN_FLIGHT} messages are in flight, which is the maximum; wait for them first"
            )
        offset, size = self._arena.take(count)
        with ExitStack() as on_failure:
            on_failure.callback(self._arena.give_back, offset, size)
            copy(self._arena.memory[offset : offset + count])
            on_failure.pop_all()
        self._in_flight.append((offset, size))
        entries[self._number % IN_FLIGHT] = (offset, count, self._number, 0)
        self._number += 1
        shared.loops.publish(self._ring.sent, self._ring.waiting, self._number)


class Receiving:
    """Receives the messages of a channel from one rank."""

    def __init__(self, arena: Arena, ring: Ring, peer: int) -> None:
        self._arena, self._ring, self._peer = arena, ring, peer
        self._number = 0
        self._abandoned: list[int] = []  # numbers of messages

    def next_message(self, count: int, copy: Copy, shared: "SharedMemory") -> "Arriving":
        """Return the next message, of ``count`` bytes, which ``Arriving.wait`` copies."""
        self._number += 1
        return Arriving(self, self._number - 1, count, copy, shared)

    def receive(self, number: int, expected: int, copy: Copy, shared: "SharedMemory") -> None:
        """Wait for message ``number`` of ``expected`` bytes and copy it.

        Raises the same errors as ``Arriving.wait``.
        """
        ring = self._ring
        shared.await_message(ring, number, self._peer)
        entry = ring.entries[number % IN_FLIGHT]
        offset, count, _, _ = entry.tolist()
        if count != expected:
            raise RuntimeError(
                f"enforce fail: Received data size doesn't match expected size: {count} bytes "
                f"from rank {self._peer}, expected {expected}"
            )
        copy(self._arena.memory[offset : offset + count])
        entry[3] = number + 1
        if self._abandoned:
            self._free_abandoned(number)

    def abandon(self, number: int) -> None:
        """Abandon a message without waiting for it. The message may not have arrived yet, so the
        sender can reuse its memory only after this rank has received a later message.
        """
        self._abandoned.append(number)

    def _free_abandoned(self, received: int) -> None:
        for number in [each for each in self._abandoned if each < received]:
            self._abandoned.remove(number)
            self._ring.entries[number % IN_FLIGHT, 3] = number + 1


class Arriving:
    """A message to this rank; ``wait`` copies it to its target.

    The messages of an announced batch that is never used are abandoned without a wait.
    """

    def __init__(
        self, source: Receiving, number: int, count: int, copy: Copy, shared: "SharedMemory"
    ) -> None:
        self._source, self._number, self._shared = source, number, shared
        self._count = count
        self._copy: Copy | None = copy

    def wait(self) -> None:
        """Wait for the message. Raises RuntimeError if it is lost or has the wrong size."""
        if self._copy is not None:
            self._source.receive(self._number, self._count, self._copy, self._shared)
            self._copy = None

    def __del__(self) -> None:
        if self._copy is not None:
            self._source.abandon(self._number)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes; strides of 0 are allowed for tensors of at most one
    element."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)

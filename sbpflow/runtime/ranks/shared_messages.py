"""Defines the messages in shared memory: arenas, rings, and both ends of a channel."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from sbpflow.errors import SbpError

if TYPE_CHECKING:
    from sbpflow.runtime.ranks.shared_memory import SharedMemory

ARENA_BYTES = 1 << 36  # Reserved address space; only pages in use take memory.
IN_FLIGHT = 1024  # Maximum number of messages in flight per pair and channel.
LATE = IN_FLIGHT // 2  # A message is copied without ``wait`` if it is this many messages late.
MAX_CHANNELS = 512
_LINE = 16  # Number of int32 words per cache line.
# Number of int64 words per descriptor: the message's offset, size in bytes, and number, and the
# number plus 1 once the message has been copied.
_ENTRY = 4
_RING_BYTES = 4 * 2 * _LINE + 8 * _ENTRY * IN_FLIGHT
_SMALLEST = 256

Copy = Callable[[Tensor, int], object]
"""Copies a message into or out of an arena, a flat uint8 tensor, in which the message starts at the
given offset, a multiple of 256 bytes."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The descriptors of the messages from one rank to another on one channel."""

    sent: int  # Address of the count of sent messages, an int32.
    waiting: int  # Address of an int32 that is not 0 while the receiver sleeps.
    entries: memoryview  # IN_FLIGHT descriptors with _ENTRY values (int64) each.


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
        entries = raw[4 * 2 * _LINE :].view(np.int64).data
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
            if entries[oldest % IN_FLIGHT * _ENTRY + 3] != oldest + 1:
                break
            offset, size = self._in_flight.popleft()
            self._arena.give_back(offset, size)
        if len(self._in_flight) == IN_FLIGHT:
            raise SbpError(
                f"{IN_FLIGHT} messages are in flight, which is the maximum; wait for them first, "
                "or, if the tables have many groups, set parallel.shared_memory: false"
            )
        offset, size = self._arena.take(count)
        try:
            copy(self._arena.memory, offset)
        except BaseException:
            self._arena.give_back(offset, size)
            raise
        self._in_flight.append((offset, size))
        first = self._number % IN_FLIGHT * _ENTRY
        entries[first], entries[first + 1] = offset, count
        entries[first + 2], entries[first + 3] = self._number, 0
        self._number += 1
        shared.loops.publish(self._ring.sent, self._ring.waiting, self._number)


class Receiving:
    """Receives the messages of a channel from one rank."""

    def __init__(self, arena: Arena, ring: Ring, peer: int) -> None:
        self._arena, self._ring, self._peer = arena, ring, peer
        self._number = 0
        # Messages that are not received yet: size in bytes and target by number, oldest first.
        self._expected: dict[int, tuple[int, Copy]] = {}
        self._abandoned: list[int] = []  # numbers of messages

    def next_message(self, count: int, copy: Copy, shared: "SharedMemory") -> "Arriving":
        """Return the next message, of ``count`` bytes, which ``Arriving.wait`` copies."""
        number = self._number
        self._expected[number] = count, copy
        self._number += 1
        return Arriving(self, number, shared)

    def receive(self, number: int, shared: "SharedMemory") -> None:
        """Wait for message ``number`` and copy it to its target.

        Messages arrive in order, so all earlier messages have arrived, too. Those sent at least
        LATE messages earlier are also copied. Otherwise, a message that nobody waits for (its batch
        was never used, and is in a reference cycle) would block the ring. Raises the same errors as
        ``Arriving.wait``.
        """
        if number in self._expected:
            shared.await_message(self._ring, number, self._peer)
            self._copy(number)
        for abandoned in [each for each in self._abandoned if each < number]:
            self._abandoned.remove(abandoned)
            self._discard(abandoned)
        while number - (oldest := next(iter(self._expected), number)) >= LATE:
            self._copy(oldest)

    def _copy(self, number: int) -> None:
        count, copy = self._expected[number]
        first = number % IN_FLIGHT * _ENTRY
        offset, sent = self._ring.entries[first : first + 2]
        if sent != count:
            raise RuntimeError(
                f"enforce fail: Received data size doesn't match expected size: {sent} bytes "
                f"from rank {self._peer}, expected {count}"
            )
        copy(self._arena.memory, offset)
        self._discard(number)

    def _discard(self, number: int) -> None:
        """Let the sender reuse the memory of a message that has arrived."""
        if self._expected.pop(number, None) is not None:
            self._ring.entries[number % IN_FLIGHT * _ENTRY + 3] = number + 1

    def abandon(self, number: int) -> None:
        """Abandon a message without waiting for it. The message may not have arrived yet, so the
        sender can reuse its memory only after this rank has received a later message.
        """
        self._abandoned.append(number)


class Arriving:
    """A message to this rank; ``wait`` copies it to its target.

    The messages of an announced batch that is never used are abandoned without a wait.
    """

    def __init__(self, source: Receiving, number: int, shared: "SharedMemory") -> None:
        self._source, self._number, self._shared = source, number, shared
        self._waited = False

    def wait(self) -> None:
        """Wait for the message. Raises RuntimeError if it is lost or has the wrong size."""
        if not self._waited:
            self._source.receive(self._number, self._shared)
            self._waited = True

    def __del__(self) -> None:
        if not self._waited:
            self._source.abandon(self._number)

"""Models the streams of the simulated device: the order of their work, and when memory may be
reused.

All ops are computed immediately, in program order. Work that a GPU could reorder is detected with
vector clocks: each stream counts its own ops, and records how many ops of every other stream its
next op must follow. Unordered use of memory by two streams is rejected if one of them writes.
Memory that is freed while another stream may use it is rejected as soon as its own stream allocates
again, because the allocator would reuse it.
"""

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from tests.rehearsal.journal import where
from tests.rehearsal.memory import RefusedError, overlap

Seen = dict[int, int]  # maps stream numbers to numbers of ops


class Clock:
    """Models a stream's queue of work; NCCL uses one stream per process group.

    Several threads can submit work to a stream, so its counts change only under a lock.
    """

    made = 0

    def __init__(self, name: str) -> None:
        Clock.made += 1
        self.number, self.name = Clock.made, f"{name} {Clock.made}"
        self.sees: Seen = {self.number: 0}
        self.freed: list[tuple[str, dict[Clock, int]]] = []
        self._host_version = 0
        self._lock = threading.RLock()
        CLOCKS.add(self)

    @property
    def now(self) -> int:
        return self.sees[self.number]

    def tick(self) -> None:
        """Add one op to the stream, ordered after all work that the host has waited for."""
        host = _thread.host
        with self._lock:
            if self._host_version != host.version:
                self.join(host.sees)
                self._host_version = host.version
            self.sees[self.number] += 1

    def join(self, sees: Seen) -> None:
        """Order the stream's later work after ``sees``."""
        # Copy the items, because another thread may submit work to this stream at the same time.
        with self._lock:
            for number, count in tuple(sees.items()):
                if count > self.sees.get(number, -1):
                    self.sees[number] = count


_versions = itertools.count(1)


class _Host:
    """Records the work that one host thread has waited for."""

    def __init__(self) -> None:
        self.sees: Seen = {}
        self.version = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.host = _Host()
        self.stack = [MAIN]


CLOCKS: weakref.WeakSet[Clock] = weakref.WeakSet()
MAIN = Clock("the main stream")
_thread = _Thread()
_nccl: dict[str, Clock] = {}


def current() -> Clock:
    return _thread.stack[-1]


@contextmanager
def on(clock: Clock) -> Iterator[None]:
    _thread.stack.append(clock)
    try:
        yield
    finally:
        _thread.stack.pop()


def nccl_stream(group: str) -> Clock:
    """Return the stream of a process group's collectives."""
    if group not in _nccl:
        _nccl[group] = Clock(f"NCCL's stream of group {group},")
    return _nccl[group]


def host_waits(sees: Seen) -> None:
    """Record that the host waited; all later requests from this thread are ordered after the
    wait.
    """
    host = _thread.host
    host.version = next(_versions)
    for number, count in tuple(sees.items()):
        host.sees[number] = max(count, host.sees.get(number, 0))


def host_waits_for_all() -> None:
    for clock in list(CLOCKS):
        host_waits({clock.number: clock.now})


class Block:
    """Represents device memory, which exists as long as a tensor uses it.

    ``used`` contains the last uses by stream: (count, is a write, part, op). Uses by the stream
    that allocated the memory are not tracked by part.
    """

    __slots__ = ("__weakref__", "made_on", "recorded", "used", "where")

    def __init__(self) -> None:
        self.made_on = current()
        self.where = ""
        self.used: dict[Clock, dict[object, tuple[int, bool, Tensor | None, object]]] = {}
        self.recorded: list[Clock] = []
        _check_freed(self.made_on)
        self.used[self.made_on] = {True: (self.made_on.now, True, None, "its allocation")}

    def use(self, func: object, host: Tensor, *, writes: bool) -> None:
        """Raise RefusedError if another stream may still be using the memory."""
        clock = current()
        if len(self.used) > 1 or clock not in self.used:
            self._check(func, host, clock, writes)
        mine = self.used.setdefault(clock, {})
        if clock is self.made_on:
            mine[writes] = (clock.now, writes, None, func)
            return
        if not self.where:
            self.where = where()
        key = (writes, host.data_ptr(), host.shape, host.stride())
        mine[key] = (clock.now, writes, host, func)

    def _check(self, func: object, host: Tensor, clock: Clock, writes: bool) -> None:
        for other, uses in tuple(self.used.items()):
            seen = clock.sees.get(other.number, 0)
            for count, wrote, part, by in tuple(uses.values()):
                if other is clock or count <= seen or not (writes or wrote):
                    continue
                if part is None or overlap(part, host):
                    did, does = "wrote" if wrote else "reads", "changes" if writes else "reads"
                    raise RefusedError(
                        f"{func} on {clock.name} {does} memory that {by} {did} on "
                        f"{other.name}, without waiting for it ({where()})"
                    )

    def __del__(self) -> None:
        """Require that all uses so far complete before the freed memory is reused."""
        covered: Seen = {}
        for clock in self.recorded:
            covered |= {n: max(count, covered.get(n, 0)) for n, count in clock.sees.items()}
        last = {
            clock: max(count for count, *_ in uses.values())
            for clock, uses in self.used.items()
            if clock is not self.made_on
        }
        left = {c: n for c, n in last.items() if n > covered.get(c.number, 0)}
        if any(n > self.made_on.sees.get(c.number, 0) for c, n in left.items()):
            self.made_on.freed.append((self.where, left))


BLOCKS: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()


def block_of(host: Tensor) -> Block | None:
    """Return the device memory that ``host`` represents, or ``None`` for an empty tensor."""
    address = host.untyped_storage().data_ptr()
    if not address:
        return None
    found = BLOCKS.get(address)
    if found is None:
        found = BLOCKS[address] = Block()
    return found


def settle() -> None:
    """Complete all work and discard all obligations between tests."""
    host_waits_for_all()
    for clock in list(CLOCKS):
        clock.freed.clear()


def _check_freed(clock: Clock) -> None:
    """Raise RefusedError if memory freed on this stream could be in use when it is reallocated."""
    freed, clock.freed = clock.freed, []
    for place, uses in freed:
        for other, count in uses.items():
            if count > clock.sees.get(other.number, 0):
                raise RefusedError(
                    f"memory allocated on {clock.name} was freed while {other.name} may still use "
                    f"it (first used there: {place}); let {clock.name} wait, keep it, or use "
                    "record_stream"
                )

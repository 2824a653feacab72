"""Records the actions of rehearsed code on the simulated device: ops, host waits, and uploads."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_PARTS = (
    "graphs",
    "install",
    "journal",
    "memory",
    "rules",
    "streams",
    "task",
    "tensor",
    "transfers",
)
_OWN = frozenset(
    str(ROOT / "tests" / name)
    for name in (
        "ranks.py",
        *(f"rehearsal/{part}.py" for part in _PARTS),
    )
)
_NUM_FRAMES = 3


class Entry(NamedTuple):
    """One event; ``where`` contains the innermost calls in the project's code, callee first."""

    kind: str
    what: str
    where: str


class Journal:
    """Stores the events of the thread that opened the journal.

    The kinds are: ``sync`` (the host waits for all submitted work), ``upload`` (a copy to the
    device from memory that is not pinned; the host also waits for it), ``late read`` (an
    asynchronous copy into pinned memory), ``event wait`` (a wait for such a copy), and ``odd
    dtype`` (arithmetic on unsigned types, for which CUDA has few kernels).
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ops: Counter[str] = Counter()
        self.elsewhere: Counter[str] = Counter()  # ops on streams other than the main stream
        self.collectives: Counter[str] = Counter()
        self.thread = threading.get_ident()

    def of(self, *kinds: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind in kinds]

    @property
    def syncs(self) -> list[Entry]:
        """Return the places where the host waits for the device."""
        return self.of("sync", "upload")

    @property
    def late_reads(self) -> list[Entry]:
        return self.of("late read")

    @property
    def num_ops(self) -> int:
        """Return the number of ops submitted to the device, including views but not collectives."""
        return sum(self.ops.values())

    def summary(self) -> str:
        counted = Counter(self.entries)
        lines = [f"{n:>4} {e.kind:<10} {e.what:<40} {e.where}" for e, n in counted.items()]
        return "\n".join([f"{self.num_ops} ops, {dict(self.collectives)}", *lines])


_open: list[Journal] = []


@contextmanager
def journal() -> Iterator[Journal]:
    """Record the ``with`` block; blocks can be nested."""
    opened = Journal()
    _open.append(opened)
    try:
        yield opened
    finally:
        _open.remove(opened)


def note(kind: str, what: str) -> None:
    if opened := _opened():
        entry = Entry(kind, what, where())
        for each in opened:
            each.entries.append(entry)


def count_op(name: str, *, elsewhere: bool = False) -> None:
    for each in _opened():
        each.ops[name] += 1
        each.elsewhere[name] += elsewhere


def count_collective(name: str) -> None:
    for each in _opened():
        each.collectives[name] += 1


def _opened() -> list[Journal]:
    thread = threading.get_ident()
    return [each for each in _open if each.thread == thread]


def where() -> str:
    """Return the file and line of the stack's innermost calls in the project's code."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _NUM_FRAMES:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT)) and file not in _OWN and "site-packages" not in file:
            found.append(f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "outside the project"

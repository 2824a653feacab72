"""How ranks that leave early agree on one message per machine, through the rendezvous store.

Each leaving rank posts why and wakes the others; the first of a machine waits a moment for their
reasons, and alone prints. A rank that posts nothing has died or hangs, which is how the survivors
can name it. A thread of each rank listens for the first to leave and keeps what it posted: the
store may be gone by the time this rank notices. No process group is used, for it may be what broke.
When to leave is decided in ``launch.py``, not here.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Literal

from sbpflow.errors import PeerLostError
from sbpflow.runtime.processes.environment import machine_name, rank_and_world_size
from sbpflow.runtime.processes.start_name import name_of_start
from sbpflow.runtime.processes.store import TimedStore, open_store

Kind = Literal["mistake", "crash", "absent", "lost_peer", "peer_stopped", "interrupt", "terminated"]

_GRACE_S = 3.0  # for the other ranks to post: all of it is spent only if one hangs or is dead
_LATER_S = 0.3  # behind the rank that printed, so that torchrun sees that one fail first
_POLL_S = 0.2
_LONGEST_POLL_S = 5.0  # while ranks are still starting
_LISTEN_S = 3600.0 * 24 * 365  # a run may be long
_MOST_CHARACTERS = 20_000  # of a traceback


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one rank leaves; ``text`` is what a user should read, of a crash its traceback.

    ``order`` counts the ranks as they began to leave, from 1; 0 where nobody counted.
    """

    kind: Kind
    text: str = ""
    order: int = 0


@dataclass(slots=True)
class Meeting:
    """This process among the ranks of a run, as the launcher's environment describes them."""

    rank: int
    world_size: int
    store: TimedStore | None
    by_hand: bool = False
    name: str = ""
    posts: dict[int, Reason] = field(default_factory=dict[int, Reason])
    machines: dict[int, str] = field(default_factory=dict[int, str])
    _order: int = 0
    _read: set[int] = field(default_factory=set[int])
    _listener: threading.Thread | None = None

    @property
    def serves(self) -> bool:
        """Whether the store ends with this process."""
        return self.by_hand and self.rank == 0

    @staticmethod
    def connect() -> "Meeting":
        """Join torchrun's store or, where ranks were started by hand, the one that rank 0 serves.

        ConfigError where the environment does not fit or the port is taken, AbsentError where rank
        0 does not answer.
        """
        rank, world_size = rank_and_world_size()
        if world_size == 1:
            return Meeting(rank, world_size, None)
        from torch.distributed import PrefixStore

        by_hand = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        opened = open_store(by_hand and rank == 0)

        def named(name: str) -> TimedStore:
            return TimedStore(PrefixStore(name, opened.torch_store), opened.where)

        name = f"sbpflow/{os.environ.get('TORCHELASTIC_RUN_ID', 'by-hand')}"
        if not by_hand:  # the store may have been there before this start
            name = f"{name}/{name_of_start(named(name), rank, world_size)}"
        return Meeting(rank, world_size, named(name), by_hand, name)

    def listen(self, told: Callable[[], None]) -> None:
        """Say where this rank runs, and call ``told`` in a thread once another rank leaves early.

        ``posts`` then has the reasons of all that do, ``machines`` where they run.
        """
        if self.store is None:
            return
        self.store.set(f"machine/{self.rank}", machine_name())
        # A wait takes a whole connection, so it has one of its own.
        ear = self.store.torch_store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (stub)
        ear.set_timeout(timedelta(seconds=_LISTEN_S))
        heard = TimedStore(ear, self.store.where)
        self._listener = threading.Thread(target=self._listen, args=(heard, told), daemon=True)
        self._listener.start()

    def _listen(self, store: TimedStore, told: Callable[[], None]) -> None:
        wake, pause = f"wake/{self.rank}", _POLL_S
        with contextlib.suppress(RuntimeError):  # a store that is gone has no more to say
            while not self._read_machines(store) and not store.check([wake]):
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_POLL_S)
            store.torch_store.wait([wake])
            if store.get(wake) == "over":
                return
            self._read_posts(store)
            told()
            while len(self.posts) < self.world_size:
                time.sleep(_POLL_S)
                self._read_posts(store)

    def over(self) -> None:
        """The work is done: end the listener, which must not be in C++ code at Python's end."""
        if self.store is not None and self._listener is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"wake/{self.rank}", "over")
                self._listener.join(_GRACE_S)

    def _read_machines(self, store: TimedStore) -> bool:
        """Whether all ranks have said where they run."""
        keys = [f"machine/{rank}" for rank in range(self.world_size)]
        if not self.machines and store.check(keys):
            self.machines = dict(enumerate(store.get_all(keys)))
        return bool(self.machines)

    def _read_posts(self, store: TimedStore) -> bool:
        """Whether all ranks have posted. They are listed as they come: few questions for many."""
        count = store.add("order", 0)
        unread = [f"reason/{n}" for n in range(1, count + 1) if n not in self._read]
        there = unread if store.check(unread) else [key for key in unread if store.check([key])]
        for key, text in zip(there, store.get_all(there), strict=True):
            fields = json.loads(text)
            self.posts.setdefault(fields.pop("rank"), Reason(**fields))
            self._read.add(int(key.rpartition("/")[2]))
        return len(self.posts) == self.world_size

    def post(self, reason: Reason) -> None:
        """Say that this rank is alive and why it will leave; ``leave`` may say it better.

        Who was told to stop says so, whatever fails on the way out.
        """
        mine = self.posts.get(self.rank)
        if mine is not None and mine.kind in ("terminated", "interrupt"):
            reason = mine
        self.posts[self.rank] = reason
        if self.store is None:
            return
        if not self._order:
            self._order = self.store.add("order", 1)
        reason = replace(reason, text=reason.text[-_MOST_CHARACTERS:], order=self._order)
        self.posts[self.rank] = reason
        text = json.dumps({"rank": self.rank, **asdict(reason)})
        self.store.set(f"reason/{self._order}", text)
        if self._order == 1:
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            self.store.set_all({f"wake/{rank}": "leave" for rank in others})

    def leave(self, reason: Reason) -> None:
        """Post ``reason``; return when a rank of this machine has printed what all posted.

        Or when time is up.
        """
        try:
            self._leave_through(reason)
        except PeerLostError as error:  # the store is gone: say what was heard till then
            self._leave_alone(error)

    def _leave_through(self, reason: Reason) -> None:
        store, machine = self.store, machine_name()
        self.post(reason)
        if store is None:
            _print(self.message())
            return
        first = store.add(f"leaving/{machine}", 1) == 1
        if self.by_hand and reason.kind == "absent":  # terminals apart, and nobody leads yet
            _print(compose({self.rank: reason}, self.world_size))
            store.set(f"printed/{machine}", "1")
        elif first:
            _wait(lambda: self._read_posts(store), _GRACE_S)
            self._read_machines(store)
            _print(self.message())
            store.set(f"printed/{machine}", "1")
        else:
            _wait(lambda: store.check([f"printed/{machine}"]), 2 * _GRACE_S)
            time.sleep(_LATER_S)
        store.add("gone", 1)
        if self.serves:  # the store ends with this process, the others still read "printed"
            _wait(lambda: store.add("gone", 0) >= self.world_size, _GRACE_S)

    def _leave_alone(self, error: PeerLostError) -> None:
        """Without the store, the ranks of a machine agree by a name that only one can take."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
            with contextlib.suppress(OSError):
                # In Linux's abstract namespace: no file, and free again when the process ends.
                name.bind(f"\0{self.name}/{machine_name()}")
                here = [rank for rank, where in self.machines.items() if where == machine_name()]
                _print(self.message(alive=here or [self.rank], store_lost=str(error)))
            time.sleep(_GRACE_S)

    def message(self, *, alive: list[int] | None = None, store_lost: str = "") -> str:
        """What a user should read, of all that was heard."""
        return compose(
            self.posts,
            self.world_size,
            self.machines,
            alive=alive or [],
            store_lost=store_lost,
        )


def compose(
    posts: Mapping[int, Reason],
    world_size: int,
    machines: Mapping[int, str] | None = None,
    *,
    alive: list[int] | None = None,
    store_lost: str = "",
) -> str:
    """The one message: causes first, and nothing of what follows from them.

    ``machines`` is where each rank runs, all on one if it is not given. ``alive`` are ranks known
    to be so though they posted nothing.
    """
    causes = [*_crashes(posts), *_mistakes(posts, world_size)]
    crashed = any(reason.kind == "crash" for reason in posts.values())
    absent = [reason.text for reason in posts.values() if reason.kind == "absent"]
    if causes or absent or crashed:
        return "\n".join(causes or [f"error: {text}" for text in absent[:1]])
    silent = sorted(set(range(world_size)) - set(posts) - set(alive or []))
    where = machines or dict.fromkeys(range(world_size), "")
    if interrupted := sorted(n for n, reason in posts.items() if reason.kind == "interrupt"):
        return _stopped("Ctrl-C", interrupted, where)
    if terminated := _terminated(posts, silent, where):
        return _stopped("SIGTERM", terminated, where)
    lost = [reason.text for reason in posts.values() if reason.kind == "lost_peer"]
    detail = "; ".join([*lost[:1], *([store_lost] if store_lost else [])]) or "SIGTERM"
    return f"error: {_lost(silent, where)} ({detail})"


def _crashes(posts: Mapping[int, Reason]) -> list[str]:
    """The traceback of the rank that failed first, and how others ended that failed otherwise."""
    crashed = sorted((reason.order, rank) for rank, reason in posts.items() if _is_crash(reason))
    if not crashed:
        return []
    first = posts[crashed[0][1]].text.rstrip()
    last_line = first.rpartition("\n")[2]
    lines = [f"{first}\n[{name_ranks([crashed[0][1]])}]"]
    for _, rank in crashed[1:]:
        other = posts[rank].text.rstrip().rpartition("\n")[2]
        lines.append("" if other == last_line else f"{other} [{name_ranks([rank])}]")
    return [line for line in lines if line]


def _is_crash(reason: Reason) -> bool:
    return reason.kind == "crash" and bool(reason.text)


def _mistakes(posts: Mapping[int, Reason], world_size: int) -> list[str]:
    found: dict[str, list[int]] = {}
    for rank, reason in sorted(posts.items()):
        if reason.kind == "mistake":
            found.setdefault(reason.text, []).append(rank)
    return [
        f"error: {text}" + (f" [{name_ranks(ranks)}]" if len(ranks) < world_size else "")
        for text, ranks in found.items()
    ]


def _terminated(
    posts: Mapping[int, Reason], silent: list[int], machines: Mapping[int, str]
) -> list[int]:
    """The ranks of machines that were told to stop, as before a preemption.

    torchrun sends SIGTERM as well, to the ranks of a machine on which one has ended. So the first
    to leave there must have been terminated, but for those that end with it, and none be silent.
    """
    found: list[int] = []
    for machine in dict.fromkeys(machines.values()):
        ranks = [rank for rank, where in machines.items() if where == machine]
        posted = [rank for rank in ranks if rank in posts and posts[rank].kind != "peer_stopped"]
        first = min(posted, key=lambda rank: posts[rank].order, default=None)
        if first is None or posts[first].kind != "terminated":
            continue
        if not set(ranks) & set(silent):
            found += ranks
    return sorted(found)


def _stopped(by: str, ranks: list[int], machines: Mapping[int, str]) -> str:
    if len(ranks) == len(machines) or len(set(machines.values())) < 2:
        return f"stopped by {by}"
    return f"stopped by {by}, sent to {_located(ranks, machines)}"


def _lost(silent: list[int], machines: Mapping[int, str]) -> str:
    look = (
        "look above for its own message, then for the kernel's out-of-memory killer (dmesg), the "
        "memory of that machine, and its network"
    )
    if silent:
        return f"{_located(silent, machines)} died or does not answer; {look}"
    return f"a connection between ranks broke although all ranks are alive; {look}"


def _located(ranks: list[int], machines: Mapping[int, str]) -> str:
    """Such as "rank 1" or, where there are several machines, "ranks 2, 3 on host (node 1)"."""
    if len(set(machines.values())) < 2:
        return name_ranks(ranks)
    by_machine: dict[str, list[int]] = {}
    for rank in ranks:
        by_machine.setdefault(machines.get(rank, "an unknown machine"), []).append(rank)
    return " and ".join(f"{name_ranks(held)} on {where}" for where, held in by_machine.items())


def name_ranks(ranks: list[int]) -> str:
    """Such as "rank 1" or "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _wait(ready: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)


def _print(text: str) -> None:
    if text:
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.write(f"\n{text}\n")
            sys.stderr.flush()

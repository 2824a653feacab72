"""Combines the errors of ranks that exit early into one message per machine. The ranks exchange the
errors through their key-value store.

A rank that exits posts its reason, and the first rank to exit wakes the others. The first rank of
each machine waits briefly for more reasons and prints the message; the others print nothing. A rank
that posts nothing has died or is stuck; the message names such ranks unless a posted reason
explains the exit. In each rank, a thread waits for the first exit and saves the posted reasons,
because the store may be gone before the main thread notices the exit. Process groups are not used,
because they may have failed themselves. ``launch.py`` decides when to exit.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Literal

from sbpflow.errors import PeerLostError
from sbpflow.runtime.processes.environment import existing_group, machine_name, rank_and_world_size
from sbpflow.runtime.processes.launch_id import launch_id
from sbpflow.runtime.processes.store import TimedStore, open_store, polls, store_of_group

Kind = Literal["mistake", "crash", "absent", "lost_peer", "peer_stopped", "interrupt", "terminated"]

# The printing rank waits for other ranks to post; it waits the full ``_GRACE_S`` only if a rank is
# dead or stuck. Other ranks exit ``_LATER_S`` after the printing rank, so that torchrun sees the
# printing rank fail first.
_GRACE_S = 3.0
_LATER_S = 0.3
_POLL_S = 0.2
_LONGEST_POLL_S = 5.0  # Longest pause while ranks are still starting.
_START_S = 30.0  # Rank 0 waits this long at its end for ranks that are still starting.
_LISTEN_S = 3600.0 * 24 * 365  # Longer than any run lasts.
_MAX_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a rank exits. ``text`` is a message for the user, or a crash's traceback. ``order`` is
    the exit's number, counted from 1, or 0 without a store.
    """

    kind: Kind
    text: str = ""
    order: int = 0


@dataclass(slots=True)
class Meeting:
    """Connects this process to the other ranks of the launch."""

    rank: int
    world_size: int
    store: TimedStore | None
    by_hand: bool = False
    name: str = ""
    start: int = 1  # number of the world that this process starts, as counted by ``await_ranks``
    posts: dict[int, Reason] = field(default_factory=dict[int, Reason])
    machines: dict[int, str] = field(default_factory=dict[int, str])
    _order: int = 0
    _read: set[int] = field(default_factory=set[int])
    _listener: threading.Thread | None = None

    @property
    def serves(self) -> bool:
        """Return whether this process hosts the store."""
        return self.by_hand and self.rank == 0

    @staticmethod
    def connect() -> "Meeting":
        """Join the store of an existing process group, torchrun's store or, if ranks were started
        by hand, the store that rank 0 serves.

        Raises ConfigError if the environment is invalid or the port is taken, and AbsentError if
        rank 0 does not answer.
        """
        rank, world_size = rank_and_world_size()
        if world_size == 1:
            return Meeting(rank, world_size, None)
        if existing_group() is not None:
            name = "sbpflow/group"
            return Meeting(rank, world_size, store_of_group(name), name=name)
        from torch.distributed import PrefixStore

        by_hand = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        opened = open_store(by_hand and rank == 0)

        def named(name: str) -> TimedStore:
            return TimedStore(PrefixStore(name, opened.torch_store), opened.where)

        name = f"sbpflow/{os.environ.get('TORCHELASTIC_RUN_ID', 'by-hand')}"
        if not by_hand:  # torchrun's store may contain keys of earlier launches
            name = f"{name}/{launch_id(named(name), rank, world_size)}"
        return Meeting(rank, world_size, named(name), by_hand, name)

    def listen(self, on_exit: Callable[[], None]) -> None:
        """Register this rank's machine. Once any rank exits early, call ``on_exit`` in a thread;
        from then on, ``posts`` collects the reasons of all exiting ranks. ``machines`` is filled
        once all ranks have registered.
        """
        if self.store is None:
            return
        self.store.set(f"machine/{self.rank}", machine_name())
        # The listener needs its own connection, because a wait blocks the connection.
        clone = self.store.torch_store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (stub)
        clone.set_timeout(timedelta(seconds=_LISTEN_S))
        own = TimedStore(clone, self.store.where)
        self._listener = threading.Thread(target=self._listen, args=(own, on_exit), daemon=True)
        self._listener.start()

    def _listen(self, store: TimedStore, on_exit: Callable[[], None]) -> None:
        wake = f"wake/{self.rank}"
        with contextlib.suppress(RuntimeError):  # the store is gone, so no more reasons will come
            for _ in polls(_POLL_S, _LONGEST_POLL_S):
                if self._read_machines(store) or store.check([wake]):
                    break
            store.torch_store.wait([wake])
            if store.get(wake) == "over":
                return
            self._read_posts(store)
            on_exit()
            while len(self.posts) < self.world_size:
                time.sleep(_POLL_S)
                self._read_posts(store)

    def over(self) -> None:
        """End the listener after a successful run, because a thread in C++ code would disturb
        Python's shutdown. Rank 0 of torchrun first waits for ranks that are still starting, unless
        Ctrl-C is pressed.
        """
        store = self.store
        if store is not None and self._listener is not None:
            # The rank that serves the store may already have ended. The listener then ends, too.
            with contextlib.suppress(RuntimeError, KeyboardInterrupt):
                if self.rank == 0 and not self.by_hand:  # rank 0 still answers in ``launch_id``
                    _wait(lambda: self._read_machines(store), _START_S)
                store.set(f"wake/{self.rank}", "over")
            self._listener.join(_GRACE_S)

    def _read_machines(self, store: TimedStore) -> bool:
        """Read the machines of the ranks; return whether all ranks have registered."""
        keys = [f"machine/{rank}" for rank in range(self.world_size)]
        if not self.machines and store.check(keys):
            self.machines = dict(enumerate(store.get_all(keys)))
        return bool(self.machines)

    def _read_posts(self, store: TimedStore) -> bool:
        """Read new reasons; return whether all ranks have posted.

        Reasons are numbered in exit order, so that a few store operations can read many reasons.
        """
        count = store.add("order", 0)
        unread = [f"reason/{n}" for n in range(1, count + 1) if n not in self._read]
        posted = unread if store.check(unread) else [key for key in unread if store.check([key])]
        for key, text in zip(posted, store.get_all(posted), strict=True):
            fields = json.loads(text)
            self.posts.setdefault(fields.pop("rank"), Reason(**fields))
            self._read.add(int(key.rpartition("/")[2]))
        return len(self.posts) == self.world_size

    def post(self, reason: Reason) -> None:
        """Post the reason why this rank will exit, which also shows that the rank is alive. A later
        post replaces an earlier one, unless the earlier reason is a signal, because later errors
        result from the signal. The text of a signal's reason says what was saved.
        """
        earlier = self.posts.get(self.rank)
        if earlier is not None and earlier.kind in ("terminated", "interrupt"):
            reason = replace(earlier, text=reason.text if reason.kind == earlier.kind else "")
        self.posts[self.rank] = reason
        if self.store is None:
            return
        if not self._order:
            self._order = self.store.add("order", 1)
        reason = replace(reason, text=reason.text[-_MAX_CHARACTERS:], order=self._order)
        self.posts[self.rank] = reason
        text = json.dumps({"rank": self.rank, **asdict(reason)})
        self.store.set(f"reason/{self._order}", text)
        if self._order == 1:
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            self.store.set_all({f"wake/{rank}": "leave" for rank in others})

    def leave(self, reason: Reason) -> None:
        """Post ``reason``; return once a rank on this machine has printed the message.

        Returns after a few seconds even if no rank has printed the message.
        """
        try:
            self._leave_with_store(reason)
        except PeerLostError as error:  # the store is gone; use the reasons read before
            self._leave_without_store(error)

    def _leave_with_store(self, reason: Reason) -> None:
        store, machine = self.store, machine_name()
        self.post(reason)
        if store is None:
            _print(self.message())
            return
        first = store.add(f"leaving/{machine}", 1) == 1
        if self.by_hand and reason.kind == "absent":  # each rank has its own terminal
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
        # The store ends with this process, so wait until the other ranks have read "printed".
        if self.serves:
            _wait(lambda: store.add("gone", 0) >= self.world_size, _GRACE_S)

    def _leave_without_store(self, error: PeerLostError) -> None:
        """Print the message unless another rank on this machine has bound the socket name."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
            with contextlib.suppress(OSError):
                # A name in Linux's abstract namespace creates no file and is freed when the process
                # ends. Names have at most 107 bytes.
                digest = hashlib.sha256(f"{self.name}/{machine_name()}".encode()).hexdigest()
                name.bind(f"\0sbpflow/{digest}")
                here = [rank for rank, where in self.machines.items() if where == machine_name()]
                _print(self.message(alive=here or [self.rank], store_lost=str(error)))
            time.sleep(_GRACE_S)

    def message(self, *, alive: Sequence[int] = (), store_lost: str = "") -> str:
        """Compose the message for the user from all reasons read so far."""
        return compose(
            self.posts, self.world_size, self.machines, alive=alive, store_lost=store_lost
        )


def compose(
    posts: Mapping[int, Reason],
    world_size: int,
    machines: Mapping[int, str] | None = None,
    *,
    alive: Sequence[int] = (),
    store_lost: str = "",
) -> str:
    """Return one message with the causes of the exit but without their consequences.

    ``machines`` names each rank's machine; by default all ranks are on one machine. ``alive``
    contains the ranks that are known to be alive although they posted nothing.
    """
    causes = [*_crashes(posts), *_mistakes(posts, world_size)]
    crashed = any(reason.kind == "crash" for reason in posts.values())
    absent = [reason.text for reason in posts.values() if reason.kind == "absent"]
    if causes or absent or crashed:
        return "\n".join(causes or [f"error: {text}" for text in absent[:1]])
    silent = sorted(set(range(world_size)) - set(posts) - set(alive))
    where = machines or dict.fromkeys(range(world_size), "")
    texts = [r.text for r in posts.values() if r.kind in ("interrupt", "terminated") and r.text]
    saved = f"; {texts[0]}" if texts else ""
    if interrupted := sorted(n for n, reason in posts.items() if reason.kind == "interrupt"):
        return _stopped("Ctrl-C", interrupted, where) + saved
    if terminated := _terminated(posts, silent, where):
        return _stopped("SIGTERM", terminated, where) + saved
    lost = [reason.text for reason in posts.values() if reason.kind == "lost_peer"]
    detail = "; ".join([*lost[:1], *([store_lost] if store_lost else [])]) or "SIGTERM"
    return f"error: {_lost(silent, where)} ({detail})"


def _crashes(posts: Mapping[int, Reason]) -> list[str]:
    """Return the first crash's traceback, and the last line of each later crash if it is
    different.
    """
    crashes = [(r.order, rank) for rank, r in posts.items() if r.kind == "crash" and r.text]
    texts = [(rank, posts[rank].text.rstrip()) for _, rank in sorted(crashes)]
    lines: list[str] = []
    for rank, text in texts:
        last_line = text.rpartition("\n")[2]
        if not lines:
            lines.append(f"{text}\n[{name_ranks([rank])}]")
        elif last_line != texts[0][1].rpartition("\n")[2]:
            lines.append(f"{last_line} [{name_ranks([rank])}]")
    return lines


def _mistakes(posts: Mapping[int, Reason], world_size: int) -> list[str]:
    """Return the user errors, each with its ranks unless it occurred on all ranks."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, reason in sorted(posts.items()):
        if reason.kind == "mistake":
            ranks_by_text.setdefault(reason.text, []).append(rank)
    return [
        f"error: {text}" + (f" [{name_ranks(ranks)}]" if len(ranks) < world_size else "")
        for text, ranks in ranks_by_text.items()
    ]


def _terminated(
    posts: Mapping[int, Reason], silent: list[int], machines: Mapping[int, str]
) -> list[int]:
    """Return the ranks of machines that received a stop signal, for example before a preemption.
    torchrun also sends SIGTERM to a machine's other ranks after one of them exits. Therefore a
    machine counts only if all of its ranks posted a reason and the first of them to exit was
    terminated. Ranks that stopped because of another rank are ignored.
    """
    terminated: list[int] = []
    for machine in dict.fromkeys(machines.values()):
        ranks = [rank for rank, where in machines.items() if where == machine]
        posted = [rank for rank in ranks if rank in posts and posts[rank].kind != "peer_stopped"]
        first = min(posted, key=lambda rank: posts[rank].order, default=None)
        if first is None or posts[first].kind != "terminated":
            continue
        if not set(ranks) & set(silent):
            terminated += ranks
    return sorted(terminated)


def _stopped(by: str, ranks: list[int], machines: Mapping[int, str]) -> str:
    if len(ranks) == len(machines) or len(set(machines.values())) < 2:
        return f"stopped by {by}"
    return f"stopped by {by}, sent to {_located(ranks, machines)}"


def _lost(silent: list[int], machines: Mapping[int, str]) -> str:
    advice = (
        "check the messages above, the kernel's log of killed processes (dmesg), and the memory "
        "and network of the machine"
    )
    if silent:
        return f"{_located(silent, machines)} died or stopped responding; {advice}"
    return f"a connection between ranks broke even though all ranks are alive; {advice}"


def _located(ranks: list[int], machines: Mapping[int, str]) -> str:
    """Return "rank 1" or, with several machines, "ranks 2, 3 on host (node 1)"."""
    if len(set(machines.values())) < 2:
        return name_ranks(ranks)
    by_machine: dict[str, list[int]] = {}
    for rank in ranks:
        by_machine.setdefault(machines.get(rank, "an unknown machine"), []).append(rank)
    return " and ".join(f"{name_ranks(these)} on {name}" for name, these in by_machine.items())


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 1" or "ranks 1, 3"."""
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

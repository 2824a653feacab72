"""How ranks that leave early agree on one message, through the rendezvous store.

Each leaving rank posts why; the first to post waits a moment for the others, and alone prints. A
rank that posts nothing has died or hangs, which is how the survivors can name it. No process group
is used, for it may be what broke. When to leave is decided in ``launch.py``, not here.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from sbpflow.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

Kind = Literal["mistake", "crash", "absent", "lost_peer", "interrupt", "terminated"]

_GRACE_S = 1.5  # for the other ranks to post: all of it is spent only if one hangs or is dead
_LATER_S = 0.3  # behind the rank that printed, so that torchrun sees that one fail first
_CONNECT_S = 60.0  # for rank 0 to be up: ranks of one run start within this of each other
_GREET_S = 5.0  # of it at least, for who listens there to show that it is rank 0
_POLL_S = 0.2


class AbsentError(RuntimeError):
    """Ranks did not come to the start; the message names them."""


@dataclass(frozen=True, slots=True)
class Words:
    """Why one rank leaves; ``text`` is what a user should read."""

    kind: Kind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Meeting:
    """This process among the ranks of a run, as the launcher's environment describes them."""

    rank: int
    world_size: int
    store: "Store | None"
    by_hand: bool = False

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
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "by-hand")
        opened = _open_store(by_hand and rank == 0)
        store = PrefixStore(f"sbpflow/{run_id}/{attempt}", opened)
        return Meeting(rank, world_size, store, by_hand)

    def post(self, words: Words) -> None:
        """Say that this rank is alive and why it will leave; ``leave`` may say it better."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"words/{self.rank}", json.dumps(asdict(words)))

    def leave(self, words: Words) -> None:
        """Post ``words``; return when one rank has printed what all posted, or time is up."""
        alone = {self.rank: words}
        if self.store is None:
            _print(compose(alone, self.world_size))
            return
        try:
            self._leave_through(self.store, words)
        except RuntimeError:  # the store is gone, and with it whoever served it
            _print(compose(alone, self.world_size))

    def _leave_through(self, store: "Store", words: Words) -> None:
        store.set(f"words/{self.rank}", json.dumps(asdict(words)))
        first = store.add("leaving", 1) == 1
        if self.by_hand and words.kind == "absent":  # terminals apart, and nobody leads yet
            _print(compose({self.rank: words}, self.world_size))
            store.set("printed", "1")
        elif first:
            _print(compose(self._posts(store), self.world_size))
            store.set("printed", "1")
        else:
            _wait(lambda: store.check(["printed"]), 2 * _GRACE_S)
            time.sleep(_LATER_S)
        store.add("gone", 1)
        if self.serves:  # the store ends with this process, the others still read "printed"
            _wait(lambda: store.add("gone", 0) >= self.world_size, _GRACE_S)

    def _posts(self, store: "Store") -> dict[int, Words]:
        keys = [f"words/{rank}" for rank in range(self.world_size)]
        _wait(lambda: store.check(keys), _GRACE_S)
        found = [rank for rank, key in enumerate(keys) if store.check([key])]
        return {rank: Words(**json.loads(store.get(keys[rank]))) for rank in found}


def compose(posts: Mapping[int, Words], world_size: int) -> str:
    """The one message: mistakes first, for the rest follows from them; "" where all is said."""
    mistakes: dict[str, list[int]] = {}
    for rank, words in sorted(posts.items()):
        if words.kind == "mistake":
            mistakes.setdefault(words.text, []).append(rank)
    if mistakes:
        return "\n".join(
            f"error: {text}" + (f" [{name_ranks(ranks)}]" if len(ranks) < world_size else "")
            for text, ranks in mistakes.items()
        )
    kinds = {words.kind for words in posts.values()}
    if absent := [words.text for words in posts.values() if words.kind == "absent"]:
        return f"error: {absent[0]}"
    if "crash" in kinds:
        return ""  # a traceback says it
    if "interrupt" in kinds:
        return "stopped by Ctrl-C"
    silent = sorted(set(range(world_size)) - set(posts))
    if "lost_peer" not in kinds and not silent:
        return "stopped by SIGTERM"
    detail = next((words.text for words in posts.values() if words.kind == "lost_peer"), "SIGTERM")
    return f"error: {_lost(silent)} ({detail})"


def _lost(silent: list[int]) -> str:
    look = (
        "look above for its own message, then for the kernel's out-of-memory killer (dmesg), the "
        "memory of that machine, and its network"
    )
    if silent:
        return f"{name_ranks(silent)} died or does not answer; {look}"
    return f"a connection between ranks broke although all ranks are alive; {look}"


def name_ranks(ranks: list[int]) -> str:
    """Such as "rank 1" or "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, (0, 1) without a launcher; else ConfigError."""
    rank, world_size = env_int("RANK", 0), env_int("WORLD_SIZE", 1)
    if world_size < 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size}: a run has 1 rank or more; for example WORLD_SIZE=1, or "
            "unset RANK and WORLD_SIZE for one process"
        )
    if world_size > 1 and "RANK" not in os.environ:
        raise ConfigError(
            f"RANK is not set but WORLD_SIZE={world_size} is; give each process its own of "
            f"0..{world_size - 1}, for example RANK=0, or start with torchrun"
        )
    if not 0 <= rank < world_size:
        near = min(max(rank, 0), world_size - 1)
        raise ConfigError(
            f"RANK={rank}: ranks count from 0, so with WORLD_SIZE={world_size} RANK is one of "
            f"0..{world_size - 1}, each once; for example RANK={near}"
        )
    return rank, world_size


def _open_store(serves: bool) -> "Store":
    from torch.distributed import DistNetworkError, TCPStore

    host, port = os.environ.get("MASTER_ADDR", ""), env_int("MASTER_PORT", -1)
    if not host or not 0 <= port < 2**16:
        raise ConfigError(
            f"MASTER_ADDR={host!r} MASTER_PORT={port}: WORLD_SIZE is above 1, so the ranks need a "
            "place to meet; start with torchrun, or set for example MASTER_ADDR=127.0.0.1 "
            "MASTER_PORT=29501"
        )
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR={host!r}: this name does not resolve ({first_line(error)}); give "
            "the name or address of the machine of rank 0, for example MASTER_ADDR=127.0.0.1 if "
            "all ranks are on this one"
        ) from error
    end = time.monotonic() + _CONNECT_S
    if not serves:
        _await_listener(host, port, end)
    left_s = max(end - time.monotonic(), _GREET_S)
    opened: list[Store | BaseException] = []

    def open_store() -> None:
        try:
            store = TCPStore(
                host,
                port,
                None,
                serves,
                timedelta(seconds=left_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
            store.set_timeout(timedelta(seconds=_CONNECT_S))
            opened.append(store)
        except (DistNetworkError, RuntimeError) as error:
            opened.append(error)

    # In a thread: against a listener that is no TCPStore the constructor ignores its timeout.
    thread = threading.Thread(target=open_store, daemon=True)
    thread.start()
    thread.join(left_s)
    store = opened[0] if opened else TimeoutError("the listener there is not a rank of this run")
    if isinstance(store, BaseException):
        raise no_store(host, port, serves, store) from store
    return store


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
        f"rank 0 did not answer at MASTER_ADDR, MASTER_PORT {host}:{port} within {_CONNECT_S:g} s "
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


def env_int(name: str, default: int) -> int:
    """A whole number of the environment; ConfigError if it is none."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"{name}={text!r} in the environment is not a whole number; start with torchrun"
        ) from error


def _wait(ready: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)


def _print(text: str) -> None:
    if text:
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.write(f"\n{text}\n")
            sys.stderr.flush()

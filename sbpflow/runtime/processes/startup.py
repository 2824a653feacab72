"""Before the first process group: are all ranks here, each once, and do they agree?

torch's own meeting gives up with a count on rank 0 and with keys of its store elsewhere, and ranks
that disagree would wait for each other in their first collective. Here each rank puts its number
and what it is about to do into the run's store; the first to run out of patience tells the others.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping

from sbpflow.errors import AbsentError, ConfigError
from sbpflow.runtime.processes.differences import differences
from sbpflow.runtime.processes.exit_messages import Meeting, name_ranks
from sbpflow.runtime.processes.store import TimedStore

_POLL_S = 0.005
_LONGEST_POLL_S = 0.5  # a round trip to the store per rank


def await_ranks(timeout_s: float, facts: Mapping[str, str] | None = None) -> Meeting:
    """Return once all ranks of the launcher's environment called this, with the same ``facts``.

    AbsentError if they do not come in time: ``timeout_s`` counts from this rank's call, and the
    first rank's end ends all. ConfigError on every rank where facts differ, with those that do, for
    a rank number that two processes have, and where there is nowhere to meet. What is returned
    keeps the store that rank 0 serves open until torch has joined it.
    """
    meeting = Meeting.connect()
    store, size = meeting.store, meeting.world_size
    if store is None:
        return meeting
    store.answer_s = max(timeout_s, store.answer_s)  # machines are busy while ranks start
    _claim_rank(store, meeting.rank)
    mine = json.dumps(dict(facts or {}), sort_keys=True)
    store.set(f"facts/{meeting.rank}", mine)
    digest = hashlib.sha256(mine.encode()).hexdigest()
    _compare(store, gather(store, "here", meeting.rank, size, digest, timeout_s))
    return meeting


def gather(
    store: TimedStore, name: str, rank: int, size: int, text: str, timeout_s: float
) -> list[str]:
    """The ``text`` of each of ``size`` ranks, by rank; ``name`` keeps it apart from others.

    AbsentError on every rank, with those that are missing, at the end of the first rank's time.
    """
    keys, given_up = [f"{name}/{one}" for one in range(size)], f"{name}/missing"
    store.set(keys[rank], text)
    end, pause = time.monotonic() + timeout_s, _POLL_S
    while True:
        if store.check([given_up]):  # first, so that nobody goes on where another gave up
            missing, waited_s = json.loads(store.get(given_up))
            raise AbsentError(_message(missing, waited_s, size))
        if store.check(keys):
            return store.get_all(keys)
        if time.monotonic() >= end:
            missing = [one for one, key in enumerate(keys) if not store.check([key])]
            if missing:
                store.set(given_up, json.dumps([missing, timeout_s]))
            continue
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_POLL_S)


def _claim_rank(store: TimedStore, rank: int) -> None:
    mine = f"process {os.getpid()} on {platform.node()}"
    holder = store.claim(f"process/{rank}", mine)
    if holder != mine:
        raise ConfigError(
            f"RANK={rank}: {holder} has this number already, and {mine} came with it again; give "
            "each process its own, from RANK=0 up"
        )


def _compare(store: TimedStore, digests: list[str]) -> None:
    """Raise ConfigError unless all ranks have the same facts."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not others:
        return
    texts = store.get_all([f"facts/{rank}" for rank in (0, *others)])
    first, *rest = (json.loads(text) for text in texts)
    by_rank: list[Mapping[str, str]] = [first] * len(digests)
    for rank, facts in zip(others, rest, strict=True):
        by_rank[rank] = facts
    raise ConfigError(
        f"{name_ranks(others)} {'differ' if len(others) > 1 else 'differs'} from rank 0"
        f"{differences(by_rank, others)}; start every rank with the same files, arguments and "
        "installation"
    )


def _message(missing: list[int], timeout_s: float, size: int) -> str:
    several = len(missing) > 1
    return (
        f"{name_ranks(missing)} did not join: {size - len(missing)} of {size} ranks were there "
        f"within {timeout_s:g} s; check that {'they were' if several else 'it was'} started and "
        f"what {'they' if several else 'it'} printed, that RANK goes from 0 to {size - 1}, each "
        "once, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and that parallel.timeout_s "
        "is longer than the slowest start"
    )

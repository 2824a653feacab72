"""Checks, before the first process group is created, that all ranks are present, that their numbers
are unique, and that they agree on facts such as the configuration. torch's own rendezvous does not
name missing ranks: after a timeout, it reports a count on rank 0 and store keys on the other ranks.
Ranks that disagree would hang in their first collective. Therefore each rank writes its number and
its facts to the run's store, and the first rank that times out notifies the other ranks through the
store.
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
from sbpflow.runtime.processes.store import TimedStore, polls

_POLL_S = 0.005
_LONGEST_POLL_S = 0.5  # a poll costs one store operation per rank


def await_ranks(timeout_s: float, facts: Mapping[str, str] | None = None) -> Meeting:
    """Wait until all ranks of the launcher's environment or of the existing process group have
    called this function with equal ``facts``.

    Raises AbsentError on all ranks once any rank has waited ``timeout_s``. Raises ConfigError on
    every rank if facts differ, if two processes have the same rank number, or if an address is
    invalid. The returned ``Meeting`` keeps rank 0's store open, because torch joins it next.
    """
    meeting = Meeting.connect()
    store, size = meeting.store, meeting.world_size
    if store is None:
        return meeting
    store.answer_s = max(timeout_s, store.answer_s)  # machines are busy while ranks start
    _claim_rank(store, meeting.rank)
    text = json.dumps(dict(facts or {}), sort_keys=True)
    # A process may start several worlds in turn; each comparison needs its own keys.
    number = meeting.start = store.add(f"starts/{meeting.rank}", 1)
    store.set(f"facts/{number}/{meeting.rank}", text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = gather(store, f"here/{number}", meeting.rank, size, digest, timeout_s)
    _compare(store, number, digests)
    return meeting


def gather(
    store: TimedStore, name: str, rank: int, size: int, text: str, timeout_s: float
) -> list[str]:
    """Return the ``text`` of each rank, in rank order; ``name`` identifies this exchange.

    When any rank times out, every rank raises AbsentError with the missing ranks.
    """
    keys, given_up = [f"{name}/{other}" for other in range(size)], f"{name}/missing"
    store.set(keys[rank], text)
    end = time.monotonic() + timeout_s
    for _ in polls(_POLL_S, _LONGEST_POLL_S):
        if time.monotonic() >= end:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            if missing:
                store.set(given_up, json.dumps([missing, timeout_s]))
        # Check for a timeout before reading the keys, so that no rank continues after another has
        # timed out.
        if store.check([given_up]):
            missing, waited_s = json.loads(store.get(given_up))
            raise AbsentError(_message(missing, waited_s, size))
        if store.check(keys):
            break
    return store.get_all(keys)


def _claim_rank(store: TimedStore, rank: int) -> None:
    process = f"process {os.getpid()} on {platform.node()}"
    holder = store.claim(f"process/{rank}", process)
    if holder != process:
        raise ConfigError(
            f"RANK={rank} is used by both {holder} and {process}; give each process a different "
            "number, starting with RANK=0"
        )


def _compare(store: TimedStore, number: int, digests: list[str]) -> None:
    """Raise ConfigError unless all ranks have the same facts."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not others:
        return
    texts = store.get_all([f"facts/{number}/{rank}" for rank in (0, *others)])
    first, *rest = (json.loads(text) for text in texts)
    by_rank: list[Mapping[str, str]] = [first] * len(digests)
    for rank, facts in zip(others, rest, strict=True):
        by_rank[rank] = facts
    raise ConfigError(
        f"{name_ranks(others)} {'differ' if len(others) > 1 else 'differs'} from rank "
        f"0{differences(by_rank, others)}; start every rank with the same files, arguments, and "
        "installation"
    )


def _message(missing: list[int], timeout_s: float, size: int) -> str:
    return (
        f"{name_ranks(missing)} did not join: {size - len(missing)} of {size} ranks joined within "
        f"{timeout_s:g} s; read the output of all ranks, and check that they were started, that "
        f"each RANK from 0 to {size - 1} is used once, that WORLD_SIZE, MASTER_ADDR, and "
        "MASTER_PORT are equal on all ranks, and that parallel.timeout_s is longer than the "
        "slowest start"
    )

"""Creates a unique ID per launch, on which all ranks of the launch agree. torchrun keeps one store
through all restarts, including the keys of earlier launches.

torchrun passes no value to the ranks that differs between launches; even TORCHELASTIC_RESTART_COUNT
counts only the failures on one machine. Rank 0 therefore creates the launch ID, and every other
rank requests it under a unique process ID. Stale requests from an earlier launch are answered and
ignored.
"""

import threading
import time
import uuid

from sbpflow.errors import AbsentError, PeerLostError
from sbpflow.runtime.processes.store import TimedStore, polls

_PROCESS = uuid.uuid4().hex  # Unique, even among earlier launches.
_ANSWER_S = 600.0  # Time for rank 0 to import torch; torchrun has already started it.
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0


def launch_id(store: TimedStore, rank: int, size: int) -> str:
    """Return the ID of the launch in which this process is ``rank``; all calls return the same ID.

    Rank 0 returns immediately, and a thread answers the other ranks. Raises AbsentError if rank 0
    does not answer.
    """
    answer = f"answer/{_PROCESS}"
    if store.check([answer]):
        return store.get(answer)
    if rank == 0:
        launch = uuid.uuid4().hex[:12]
        store.set(answer, launch)
        clone = store.torch_store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (stub)
        own = TimedStore(clone, store.where)
        threading.Thread(target=_answer_all, args=(own, launch, size), daemon=True).start()
        return launch
    store.set(f"question/{rank}", _PROCESS)
    end = time.monotonic() + _ANSWER_S
    for _ in polls(_POLL_S, _LONGEST_POLL_S):
        if store.check([answer]):
            break
        if time.monotonic() > end:
            raise AbsentError(
                f"rank 0 did not answer through the store at {store.where} within {_ANSWER_S:g} s; "
                "check that rank 0 was started, and read its output"
            )
    launch = store.get(answer)
    store.set(f"heard/{launch}/{rank}", "yes")
    return launch


def _answer_all(store: TimedStore, launch: str, size: int) -> None:
    """Answer every request until each rank has confirmed the answer."""
    waiting, answered = list(range(1, size)), dict[int, str]()
    try:
        for _ in polls(_POLL_S, _LONGEST_POLL_S):
            waiting = [rank for rank in waiting if not store.check([f"heard/{launch}/{rank}"])]
            if not waiting:
                return
            for rank in waiting:
                if not store.check([f"question/{rank}"]):
                    continue
                process = store.get(f"question/{rank}")
                if answered.get(rank) != process:
                    answered[rank] = process
                    store.set(f"answer/{process}", launch)
    except PeerLostError:  # the main thread reports a lost store at its next store operation
        return

"""A name for one start of a job's ranks, which its ranks agree on and those of another do not know.

torchrun keeps one store through all restarts, with the keys of the starts before still in it, and
nothing that it tells the ranks differs from start to start: TORCHELASTIC_RESTART_COUNT counts the
failures that one machine has seen. So rank 0 makes a name, and tells it to whoever asks by the
number of his process. What a rank of an earlier start asked is answered too, but nobody hears it.
"""

import threading
import time
import uuid

from sbpflow.errors import AbsentError, PeerLostError
from sbpflow.runtime.processes.store import TimedStore

_PROCESS = uuid.uuid4().hex  # this process among all that ever were part of the job
_ANSWER_S = 600.0  # for rank 0 to import torch; torchrun has started all ranks by then
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0


def name_of_start(store: TimedStore, rank: int, size: int) -> str:
    """The name of the start that this process is ``rank`` of; the same at every call.

    Rank 0 returns at once, and answers the others from a thread. AbsentError where it does not.
    """
    answer = f"answer/{_PROCESS}"
    if store.check([answer]):
        return store.get(answer)
    if rank == 0:
        name = uuid.uuid4().hex[:12]
        store.set(answer, name)
        clone = store.torch_store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (stub)
        own = TimedStore(clone, store.where)
        threading.Thread(target=_tell_all, args=(own, name, size), daemon=True).start()
        return name
    store.set(f"question/{rank}", _PROCESS)
    end, pause = time.monotonic() + _ANSWER_S, _POLL_S
    while not store.check([answer]):
        if time.monotonic() > end:
            raise AbsentError(
                f"rank 0 did not answer through the store at {store.where} within {_ANSWER_S:g} s; "
                "check that it was started and what it printed"
            )
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_POLL_S)
    name = store.get(answer)
    store.set(f"heard/{name}/{rank}", "yes")
    return name


def _tell_all(store: TimedStore, name: str, size: int) -> None:
    """Answer every question until each rank has heard."""
    waiting, asked, pause = list(range(1, size)), dict[int, str](), _POLL_S
    try:
        while waiting := [rank for rank in waiting if not store.check([f"heard/{name}/{rank}"])]:
            for rank in waiting:
                if not store.check([f"question/{rank}"]):
                    continue
                process = store.get(f"question/{rank}")
                if asked.get(rank) != process:
                    asked[rank] = process
                    store.set(f"answer/{process}", name)
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_POLL_S)
    except PeerLostError:  # the store is gone: this rank is told where it needs it
        return

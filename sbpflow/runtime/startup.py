"""Before the first process group: are all ranks here? If not, each that is names the missing ones.

torch's own meeting gives up with a count on rank 0 and with keys of its store elsewhere. Here each
rank puts its number into the run's store, and the first to run out of patience tells the others.
"""

import json
import time
from typing import TYPE_CHECKING

from sbpflow.runtime.exit_messages import AbsentError, Meeting, name_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.05
_LONGEST_POLL_S = 0.5  # a round trip to the store per rank


def await_ranks(timeout_s: float) -> "Store | None":
    """Return once all ranks of the launcher's environment called this; AbsentError if not in time.

    ``timeout_s`` counts from this rank's call, and the first rank's end ends all. The store that is
    returned keeps the one that rank 0 serves open until torch has joined it; ``None`` in a world of
    one. Raises ConfigError where there is nowhere to meet.
    """
    meeting = Meeting.connect()
    store, size = meeting.store, meeting.world_size
    if store is None:
        return None
    keys = [f"here/{rank}" for rank in range(size)]
    store.set(keys[meeting.rank], "1")
    end, pause = time.monotonic() + timeout_s, _POLL_S
    while True:
        if store.check(["roll/missing"]):  # first, so that nobody goes on where another gave up
            missing, waited_s = json.loads(store.get("roll/missing"))
            raise AbsentError(_message(missing, waited_s, size))
        if store.check(keys):
            return store
        if time.monotonic() >= end:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if missing:
                store.set("roll/missing", json.dumps([missing, timeout_s]))
            continue
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_POLL_S)


def _message(missing: list[int], timeout_s: float, size: int) -> str:
    several = len(missing) > 1
    return (
        f"{name_ranks(missing)} did not join: {size - len(missing)} of {size} ranks were there "
        f"within {timeout_s:g} s; check that {'they were' if several else 'it was'} started and "
        f"what {'they' if several else 'it'} printed, that RANK goes from 0 to {size - 1}, each "
        "once, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and that parallel.timeout_s "
        "is longer than the slowest start"
    )

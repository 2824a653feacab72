"""Makes all ranks agree on a last step after any rank gets a stop signal, so that all ranks save
and exit.

A preemption may signal only one machine. Without an agreement, the other machines would keep
training until that machine disappears, and nothing would be saved.
"""

import time

from sbpflow.errors import PeerStoppedError
from sbpflow.runtime.processes.graceful_shutdown import GracefulInterrupt, GracefulShutdown
from sbpflow.runtime.processes.store import TimedStore
from sbpflow.runtime.ranks.world import World

_LOOK_S = 1.0  # seconds between checks for other ranks' signals; each check queries the store


class CoordinatedStop:
    """Decides the step after which a run ends; each rank calls ``after`` between its steps.

    Operations on the key-value store time out after ``timeout_s`` or later, which must allow for
    slow links.
    """

    def __init__(
        self, stop: GracefulShutdown | GracefulInterrupt, world: World, *, timeout_s: float
    ) -> None:
        self._stop, self._world, self._timeout_s = stop, world, timeout_s
        self._store: TimedStore | None = None
        self._voted = False
        self._next_look = 0.0

    def after(self, step: int) -> bool:
        """Return whether the run ends after ``step``.

        A rank that learns of the signal writes the key ``knows/RANK`` to the store, and then reads
        the key ``at`` after each step. Once all ranks have written their keys, rank 0 sets ``at``
        to the next step. No rank can complete that step without rank 0, so all ranks read ``at`` in
        time.
        """
        size, rank = self._world.size, self._world.rank
        if size == 1:
            return bool(self._stop.signum)
        store = self._store_of_votes()
        if not self._voted and not self._is_asked(store):
            return False
        if not self._voted:
            store.set_all({"asked": "yes", f"knows/{rank}": "yes"})
            self._voted = True
        if rank == 0 and not store.check(["at"]):
            if store.check([f"knows/{other}" for other in range(size)]):
                store.set("at", str(step + 1))
                # A write is not acknowledged, but this read is. Without it, another rank could
                # complete that step before the key arrives at the store.
                store.check(["at"])
            return False
        return store.check(["at"]) and step >= int(store.get("at"))

    def leave(self, saved: str) -> None:
        """End this rank after the save by raising the signal's exception or PeerStoppedError.

        ``saved`` describes what was saved, for the run's last message.
        """
        if not self._stop.signum:
            raise PeerStoppedError(f"another rank received a stop signal; {saved}")
        self._stop.leave(saved)

    def _is_asked(self, store: TimedStore) -> bool:
        if self._stop.signum:
            return True
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        return store.check(["asked"])

    def _store_of_votes(self) -> TimedStore:
        if self._store is None:
            self._store = self._world.store("stop")
            self._store.answer_s = max(self._timeout_s, self._store.answer_s)
        return self._store

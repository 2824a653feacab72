"""The step after which all ranks of a run save and end, once one of them was asked to stop.

A preemption tells one machine; the others would train on until it is gone, and nobody would save.
"""

import time
from typing import Protocol

from sbpflow.errors import PeerStoppedError
from sbpflow.runtime.processes.store import TimedStore
from sbpflow.runtime.ranks.world import World

_LOOK_S = 1.0  # between two looks at whether another rank was asked: a round trip to the store


class Asked(Protocol):
    """``runtime.processes.graceful_shutdown.GracefulShutdown``."""

    asked: int

    def leave(self) -> None:
        """Raise what the signal raises."""
        ...


class CoordinatedStop:
    """Every rank makes one, and asks ``after`` between its steps.

    ``timeout_s`` is for an answer of the store: a link that is only slow ends nothing.
    """

    def __init__(self, stop: Asked, world: World, *, timeout_s: float) -> None:
        self._stop, self._world, self._timeout_s = stop, world, timeout_s
        self._store: TimedStore | None = None
        self._voted = False
        self._next_look = 0.0

    def after(self, step: int) -> bool:
        """Whether the run ends after ``step``.

        Rank 0 names the step after the one under way, once every rank has said that it knows: each
        looks between its steps from then on, and none can finish that step without rank 0.
        """
        size, rank = self._world.size, self._world.rank
        if size == 1:
            return bool(self._stop.asked)
        store = self._store_of_votes()
        if not self._voted and not self._is_asked(store):
            return False
        if not self._voted:
            store.set_all({"asked": "yes", f"knows/{rank}": "yes"})
            self._voted = True
        at = ["at"]
        if rank == 0 and not store.check(at):
            if store.check([f"knows/{one}" for one in range(size)]):
                store.set("at", str(step + 1))
            return False
        return store.check(at) and step >= int(store.get("at"))

    def leave(self) -> None:
        """End this rank, when it has saved: raise what the signal raises, or PeerStoppedError."""
        if not self._stop.asked:
            raise PeerStoppedError("another rank was told to stop; the run was saved")
        self._stop.leave()

    def _is_asked(self, store: TimedStore) -> bool:
        if self._stop.asked:
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

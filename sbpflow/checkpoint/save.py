"""Saving on all ranks: who writes what is settled once, then each writes its share of the state."""

import json
import os
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from sbpflow.boxing.agreement import gather_facts, gather_texts
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.attempt import Attempt, Described
from sbpflow.checkpoint.format import Place, cover_fault, whole_of
from sbpflow.checkpoint.share import share_out
from sbpflow.checkpoint.snapshot import SaveCost, Snapshot, Stores
from sbpflow.checkpoint.write import Part, write_parts
from sbpflow.embedding.state import LogicalTensor, Rectangle, Values
from sbpflow.errors import CheckpointError
from sbpflow.runtime.processes.background import in_background

State = Mapping[str, LogicalTensor]

_NICENESS = 10  # a weight of 110 beside 1024 (kernel/sched/core.c, sched_prio_to_weight)


class Saver:
    """Saves a job's ``state`` into ``folder``, which is there; every rank makes one.

    ``run`` names the run in every checkpoint. ``deadline_s`` is for all ranks to have written.
    ``stores`` has what holds the tables of ``state``, for ``start``.
    """

    def __init__(
        self,
        folder: Path,
        boxing: Boxing,
        state: Callable[[], State],
        *,
        run: str,
        deadline_s: float,
        stores: Stores = tuple,
    ) -> None:
        self.folder = folder
        self._boxing = boxing
        self._state = state
        self._run = run
        self._deadline_s = deadline_s
        self._nonce = gather_texts(boxing, uuid.uuid4().hex[:8])[0]
        self._store = boxing.world.store(f"checkpoint/{self._nonce}")
        self._stores = stores
        self._under_way: Future[None] | None = None
        self._hurry: Callable[[], None] | None = None
        self.last_cost: SaveCost | None = None  # of the last save beside training
        self._count = 0
        self._names: list[str] = []  # as agreed on
        self._tensors: dict[str, Described] = {}
        self._share: dict[str, list[Place]] = {}

    def save(self, step: int, documents: Mapping[str, Any]) -> Path:
        """Write the state after ``step`` steps; complete, on every rank, when this returns.

        Every rank calls it; ``documents`` are those of rank 0. CheckpointError on every rank if one
        could not write: what was there before is as it was.
        """
        self.wait()
        attempt, parts = self._begin(step, documents)
        try:
            attempt.report(write_parts(attempt.file(), parts))
        except CheckpointError as error:
            attempt.give_up(str(error))
        return attempt.finish()

    def start(
        self, step: int, documents: Mapping[str, Any], done: Callable[[], None] | None = None
    ) -> None:
        """Save the state as it is now, while training goes on; every rank calls it.

        Waits for the save before. ``done`` is called by the thread that saves, once the checkpoint
        is complete. What a rank could not do is raised by the next of ``check``, ``start`` and
        ``wait``.
        """
        self.wait()
        attempt, parts = self._begin(step, documents)
        snapshot = Snapshot(parts, self._stores)

        def work() -> None:
            _step_back()
            try:
                attempt.report(snapshot.write(attempt.file()))
            except CheckpointError as error:
                attempt.give_up(str(error))
            finally:
                snapshot.end()
                self.last_cost = snapshot.cost
            attempt.finish()
            if done is not None:
                done()

        self._hurry = snapshot.hurry
        self._under_way = in_background(work, "checkpoint")

    def wait(self) -> None:
        """Until no save is under way; what failed in it is raised."""
        if self._under_way is not None:
            if self._hurry is not None:
                self._hurry()
            self._hurry = None  # or what the log has would live on with it
            ended, self._under_way = self._under_way, None
            ended.result()

    def check(self) -> None:
        """Raise what failed in a save that was started and has ended."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def _begin(self, step: int, documents: Mapping[str, Any]) -> tuple[Attempt, list[Part]]:
        state = self._state()
        if self._names != list(state):
            self._agree(state)
        self._count += 1
        attempt = Attempt(
            folder=self.folder,
            nonce=f"{self._nonce}{self._count:x}",
            step=step,
            run=self._run,
            rank=self._boxing.world.rank,
            size=self._boxing.world.size,
            store=self._store,
            deadline_s=self._deadline_s,
            tensors=self._tensors,
            documents=documents,
        )
        keyed = {name: _places(tensor) for name, tensor in state.items() if tensor.by_key}
        return attempt, parts_of(state, {**self._share, **keyed})

    def _agree(self, state: State) -> None:
        """Which tensors there are, and what this rank writes of them; every rank calls it.

        The first step of an optimizer adds to what there is, so a first save is too early.
        """
        world = self._boxing.world
        # Rows by key are as many as they are by the time of a save, and those of one rank alone.
        mine = {
            name: [_sides(one) for one in tensor.rectangles if not tensor.by_key]
            for name, tensor in state.items()
        }
        dtypes = {
            name: str(tensor.rectangles[0].values.dtype).removeprefix("torch.")
            for name, tensor in state.items()
            if tensor.rectangles
        }
        facts = {"places": json.dumps(mine), "dtypes": json.dumps(dtypes)}
        everyone = gather_facts(self._boxing, facts) if world.size > 1 else [facts]
        known: dict[str, str] = {}
        held: list[dict[str, list[Place]]] = []
        for one in everyone:
            known |= json.loads(one["dtypes"])
            places: dict[str, list[list[int]]] = json.loads(one["places"])
            held.append(
                {name: [_place(*sides) for sides in found] for name, found in places.items()}
            )
        shares = share_out(held)
        for name, tensor in state.items():
            given = [place for share in shares for place in share.get(name, ())]
            fault = "" if tensor.by_key else cover_fault(whole_of(tensor.shape), given)
            if fault:
                raise RuntimeError(f"{name}: what the ranks hold is not the whole of it: {fault}")
        self._names, self._share = list(state), shares[world.rank]
        self._tensors = {
            name: Described(
                shape=tensor.shape,
                dtype=getattr(torch, known[name]),
                column_starts=tensor.column_starts,
                by_key=tensor.by_key,
            )
            for name, tensor in state.items()
        }


def _step_back() -> None:
    """Leave the processor to threads that train: beside one of them on a full core this thread gets
    a tenth of it. Niceness is per thread on Linux alone.
    """
    if sys.platform == "linux":
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, mine + _NICENESS))


def parts_of(state: State, share: Mapping[str, list[Place]]) -> list[Part]:
    """What ``share`` names, out of the state."""
    return [
        Part(name=name, place=place, values=_view(state[name], place))
        for name, places in share.items()
        for place in places
    ]


def _view(tensor: LogicalTensor, place: Place) -> Values:
    """The rows of ``place``, which has all columns of one of the tensor's rectangles."""
    for one in tensor.rectangles:
        if _place(*_sides(one)).common(place) == place:
            if one.values.ndim == 0:
                return one.values
            return one.values[place.row_start - one.row_start : place.row_stop - one.row_start]
    raise RuntimeError(f"{tensor.name}: {place} is not on this rank")


def _places(tensor: LogicalTensor) -> list[Place]:
    places = [_place(*_sides(one)) for one in tensor.rectangles]
    return [place for place in places if place.num_elements]


def _sides(one: Rectangle) -> list[int]:
    return [one.row_start, one.row_stop, one.col_start, one.col_stop]


def _place(row_start: int, row_stop: int, col_start: int, col_stop: int) -> Place:
    return Place(row_start=row_start, row_stop=row_stop, col_start=col_start, col_stop=col_stop)

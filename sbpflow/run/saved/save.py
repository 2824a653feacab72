"""Saves a job's state: the ranks agree once on who writes what, and then each writes its share."""

import os
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any

import torch

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.attempt import Attempt, TensorSpec
from sbpflow.checkpoint.changes import Changes, ChangeTracker, Stores, Written
from sbpflow.checkpoint.format import Patch, Previous, SavedTensor, cover_fault, whole_of
from sbpflow.checkpoint.share import share_out
from sbpflow.checkpoint.snapshot import SaveCost, Snapshot
from sbpflow.checkpoint.write import Part, write_parts
from sbpflow.embedding.plan.tables import Place
from sbpflow.embedding.state import LogicalTensor, Values
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.remote_path import AnyPath
from sbpflow.runtime.processes.background import in_background

State = Mapping[str, LogicalTensor]

# This niceness gives a thread scheduling weight 110 instead of 1024 (Linux kernel/sched/core.c,
# sched_prio_to_weight).
_NICENESS = 10


class Saver:
    """Saves a job's ``state`` into the existing ``folder``; every rank creates a Saver.

    ``run`` is the ID of the run. A save fails if some ranks have not finished, and no rank
    has written for ``deadline_s``. ``stores`` returns the stores of the tables in ``state``.

    Up to ``num_deltas`` checkpoints after each full one contain only the changed rows of tables.
    ``previous`` is the checkpoint in ``folder`` that equals the state at construction, if there is
    one.
    """

    def __init__(
        self,
        folder: AnyPath,
        boxing: Boxing,
        state: Callable[[], State],
        *,
        run: str,
        deadline_s: float,
        stores: Stores = tuple,
        num_deltas: int = 0,
        previous: Previous | None = None,
        may_publish: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self._boxing = boxing
        self._state = state
        self._run = run
        self._deadline_s = deadline_s
        self._nonce = gather_values(boxing, uuid.uuid4().hex[:8])[0]
        self._store = boxing.world.store(f"checkpoint/{self._nonce}")
        # A save takes long, and must survive interruptions of the network.
        self._store.answer_s = max(deadline_s, self._store.answer_s)
        self._stores = stores
        self._under_way: Future[None] | None = None
        self._hurry: Callable[[], None] | None = None
        self.last_cost: SaveCost | None = None  # the cost of the last background save
        self._count = 0
        self._names: list[str] = []  # names of the tensors that the ranks have agreed on
        self._tensors: dict[str, TensorSpec] = {}
        self._share: dict[str, list[Place]] = {}
        self._num_deltas = num_deltas
        self._tracker = ChangeTracker(stores) if num_deltas else None
        self._may_publish = may_publish
        self._previous = previous  # its ``number`` is that of the next delta

    def close(self) -> None:
        """Stop marking changed rows."""
        if self._tracker is not None:
            self._tracker.close()

    def save(self, step: int, documents: Mapping[str, Any]) -> AnyPath:
        """Save the state after ``step`` steps; return once the checkpoint is complete on all ranks.

        Every rank must call this method; the ``documents`` of rank 0 are used. If any rank cannot
        write, raise CheckpointError on every rank; earlier checkpoints are unchanged.
        """
        self.wait()
        attempt, parts, changes = self._begin(step, documents)
        try:
            written = write_parts(attempt.file(), parts, attempt.progress())
            attempt.report(*_patches(written, changes))
        except CheckpointError as error:
            attempt.give_up(str(error))
        return self._finish(attempt)

    def start(
        self, step: int, documents: Mapping[str, Any], done: Callable[[], None] | None = None
    ) -> None:
        """Save the current state in the background during training; every rank must call this
        method.

        If the previous save has not ended, wait for it first. The saving thread calls ``done`` when
        the checkpoint is complete. If a save fails, the next call to ``check``, ``save``,
        ``start``, or ``wait`` raises its error.
        """
        self.wait()
        attempt, parts, changes = self._begin(step, documents)
        snapshot = Snapshot(parts, self._stores)

        def work() -> None:
            _lower_priority()
            try:
                written = snapshot.write(attempt.file(), attempt.progress())
                attempt.report(*_patches(written, changes))
            except CheckpointError as error:
                attempt.give_up(str(error))
            finally:
                snapshot.end()
                self.last_cost = snapshot.cost
            self._finish(attempt)
            if done is not None:
                done()

        self._hurry = snapshot.hurry
        self._under_way = in_background(work, "checkpoint")

    def wait(self) -> None:
        """Wait for the background save, if there is one; raise its error if it failed."""
        if self._under_way is not None:
            if self._hurry is not None:
                self._hurry()
            self._hurry = None  # this reference would keep the snapshot in memory
            save, self._under_way = self._under_way, None
            save.result()

    def check(self) -> None:
        """If the background save has failed, raise its error; do not wait for it."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def _finish(self, attempt: Attempt) -> AnyPath:
        path, digest = attempt.finish()
        number = 1 if attempt.previous is None else attempt.previous.number + 1
        self._previous = Previous(step=attempt.step, sha256=digest, number=number)
        return path

    def _begin(
        self, step: int, documents: Mapping[str, Any]
    ) -> tuple[Attempt, list[Part], Changes | None]:
        state = self._state()
        if self._names != list(state):
            self._agree(state)
        self._count += 1
        changes = self._tracker.take() if self._tracker is not None else None
        previous = self._previous
        if previous is None or previous.number > self._num_deltas:
            changes, previous = None, None
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
            previous=previous,
            may_publish=self._may_publish,
        )
        keyed = {name: _places(tensor) for name, tensor in state.items() if tensor.by_key}
        parts = parts_of(state, {**self._share, **keyed})
        return attempt, changes.parts_of(parts) if changes else parts, changes

    def _agree(self, state: State) -> None:
        """Agree on the tensors and on who writes which parts; every rank must call this method.

        The ranks agree again if the set of tensors changes, for example after an optimizer's first
        step.
        """
        world = self._boxing.world
        # Leave out tensors that are saved by key, because their number of rows changes from save to
        # save, and each row is on only one rank.
        mine = {
            name: [astuple(place) for place in _places(tensor) if not tensor.by_key]
            for name, tensor in state.items()
        }
        dtypes = {
            name: str(tensor.rectangles[0].values.dtype).removeprefix("torch.")
            for name, tensor in state.items()
            if tensor.rectangles
        }
        all_dtypes: dict[str, str] = {}
        held: list[dict[str, list[Place]]] = []
        for places, rank_dtypes in gather_values(self._boxing, (mine, dtypes)):
            all_dtypes |= rank_dtypes
            held.append(
                {name: [Place(*sides) for sides in listed] for name, listed in places.items()}
            )
        shares = share_out(held)
        for name, tensor in state.items():
            shared = [place for share in shares for place in share.get(name, ())]
            fault = "" if tensor.by_key else cover_fault(whole_of(tensor.shape), shared)
            if fault:
                raise RuntimeError(f"{name}: the ranks' parts do not cover the tensor: {fault}")
        self._names, self._share = list(state), shares[world.rank]
        self._tensors = {
            name: TensorSpec(
                SavedTensor(
                    shape=tensor.shape,
                    dtype=getattr(torch, all_dtypes[name]),
                    pieces=(),
                    column_starts=tensor.column_starts,
                    keys=tensor.keys,
                ),
                tensor.by_key,
            )
            for name, tensor in state.items()
        }


def _patches(
    written: Written, changes: Changes | None
) -> tuple[Written, Sequence[tuple[str, Patch]]]:
    return (written, ()) if changes is None else changes.patches_of(written)


def _lower_priority() -> None:
    """Lower this thread's priority, so that it uses a tenth of a core that it shares with training.

    Only Linux has a nice value per thread.
    """
    if sys.platform == "linux":
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, mine + _NICENESS))


def parts_of(state: State, share: Mapping[str, list[Place]]) -> list[Part]:
    """Return the parts of the state that are in ``share``."""
    return [
        Part(name=name, place=place, values=_view(state[name], place))
        for name, places in share.items()
        for place in places
    ]


def _view(tensor: LogicalTensor, place: Place) -> Values:
    """Return the values of ``place``, which must span all columns of a rectangle on this rank."""
    for rectangle in tensor.rectangles:
        if rectangle.place.common(place) == place:
            if rectangle.values.ndim == 0:
                return rectangle.values
            top = rectangle.place.row_start
            return rectangle.values[place.row_start - top : place.row_stop - top]
    raise RuntimeError(f"{tensor.name}: no rectangle of this rank contains {place}")


def _places(tensor: LogicalTensor) -> list[Place]:
    if tensor.is_copy:
        return []
    places = [rectangle.place for rectangle in tensor.rectangles]
    return [place for place in places if place.num_elements]

"""Coordinates writing one checkpoint: each rank reports what it has written, and rank 0 completes
it.

Reports go through a key-value store, with a deadline that restarts while any rank is writing. This
module calls no collectives, so any thread may save.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sbpflow.checkpoint.folder import drop_partial, partial_folder, piece_file, publish, step_folder
from sbpflow.checkpoint.format import (
    Index,
    Patch,
    Piece,
    Previous,
    SavedTensor,
    digest_of,
    patch_from_json,
    patch_to_json,
    piece_from_json,
    piece_to_json,
)
from sbpflow.checkpoint.write import named
from sbpflow.embedding.plan.tables import Place
from sbpflow.errors import CheckpointError, PeerLostError
from sbpflow.runtime.files.remote_path import AnyPath
from sbpflow.runtime.processes.store import TimedStore

_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.1  # short at first: small checkpoints take milliseconds
# A rank that writes increases this counter in the store at most once per second; waiting ranks read
# it.
_PROGRESS, _PROGRESS_S = "progress", 1.0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A logical tensor without its values, which is the same on all ranks: ``form`` is its index
    entry without pieces.

    With ``by_key``, the total number of rows is known only once every rank has reported how many
    rows it has. Such a tensor contains, for each range of columns, the rows of all ranks in rank
    order.
    """

    form: SavedTensor
    by_key: bool

    def saved(self, pieces: Sequence[Piece], patches: Sequence[Patch]) -> SavedTensor:
        """Return the index entry of the tensor, given the pieces and patches of all ranks in rank
        order.
        """
        shape = self.form.shape
        if self.by_key:
            ends: dict[int, int] = {}  # by first column: the end of the rows stacked so far
            pieces = [replace(piece, place=_stacked(piece.place, ends)) for piece in pieces]
            patches = [replace(patch, place=_stacked(patch.place, ends)) for patch in patches]
            shape = (max(ends.values(), default=0), *shape[1:])
        return replace(self.form, shape=shape, pieces=tuple(pieces), patches=tuple(patches))


def _stacked(place: Place, ends: dict[int, int]) -> Place:
    """Shift a rectangle down so that it follows the earlier rectangles with the same columns."""
    start = ends.get(place.col_start, 0)
    stop = ends[place.col_start] = start + place.num_rows
    return replace(place, row_start=start, row_stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Writes the checkpoint of ``step`` to ``folder`` as one of ``size`` ranks.

    The hexadecimal ``nonce`` is unique among all attempts in the folder. For a delta, ``previous``
    is the checkpoint that it continues; only rank 0 knows its digest. ``may_publish`` raises
    CheckpointError if the folder now belongs to another run.
    """

    folder: AnyPath
    nonce: str
    step: int
    run: str
    rank: int
    size: int
    store: TimedStore
    deadline_s: float
    tensors: Mapping[str, TensorSpec]
    documents: Mapping[str, Any]
    previous: Previous | None = None
    may_publish: Callable[[], None] = lambda: None

    def file(self) -> AnyPath:
        """Return the path of the file that this rank writes; create its folder."""
        with named(self._partial):
            self._partial.mkdir(exist_ok=True)
        return piece_file(self._partial, self.rank, self.nonce)

    def progress(self) -> Callable[[], None]:
        """Return a function that this rank calls after each write, so that the other ranks continue
        to wait.
        """
        next_s = 0.0

        def wrote() -> None:
            nonlocal next_s
            if (now := time.monotonic()) >= next_s:
                next_s = now + _PROGRESS_S
                with suppress(PeerLostError):  # ``report`` raises it again
                    self.store.add(_PROGRESS, 1)

        return wrote

    def report(
        self, pieces: Sequence[tuple[str, Piece]], patches: Sequence[tuple[str, Patch]] = ()
    ) -> None:
        """Report that this rank has written ``pieces`` and ``patches`` to disk."""
        path = piece_file(self._partial, self.rank, self.nonce)
        with named(path):  # the folder may have been deleted
            size = path.stat().st_size
        listed = [[name, *piece_to_json(piece)] for name, piece in pieces]
        changed = [[name, patch_to_json(patch)] for name, patch in patches]
        report = {"pieces": listed, "patches": changed, "size": size}
        self._post(self._key(self.rank), report)

    def give_up(self, reason: str) -> None:
        """Report that this rank could not write its file."""
        self._post(self._key(self.rank), {"refused": reason})

    def finish(self) -> tuple[AnyPath, str]:
        """Wait until the checkpoint is complete; return its folder and, on rank 0, its digest.

        Raise CheckpointError on every rank if any rank could not write, or if some ranks did not
        report and no rank has written for ``deadline_s``. The message gives the reason or lists the
        missing ranks.
        """
        digest = ""
        if self.rank == 0:
            try:
                reason, digest = self._complete()
            except CheckpointError as error:
                reason = str(error)
            if reason:
                drop_partial(self._partial, self.nonce)
            self._post(self._done, {"refused": reason})
        elif self._await([self._done], limit_s := self.deadline_s + 5.0):
            raise CheckpointError(
                f"{self._target}: rank 0 did not complete the checkpoint, and no rank wrote "
                f"anything for {limit_s:g} s (parallel.timeout_s is {self.deadline_s:g})"
            )
        else:
            reason = self._read(self._done)["refused"]
        if reason:
            raise CheckpointError(reason)
        return self._target, digest

    def _complete(self) -> tuple[str, str]:
        """On rank 0, write the index from all reports; return an error message and the digest, one
        of which is "".
        """
        keys = [self._key(rank) for rank in range(self.size)]
        if missing := self._await(keys, self.deadline_s):
            ranks = [rank for rank in range(self.size) if self._key(rank) in missing]
            return (
                f"{self._target}: ranks {ranks} did not finish, and no rank wrote anything for "
                f"{self.deadline_s:g} s (parallel.timeout_s); earlier checkpoints are unchanged; "
                "check the disk, or use a larger parallel.timeout_s",
                "",
            )
        reports = [self._read(key) for key in keys]
        self.store.forget(keys)  # otherwise, the reports of a long run would fill the store
        for rank, report in enumerate(reports):
            if "refused" in report:
                return f"rank {rank}: {report['refused']}", ""
        pieces: dict[str, list[Piece]] = {name: [] for name in self.tensors}
        patches: dict[str, list[Patch]] = {name: [] for name in self.tensors}
        for report in reports:
            for name, *piece in report["pieces"]:
                pieces[name].append(piece_from_json(piece))
            for name, patch in report["patches"]:
                patches[name].append(patch_from_json(patch))
        tensors = {
            name: tensor.saved(pieces[name], patches[name]) for name, tensor in self.tensors.items()
        }
        files = {
            piece_file(self._partial, rank, self.nonce).name: report["size"]
            for rank, report in enumerate(reports)
        }
        index = Index(
            step=self.step,
            run=self.run,
            tensors=tensors,
            files=files,
            documents=self.documents,
            previous=self.previous,
        )
        self.may_publish()
        publish(self.folder, self._partial, index)
        return "", digest_of(index)

    @property
    def _partial(self) -> AnyPath:
        return partial_folder(self.folder, self.step, self.nonce)

    @property
    def _target(self) -> AnyPath:
        return step_folder(self.folder, self.step)

    def _key(self, rank: int) -> str:
        return f"{self.nonce}/rank-{rank}"

    @property
    def _done(self) -> str:
        return f"{self.nonce}/done"

    def _post(self, key: str, value: Mapping[str, Any]) -> None:
        self.store.set(key, json.dumps(value))

    def _read(self, key: str) -> dict[str, Any]:
        return json.loads(self.store.get(key))

    def _await(self, keys: Sequence[str], limit_s: float) -> list[str]:
        """Wait for the keys until no rank has written for ``limit_s`` seconds; return the keys that
        are still missing.
        """
        missing, pause_s = list(keys), _FIRST_POLL_S
        written, next_s, end = -1, 0.0, 0.0
        while missing := [key for key in missing if not self.store.check([key])]:
            if (now := time.monotonic()) >= next_s:
                next_s, before = now + _PROGRESS_S, written
                if (written := self.store.add(_PROGRESS, 0)) != before:
                    end = now + limit_s
            if now > end:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
        return missing

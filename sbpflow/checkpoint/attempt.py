"""One checkpoint under way on all ranks: each reports what it wrote, rank 0 completes it.

The reports go through a store, with a deadline; nothing here is a collective, so any thread may.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from sbpflow.checkpoint.folder import partial_folder, publish, step_folder
from sbpflow.checkpoint.format import Index, Piece, SavedTensor, piece_from_json, piece_to_json
from sbpflow.checkpoint.write import named
from sbpflow.errors import CheckpointError
from sbpflow.runtime.processes.store import TimedStore

_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.1  # a small checkpoint is written in milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A logical tensor without its values; the same on all ranks.

    But ``by_key`` nobody knows how many rows there are before all ranks have reported theirs, which
    follow one another in the order of the ranks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    column_starts: tuple[int, ...] | None
    by_key: bool = False

    def saved(self, pieces: Sequence[Piece]) -> SavedTensor:
        """With the pieces of all ranks, in their order."""
        shape = self.shape
        if self.by_key:
            ends = list(accumulate((piece.place.num_rows for piece in pieces), initial=0))
            pieces = [
                replace(piece, place=replace(piece.place, row_start=start, row_stop=stop))
                for piece, (start, stop) in zip(pieces, pairwise(ends), strict=True)
            ]
            shape = (ends[-1], *shape[1:])
        return SavedTensor(
            shape=shape,
            dtype=self.dtype,
            pieces=tuple(pieces),
            column_starts=self.column_starts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The checkpoint of ``step`` in ``folder``, from the point of view of one of ``size`` ranks.

    ``nonce``, hexadecimal, names the attempt among all that were ever made there.
    """

    folder: Path
    nonce: str
    step: int
    run: str
    rank: int
    size: int
    store: TimedStore
    deadline_s: float
    tensors: Mapping[str, Described]
    documents: Mapping[str, Any]

    def file(self) -> Path:
        """Where this rank writes, in a folder that is there when this returns."""
        with named(self._partial):
            self._partial.mkdir(exist_ok=True)
        return self._partial / f"rank-{self.rank}.bin"

    def report(self, pieces: Sequence[tuple[str, Piece]]) -> None:
        """Tell that this rank has written these, and that they are on disk."""
        path = self._partial / f"rank-{self.rank}.bin"
        with named(path):  # who took the folder away meanwhile took the file with it
            size = path.stat().st_size
        listed = [[name, *piece_to_json(piece)] for name, piece in pieces]
        self._post(self._key(self.rank), {"pieces": listed, "size": size})

    def give_up(self, reason: str) -> None:
        """Tell that this rank could not write."""
        self._post(self._key(self.rank), {"refused": reason})

    def finish(self) -> Path:
        """Wait until it is complete; CheckpointError, on every rank, with the reason of one that
        could not write, or the ranks that did not report in time.
        """
        if self.rank == 0:
            try:
                reason = self._complete()
            except CheckpointError as error:
                reason = str(error)
            if reason:
                shutil.rmtree(self._partial, ignore_errors=True)
            self._post(self._done, {"refused": reason})
        elif self._await([self._done], self.deadline_s + 5.0):
            raise CheckpointError(f"{self._named()}: rank 0 did not complete it in time")
        else:
            reason = self._read(self._done)["refused"]
        if reason:
            raise CheckpointError(reason)
        return step_folder(self.folder, self.step)

    def _complete(self) -> str:
        """Rank 0's: the index from all reports; "" or why there is none."""
        keys = [self._key(rank) for rank in range(self.size)]
        if missing := self._await(keys, self.deadline_s):
            ranks = [rank for rank in range(self.size) if self._key(rank) in missing]
            return (
                f"{self._named()}: ranks {ranks} did not report within {self.deadline_s:g} s "
                "(parallel.timeout_s); the checkpoints before it are as they were"
            )
        reports = [self._read(key) for key in keys]
        self.store.forget(keys)  # a long run has thousands, with a CRC per block each
        for rank, report in enumerate(reports):
            if "refused" in report:
                return f"rank {rank}: {report['refused']}"
        pieces: dict[str, list[Piece]] = {name: [] for name in self.tensors}
        for report in reports:
            for name, *piece in report["pieces"]:
                pieces[name].append(piece_from_json(piece))
        tensors = {name: tensor.saved(pieces[name]) for name, tensor in self.tensors.items()}
        files = {f"rank-{rank}.bin": report["size"] for rank, report in enumerate(reports)}
        index = Index(
            step=self.step,
            run=self.run,
            tensors=tensors,
            files=files,
            documents=self.documents,
        )
        publish(self.folder, self._partial, index)
        return ""

    @property
    def _partial(self) -> Path:
        return partial_folder(self.folder, self.step, self.nonce)

    def _named(self) -> str:
        return str(step_folder(self.folder, self.step))

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
        """The keys that are not there within the limit."""
        end, pause_s = time.monotonic() + limit_s, _FIRST_POLL_S
        missing = list(keys)
        while missing := [key for key in missing if not self.store.check([key])]:
            if time.monotonic() > end:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
        return missing

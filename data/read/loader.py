"""Batches of one rank, cut from the global row order; the state of a read is one row cursor.

Step s of an epoch is rows [sB, (s+1)B) of the order (``data.read.order``), and a rank takes its
balanced part of each step. The state therefore fits any world size: restored, a loader goes on with
exactly the rows of the epoch that were not yet delivered.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from data.format.manifest import Manifest
from data.format.shards import SplitRows, Words
from data.numbers import MAX_SEED
from data.read.feeds import FEEDS, Backend, Buffers, Parts, Threads, read_ahead
from data.read.order import SHUFFLES, RowOrder, Shuffle
from sbpflow.errors import ConfigError, DataError
from sbpflow.sbp.sbp import balanced_sizes

Tail = Literal["keep", "drop"]
State = dict[str, int | str]
_LOG = logging.getLogger(__name__)


class Batch(NamedTuple):
    """This rank's rows of one global batch."""

    labels: Tensor
    """[b] float32"""
    dense: Tensor
    """[b, dense] float32"""
    ids: Tensor
    """[b, fields] int32, in the order of ``Manifest.fields``"""
    num_rows: int
    """rows of the global batch, over all ranks"""
    step: int
    """number of the step in the epoch"""


class Loader(Protocol):
    """What training needs of a reader."""

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch, equal on all ranks."""
        ...

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Deliver the epoch, or what a restored state has left of it."""
        ...

    def peek(self, num_batches: int, epoch: int | None = None) -> list[Tensor]:
        """The ids of the next batches; the cursor does not move."""
        ...

    def state_dict(self) -> State:
        """Where the read is, for any world size."""
        ...

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from ``state`` at the next call of ``epoch``."""
        ...


@dataclass(frozen=True, slots=True)
class _Step:
    """One global batch: its rows of the order, and this rank's part of them."""

    number: int
    end: int
    num_rows: int
    start: int
    stop: int


class RowLoader:
    """The loader over a prepared split; see ``open_loader`` for the arguments."""

    def __init__(
        self,
        manifest: Manifest,
        rows: SplitRows,
        *,
        split: str,
        batch_size: int,
        rank: int,
        world_size: int,
        backend: Backend,
        shuffle: Shuffle,
        seed: int,
        device: torch.device,
        tail: Tail,
    ) -> None:
        self._manifest, self._rows, self._split = manifest, rows, split
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._backend: Backend = backend
        self._shuffle: Shuffle = shuffle
        self._seed, self._device = seed, device
        self._tail: Tail = tail
        self._epoch, self._cursor, self._restored = 0, 0, False
        self._read = 0
        """Number of the read that may go on; any other iterator has been replaced."""
        self._is_closed = False
        self._fields = 1 + len(manifest.dense)
        self._threads = Threads()

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch, equal on all ranks."""
        return self._num_steps(0)

    @property
    def num_dropped_rows(self) -> int:
        """Rows at the end of the epoch being read or restored that ``tail="drop"`` leaves out.

        A read restored with another batch size has its steps from the cursor on, not from row 0.
        """
        left = self._rows.num_rows - self._cursor
        return left % self._batch_size if self._tail == "drop" else 0

    def _num_steps(self, cursor: int) -> int:
        left = self._rows.num_rows - cursor
        return left // self._batch_size if self._tail == "drop" else -(-left // self._batch_size)

    def _steps(self, cursor: int) -> list[_Step]:
        first = -(-cursor // self._batch_size)
        return [
            self._step(first + k, cursor + k * self._batch_size)
            for k in range(self._num_steps(cursor))
        ]

    def _step(self, number: int, start: int) -> _Step:
        end = min(start + self._batch_size, self._rows.num_rows)
        sizes = balanced_sizes(end - start, self._world_size)
        own = start + sum(sizes[: self._rank])
        return _Step(number, end, end - start, own, own + sizes[self._rank])

    def _order(self, epoch: int) -> RowOrder:
        return RowOrder(self._rows.num_rows, self._shuffle, self._seed, epoch)

    def _new(self, num_rows: int) -> Words:
        return np.empty((num_rows, self._rows.num_words), dtype=np.int32)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Deliver epoch ``epoch`` from its start, or from the cursor of a state just restored.

        A loader has one cursor, so one read at a time: this call ends any earlier one, whose
        iterator raises DataError if it is used again. Raises DataError, too, when the set in the
        folder is no longer the one that was opened.
        """
        _check_integer("epoch", epoch, 0, MAX_SEED)
        self._check_open("epoch")
        # Maps of this epoch alone: a batch may be a view of them, and a consumer may write into it.
        rows = SplitRows(self._manifest, self._split)
        self._begin(epoch)
        self._read += 1
        return self._deliver(epoch, self._read, rows)

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise DataError(f"{call}(): this loader was closed; open another")

    def _check_read(self, number: int) -> None:
        if number != self._read or self._is_closed:
            raise DataError(
                "this read was ended by a later epoch(), load_state_dict() or close(); open a "
                "second loader to read twice at a time"
            )

    def _deliver(self, epoch: int, number: int, rows: SplitRows) -> Iterator[Batch]:
        self._check_read(number)
        order, steps = self._order(epoch), self._steps(self._cursor)
        filled = [step for step in steps if step.stop > step.start]
        buffers = Buffers(self._rows.num_words)

        def read(index: int) -> Words:
            step = filled[index]
            runs = order.runs(step.start, step.stop)
            words = rows.view(*runs.only) if len(runs.firsts) == 1 else None
            if words is None:
                words = buffers.take(step.stop - step.start)
                self._rows.gather(runs.firsts, runs.lengths, words)
            return words

        # DALI has a thread of its own, and one more hand-over costs more than a view of the map;
        # gathering short runs keeps both readers busy.
        if self._backend == "dali" and order.shuffle in ("none", "blocks"):
            blocks = map(read, range(len(filled)))
        else:
            blocks = read_ahead(read, len(filled), self._threads.readers)
        feed = FEEDS[self._backend](blocks, self._split_words, self._device, self._threads)
        for step in steps:
            self._check_read(number)
            if step.stop > step.start:
                try:
                    parts = next(feed)
                except (CancelledError, RuntimeError):  # another thread closes the threads it reads
                    self._check_read(number)
                    raise
            else:
                parts = self._split_words(self._no_rows())
            self._cursor = step.end
            yield Batch(*parts, num_rows=step.num_rows, step=step.number)

    def _begin(self, epoch: int) -> None:
        if not self._restored or (epoch == self._epoch + 1 and self._is_over()):
            self._epoch, self._cursor = epoch, 0
        elif epoch != self._epoch:
            raise DataError(
                f"epoch({epoch}): the restored state is in epoch {self._epoch} at row "
                f"{self._cursor}; finish that epoch first"
            )
        self._restored = False

    def _is_over(self) -> bool:
        return self._num_steps(self._cursor) == 0

    def _no_rows(self) -> Tensor:
        return torch.from_numpy(self._new(0)).to(self._device)

    def _split_words(self, words: Tensor) -> Parts:
        """Labels [b], dense [b, dense] and ids [b, fields] of words [b, words]."""
        floats = words[:, : self._fields].view(torch.float32)
        return floats[:, 0], floats[:, 1:], words[:, self._fields :]

    def peek(self, num_batches: int, epoch: int | None = None) -> list[Tensor]:
        """Ids [b, fields] int32 (CPU) of this rank's next batches; fewer where the epoch ends.

        Of the epoch that is being read or was restored (epoch 0 on a new loader), from the cursor
        on: none when it is over. Another ``epoch`` is shown from its start.
        """
        _check_integer("num_batches", num_batches, 0, MAX_SEED)
        self._check_open("peek")
        epoch = self._epoch if epoch is None else epoch
        _check_integer("epoch", epoch, 0, MAX_SEED)
        order = self._order(epoch)
        steps = self._steps(self._cursor if epoch == self._epoch else 0)[:num_batches]
        ids: list[Tensor] = []
        for step in steps:
            runs, words = order.runs(step.start, step.stop), self._new(step.stop - step.start)
            self._rows.gather(runs.firsts, runs.lengths, words)
            ids.append(torch.from_numpy(words[:, self._fields :]))
        return ids

    def _identity(self) -> State:
        return {
            "fingerprint": self._manifest.fingerprint,
            "split": self._split,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def state_dict(self) -> State:
        """Epoch and row cursor, and what must be equal for them to mean the same rows."""
        return {"epoch": self._epoch, "cursor": self._cursor, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from ``state``; DataError when it is of another set, split, seed or shuffle."""
        self._check_open("load_state_dict")
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise DataError(
                    f"{self._manifest.path}: the saved read has {key} {state.get(key)!r}, this one "
                    f"has {value!r}; a read can only go on over the same rows in the same order"
                )
        for key, most in (("epoch", MAX_SEED), ("cursor", self._rows.num_rows)):
            value = state.get(key)
            if type(value) is not int or not 0 <= value <= most:
                raise DataError(
                    f"{self._manifest.path}: the saved read has {key} {value!r}; it must be a "
                    f"whole number from 0 to {most}"
                )
        self._epoch, self._cursor = int(state["epoch"]), int(state["cursor"])
        self._restored = True
        self._read += 1

    def close(self) -> None:
        """End the reading threads and drop the memory maps; the loader is of no use afterwards."""
        self._is_closed = True
        self._read += 1
        self._threads.close()
        self._rows.close()


def _check_integer(key: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:  # True is an int, too
        raise ConfigError(f"{key}: {value!r} must be a whole number from {least} to {most}")


def open_loader(
    manifest: Manifest,
    *,
    split: str = "train",
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    backend: Backend = "dali",
    shuffle: Shuffle = "runs",
    seed: int = 7,
    device: torch.device | None = None,
    tail: Tail = "keep",
) -> RowLoader:
    """Open one split for one rank.

    ``batch_size`` is global. ``tail``: ``keep`` delivers the short last batch with its true rows (a
    rank may get none), ``drop`` leaves it out and counts it. The order is the same for both
    back-ends. Raises ConfigError for an argument out of range, DataError for a damaged set.
    """
    _check_integer("world_size", world_size, 1, MAX_SEED)
    _check_integer("rank", rank, 0, world_size - 1)
    _check_integer("seed", seed, 0, MAX_SEED)
    _check_integer("data.batch_size", batch_size, 1, 2**31 - 1)
    if batch_size < world_size:
        raise ConfigError(
            f"data.batch_size: {batch_size} rows cannot be split over {world_size} ranks; "
            f"use {world_size} or more"
        )
    for key, value, legal in (
        ("data.loader", backend, tuple(FEEDS)),
        ("data.shuffle", shuffle, SHUFFLES),
        ("tail", tail, ("keep", "drop")),
    ):
        if value not in legal:
            raise ConfigError(f"{key}: {value!r} must be one of {', '.join(legal)}")
    if device is not None and not isinstance(device, torch.device):
        raise ConfigError(
            f"device: {device!r} is {type(device).__name__}, not torch.device; for example "
            'device=torch.device("cpu")'
        )
    rows = SplitRows(manifest, split)
    loader = RowLoader(
        manifest,
        rows,
        split=split,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        backend=backend,
        shuffle=shuffle,
        seed=seed,
        device=device or torch.device("cpu"),
        tail=tail,
    )
    if loader.num_dropped_rows:
        _LOG.info(
            "%s: %d rows at the end of each epoch are dropped", split, loader.num_dropped_rows
        )
    return loader

"""Read the batches of one rank in the global row order. A row cursor is the complete state of a
read.

With batch size B, step s of an epoch consists of rows [sB, (s+1)B) of the order
(``data.read.order``), and each rank reads a balanced part of each step. A state is therefore valid
for any world size: a restored loader delivers exactly the remaining rows of the epoch.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sbpflow.data.format.manifest import Manifest
from sbpflow.data.format.shards import SplitRows, check_shards
from sbpflow.data.numbers import MAX_SEED
from sbpflow.data.read.batch import Batch, Cursor, State
from sbpflow.data.read.blocks import BatchColumns, Block, BlockReader
from sbpflow.data.read.feeds import FEEDS, Backend, Buffers, Threads, read_ahead
from sbpflow.data.read.order import SHUFFLES, RowOrder, Shuffle
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.model.spec import HashedColumn
from sbpflow.runtime.compute.devices import upload
from sbpflow.sbp.sbp import balanced_sizes

Tail = Literal["keep", "drop"]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Step:
    """The positions of a global batch in the epoch's order, and of this rank's part of the
    batch.
    """

    number: int
    end: int
    batch_size: int
    start: int
    stop: int


class RowLoader:
    """Loads the rows of one split for one rank.

    ``batch_size`` is the global batch size. With ``tail="keep"``, a short last
    batch is delivered, in which some ranks may have no rows. With ``tail="drop"``, a short last
    batch is dropped, and its number of rows is logged. Batches are on ``device``; with
    ``ids_on_host``, which growing tables need, ``Batch.ids`` and ``Batch.columns`` are in host
    memory. ``crosses`` are computed from the set's columns, and come after these columns in
    ``Batch.ids``. The order of rows is the same for both backends; ``auto`` selects DALI if it is
    installed. At most ``max_maps`` files of each kind are mapped into memory; other files are read
    on request. Raises ConfigError for an invalid argument, and DataError for a damaged set.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        split: str = "train",
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        backend: Backend | Literal["auto"] = "auto",
        shuffle: Shuffle = "runs",
        seed: int = 7,
        device: torch.device | None = None,
        tail: Tail = "keep",
        crosses: Sequence[HashedColumn] = (),
        max_maps: int | None = None,
        ids_on_host: bool = False,
    ) -> None:
        _check_integer("world_size", world_size, 1, MAX_SEED)
        _check_integer("rank", rank, 0, world_size - 1)
        _check_integer("seed", seed, 0, MAX_SEED)
        _check_integer("data.batch_size", batch_size, 1, 2**31 - 1)
        if batch_size < world_size:
            raise ConfigError(
                f"data.batch_size must be at least {world_size}, the number of ranks, got "
                f"{batch_size}"
            )
        for key, value, legal in (
            ("data.loader", backend, ("auto", *FEEDS)),
            ("data.shuffle", shuffle, SHUFFLES),
            ("tail", tail, ("keep", "drop")),
        ):
            if value not in legal:
                raise ConfigError(f"{key} must be one of {', '.join(legal)}, got {value!r}")
        if device is not None and not isinstance(device, torch.device):
            raise ConfigError(
                f"device must be a torch.device, got {device!r} ({type(device).__name__}); for "
                'example, device=torch.device("cpu")'
            )
        manifest.shards(split)  # raises DataError for an unknown split
        if manifest.cache is not None and shuffle != "none":
            # A batch may contain rows from any shard, so all shards are downloaded and mapped.
            manifest.cache.get_split(split)
            manifest = replace(manifest, cache=None)
        self._manifest, self._split = manifest, split
        self._rows = BlockReader(manifest, split, crosses, max_maps)
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._backend = choose_backend(backend)
        self._shuffle: Shuffle = shuffle
        self._tail: Tail = tail
        self._seed, self._device = seed, device or torch.device("cpu")
        self._read_to = torch.device("cpu") if ids_on_host else self._device
        self._epoch, self._cursor, self._restored = 0, 0, False
        self._read = 0
        """Number of the current read; iterators with a lower number are invalid"""
        self._is_closed = False
        self._threads = Threads()
        if self.num_dropped_rows:
            _LOG.info("%s: rows dropped at the end of each epoch: %d", split, self.num_dropped_rows)

    @property
    def num_steps(self) -> int:
        """Return the number of steps in a whole epoch, which is the same on all ranks."""
        return self._num_steps(0)

    @property
    def num_steps_left(self) -> int:
        """Return the number of steps from the cursor to the end of the epoch."""
        return self._num_steps(self._cursor)

    @property
    def num_dropped_rows(self) -> int:
        """Return the number of rows at the end of the epoch that ``tail="drop"`` drops.

        If the restored state has a different batch size, steps start at the cursor instead of at
        row 0.
        """
        left = self._rows.num_rows - self._cursor
        return {"drop": left % self._batch_size, "keep": 0}[self._tail]

    def _num_steps(self, cursor: int) -> int:
        left = self._rows.num_rows - cursor
        return {"drop": left, "keep": left + self._batch_size - 1}[self._tail] // self._batch_size

    def _steps(self, cursor: int) -> Iterator[_Step]:
        first = -(-cursor // self._batch_size)
        for k in range(self._num_steps(cursor)):
            yield self._step(first + k, cursor + k * self._batch_size)

    def _step(self, number: int, start: int) -> _Step:
        end = min(start + self._batch_size, self._rows.num_rows)
        sizes = balanced_sizes(end - start, self._world_size)
        own = start + sum(sizes[: self._rank])
        return _Step(number, end, end - start, own, own + sizes[self._rank])

    def _order(self, epoch: int) -> RowOrder:
        return RowOrder(self._rows.num_rows, self._shuffle, self._seed, epoch)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of ``epoch``, from the start or from the cursor of a restored state.

        A loader has only one cursor, so this call ends any earlier read, whose iterator then raises
        DataError. Raises DataError if the set in the folder has been replaced.
        """
        _check_integer("epoch", epoch, 0, MAX_SEED)
        self._check_open("epoch")
        # In file order, a batch may be a view of a map, and the consumer may write to the view, so
        # the maps for views are used only for this epoch. In other orders, rows are copied from the
        # maps.
        views = self._rows.new_views() if self._shuffle == "none" else None
        if views is None:
            check_shards(self._manifest, self._split)
        self._begin(epoch)
        self._read += 1
        return self._deliver(epoch, self._read, views, partial(self._steps, self._cursor))

    def windows(self, windows: Sequence[tuple[int, int]], batch_size: int) -> Iterator[Batch]:
        """Yield batches of the rows in ``windows``, ranges [start, stop) in the order of epoch 0
        that this rank reads.

        ``batch_size`` is the global batch size, over all ranks. As in ``epoch``, this call ends any
        earlier read.
        """
        self._check_open("windows")
        self._read += 1
        steps = [_Step(k, stop, batch_size, start, stop) for k, (start, stop) in enumerate(windows)]
        return self._deliver(0, self._read, None, lambda: iter(steps))

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise DataError(f"{call}(): this loader is closed; open another loader")

    def _check_read(self, number: int) -> None:
        if number != self._read or self._is_closed:
            raise DataError(
                "this read was ended by a later epoch(), windows(), load_state_dict() or close(); "
                "open a second loader for concurrent reads"
            )

    def _deliver(
        self,
        epoch: int,
        number: int,
        views: SplitRows | None,
        steps: Callable[[], Iterator[_Step]],
    ) -> Iterator[Batch]:
        """Yield the batches of ``steps()``, which is called twice: an epoch can have too many steps
        to list them.
        """
        self._check_read(number)
        order = self._order(epoch)
        groups = self._groups(steps())
        buffers = Buffers()

        def read(group: list[_Step]) -> Block:
            runs = order.runs_of([(step.start, step.stop) for step in group])
            words = None if views is None else self._rows.view(views, runs)
            if words is None:
                words = self._rows.read(runs, buffers.take)
            return Block(words, tuple(step.stop - step.start for step in group))

        # For views, DALI needs only one reader, because a thread switch costs more than a view.
        # Gathering rows takes long enough to keep two readers busy.
        if self._backend == "dali" and order.shuffle == "none":
            blocks = map(read, groups)
        else:
            blocks = read_ahead(read, groups, self._threads.readers)
        feed = FEEDS[self._backend](blocks, self._rows.split, self._read_to, self._threads)
        for step in steps():
            self._check_read(number)
            if step.stop > step.start:
                try:
                    parts = next(feed)
                except (CancelledError, RuntimeError):  # closed by another thread
                    self._check_read(number)
                    raise
            else:
                parts = self._no_rows()
            self._cursor = step.end
            yield Batch(
                self._on_device(parts.labels),
                self._on_device(parts.dense),
                parts.ids,
                step.batch_size,
                step.number,
                Cursor(epoch, step.end),
                None if parts.weights is None else self._on_device(parts.weights),
                parts.columns,
            )

    def _on_device(self, values: Tensor) -> Tensor:
        """Copy ``values``, unless the whole block is already on the device."""
        return values if self._read_to == self._device else upload(values, self._device)

    def _groups(self, steps: Iterator[_Step]) -> Iterator[list[_Step]]:
        """Yield the steps that contain rows of this rank, grouped into blocks.

        In file order, a group of several steps is within one shard, so that its block can be a
        view of the shard's map.
        """
        group: list[_Step] = []
        num_rows, max_rows = 0, self._rows.max_rows
        for step in steps:
            own = step.stop - step.start
            fits = bool(group) and num_rows + own <= max_rows
            if fits and self._shuffle == "none":
                joins = group[-1].stop == step.start
                fits = joins and len(self._rows.pieces(group[0].start, step.stop)) == 1
            if group and own and not fits:
                yield group
                group, num_rows = [], 0
            if own:
                group.append(step)
                num_rows += own
        if group:
            yield group

    def _begin(self, epoch: int) -> None:
        if not self._restored or (epoch == self._epoch + 1 and self.num_steps_left == 0):
            self._epoch, self._cursor = epoch, 0
        elif epoch != self._epoch:
            raise DataError(
                f"epoch({epoch}): the restored state is in epoch {self._epoch} at row "
                f"{self._cursor}; finish that epoch first"
            )
        self._restored = False

    def _no_rows(self) -> BatchColumns:
        words = self._rows.read(self._order(0).runs(0, 0), lambda size: np.empty(size, np.int32))
        return self._rows.split(torch.from_numpy(words).to(self._read_to), (0,))[0]

    def _identity(self) -> State:
        return {"split": self._split, "shuffle": self._shuffle, "seed": self._seed}

    def state_dict(self, cursor: Cursor | None = None) -> State:
        """Return the epoch, the row cursor, and all values that determine the rows. By default,
        ``cursor`` is the position after the last delivered batch. A run that takes batches ahead of
        training must pass the ``cursor`` of the last batch that it has trained on.
        """
        epoch, row = (self._epoch, self._cursor) if cursor is None else cursor
        manifest = self._manifest
        digests = {"fingerprint": manifest.fingerprint, "content_id": manifest.content_id}
        return {"epoch": epoch, "cursor": row, **digests, **self._identity()}

    def state_after(self, batch: Batch) -> State:
        """Return the state after ``batch``, even if later batches have been delivered."""
        return self.state_dict(batch.cursor)

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from ``state``. Raises DataError if the state was saved with different rows or a
        different split, seed, or shuffle.
        """
        self._check_open("load_state_dict")
        wanted = self._identity()
        if state.get("fingerprint") != self._manifest.fingerprint:
            # Earlier versions saved a fingerprint instead of a content ID.
            key = "content_id" if "content_id" in state else "fingerprint"
            wanted = {key: getattr(self._manifest, key), **wanted}
        for key, value in wanted.items():
            if state.get(key) != value:
                raise DataError(
                    f"{self._manifest.path}: {key} is {state.get(key)!r} in the saved state and "
                    f"{value!r} in this loader; use the same rows and order as the loader that "
                    "saved the state"
                )
        for key, most in (("epoch", MAX_SEED), ("cursor", self._rows.num_rows)):
            value = state.get(key)
            if type(value) is not int or not 0 <= value <= most:
                raise DataError(
                    f"{self._manifest.path}: {key} of the saved state must be a whole number from "
                    f"0 to {most}, got {value!r}"
                )
        self._epoch, self._cursor = int(state["epoch"]), int(state["cursor"])
        self._restored = True
        self._read += 1

    def close(self) -> None:
        """End the reader threads and release the maps. A closed loader can no longer be used."""
        self._is_closed = True
        self._read += 1
        self._threads.close()
        self._rows.close()


def _check_integer(key: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:  # True is an instance of int
        raise ConfigError(f"{key} must be a whole number from {least} to {most}, got {value!r}")


def choose_backend(wanted: Backend | Literal["auto"]) -> Backend:
    """Return the backend that ``data.loader`` selects; for ``auto``, log the choice."""
    if wanted != "auto":
        return wanted
    # ``find_spec`` does not load DALI; it imports only ``nvidia``, a namespace that CUDA's
    # libraries share.
    has_dali = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
    chosen: Backend = "dali" if has_dali else "memmap"
    _LOG.info(
        "data.loader: auto selects %s%s", chosen, "" if has_dali else " (DALI is not installed)"
    )
    return chosen


open_loader = RowLoader
"""Open one split for one rank. ``RowLoader``, of which this is another name, documents the
arguments.
"""

"""Rows of a store as they were at one moment, while training goes on changing them.

An undo log: the first change of a row that is still to be written copies it before. Two threads
meet here, the one that trains and the one that writes. The first appends rows to segments right
before their update, which finds them in cache then. The writer copies a range of rows without a
lock, so some of them may be half changed; those are in the log by then, and are put right from it.
Rows that a store moves meanwhile are its own matter: ``RowStore.read`` finds them.
It empties the segments into slabs by range, and where memory ends it puts rows aside in a file.
Training waits for it where segments come back too slowly.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sbpflow.checkpoint.marks import choose_take_marked
from sbpflow.checkpoint.slabs import Ints, Slabs
from sbpflow.checkpoint.spill import Extent, SpillFile
from sbpflow.checkpoint.write import bytes_of
from sbpflow.embedding.storage import huge_pages
from sbpflow.embedding.storage.keyed import TrainedRows
from sbpflow.embedding.storage.store import RowStore

# Most memory, as shares of the storage's rows; docs/decisions/state.md has what they are used for.
SLAB_SHARE, SEGMENT_SHARE = 0.05, 0.015
LEAST_ROWS = 2**14  # in slabs, whatever their share
SEGMENT_ROWS, LEAST_SEGMENTS = 2**14, 3  # of a small storage a segment has fewer rows
PIECE_ROWS = 2**12  # must find room in a segment together
READY_SEGMENTS = 2  # have pages: the first write to fresh ones costs several times a copy

_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Segment:
    """The first ``num_rows`` have rows, and what they were by key."""

    rows: Tensor
    values: dict[str, Tensor]
    num_rows: int = 0

    def filled(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self.rows[: self.num_rows], {
            key: value[: self.num_rows] for key, value in self.values.items()
        }


class RowLog:
    """The rows of ``store`` as they are now.

    ``pending`` [rows] bool, on the CPU, says which rows will be read; it is taken over. They are
    read in ranges of ``range_rows``, of rows in their ``order`` where there is one: all of its
    work is of the thread that reads. On a CUDA device copies are made in the stream that is current
    here, which is the one that trains; the log is in the memory of the host.
    """

    def __init__(
        self,
        store: RowStore,
        pending: Tensor,
        range_rows: int,
        order: TrainedRows | None = None,
    ) -> None:
        self._store, self._order = store, order
        # No rows, for their shapes. Falling item sizes, so that each begins at a multiple of its
        # own in a file.
        like = store.read(slice(0, 0)).items()
        self._like = dict(sorted(like, key=lambda item: -item[1].itemsize))
        self._pending: np.ndarray[tuple[int], np.dtype[np.bool]] = pending.numpy()
        self._range_rows = range_rows
        num_rows = self._pending.size
        self._row_bytes = 8 + sum(
            tensor.shape[1:].numel() * tensor.itemsize for tensor in self._like.values()
        )
        places = min(num_rows, max(LEAST_ROWS, int(SLAB_SHARE * num_rows)))
        self._slabs = Slabs(places, -(-num_rows // range_rows), range_rows)
        self._kept = self._room_for(self._slabs.num_places)
        self._spilled: dict[int, list[Extent]] = {}
        self._copies: dict[str, Tensor] = {}
        device = next(iter(self._like.values())).device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # What both threads use, under its lock: the marks and the segments.
        self._shared = threading.Condition()
        self._full: list[_Segment] = []  # the last one may have room
        self._free: list[_Segment] = []
        self._num_segments = 0
        # A storage of few rows needs no more, and there may be many such.
        self._segment_rows = min(SEGMENT_ROWS, max(num_rows // 16, min(PIECE_ROWS, num_rows)))
        self._most_segments = max(LEAST_SEGMENTS, int(SEGMENT_SHARE * num_rows) // SEGMENT_ROWS)
        self._closed = False
        self._take_marked = choose_take_marked()
        self.logging_s = 0.0  # of the thread that trains

    @property
    def kept_bytes(self) -> int:
        """Most memory for logged rows at a time."""
        rows = self._num_segments * self._segment_rows + self._slabs.touched_places
        return rows * self._row_bytes

    @property
    def has_room(self) -> bool:
        """Whether the writer may take its time."""
        return self._slabs.used_share < 0.8

    @property
    def extra_bytes(self) -> int:
        """That, the marks, and the copies that the writer works on."""
        copies = sum(copy.numel() * copy.itemsize for copy in self._copies.values())
        return self.kept_bytes + self._pending.size + copies

    def before_update(self, rows: Tensor) -> None:
        """These rows are about to change."""
        start = time.perf_counter()
        ids: Ints = rows.cpu().numpy()
        for first in range(0, ids.size, PIECE_ROWS):
            self._log(ids[first : first + PIECE_ROWS])
        self.logging_s += time.perf_counter() - start

    def _log(self, rows: Ints) -> None:
        with self._shared:
            most = min(rows.size, self._pending.size)  # each marked row comes once
            while (segment := self._with_room(most)) is None:
                self._shared.wait()
            if self._closed:
                return
            # A storage of fixed size names one row behind all others, which holds nothing.
            start = segment.num_rows
            count = self._take_marked(rows, self._pending, segment.rows.numpy()[start:])
            segment.num_rows = stop = start + count
            if count:
                into = {key: value[start:stop] for key, value in segment.values.items()}
                self._store.read(segment.rows[start:stop], into)

    def _with_room(self, count: int) -> _Segment | None:
        if self._full and self._full[-1].num_rows + count <= self._segment_rows:
            return self._full[-1]
        if not self._free:
            if self._num_segments == self._most_segments:
                return None
            self._num_segments += 1
            self._free.append(self._room_for(self._segment_rows))
        self._full.append(self._free.pop())
        return self._full[-1]

    def _room_for(self, count: int) -> _Segment:
        values = {
            key: huge_pages.zeros((count, *tensor.shape[1:]), tensor.dtype, _CPU)
            for key, tensor in self._like.items()
        }
        return _Segment(huge_pages.zeros((count,), torch.int64, _CPU), values)

    def read(self, number: int, spill: SpillFile) -> dict[str, Tensor]:
        """The rows of range ``number`` as they were, on the CPU, good until the next are read.

        Each range is read once, by one thread.
        """
        start = number * self._range_rows
        stop = min(start + self._range_rows, self._pending.size)
        numbers = slice(start, stop)
        if self._order is not None:
            numbers = self._order.numbers(numbers)
        found = self._copy(numbers, stop - start)
        with self._shared:  # what changes from here on was copied above
            self._pending[numbers if isinstance(numbers, slice) else numbers.numpy()] = False
        self.drain(spill)
        for rows, values in self._logged(number, spill):
            for key, value in found.items():
                value.index_copy_(0, rows - start, values[key])
        return found

    def drain(self, spill: SpillFile, *, spare_last: bool = False) -> None:
        """Empty the segments, and have some ready; called by the thread that reads, often.

        ``spare_last`` leaves the one that may have room.
        """
        with self._shared:
            count = len(self._full) - 1 if spare_last else len(self._full)
            full, self._full = self._full[: max(count, 0)], self._full[max(count, 0) :]
            short = READY_SEGMENTS - len(self._free) - len(full)
            new = min(max(short, 0), self._most_segments - self._num_segments)
            self._num_segments += new
        for _ in range(new):
            segment = self._room_for(self._segment_rows)
            for tensor in (segment.rows, *segment.values.values()):
                tensor.zero_()
            self._free_again(segment)
        for segment in full:
            self._sort_in(segment, spill)
            self._free_again(segment)

    def close(self) -> None:
        """Nothing is logged any more, and nobody waits."""
        with self._shared:
            self._closed = True
            self._most_segments += 1  # for who waits
            self._shared.notify_all()

    def _free_again(self, segment: _Segment) -> None:
        segment.num_rows = 0
        with self._shared:
            self._free.append(segment)
            self._shared.notify_all()

    def _sort_in(self, segment: _Segment, spill: SpillFile) -> None:
        """Rows into the slabs of their ranges."""
        rows, values = segment.filled()
        if self._order is not None:
            rows = self._order.places(rows)
        order = rows.numpy().argsort(kind="stable")  # runs that ascend: quick
        for first in range(0, order.size, self._slabs.sure_rows):
            part = order[first : first + self._slabs.sure_rows]
            ascending = rows.numpy()[part]
            while (found := self._slabs.place(ascending)) is None:
                self._put_aside(spill)
            at, of = torch.from_numpy(found), torch.from_numpy(part)
            self._kept.rows[at] = rows[of]
            for key, value in values.items():
                self._kept.values[key].index_copy_(0, at, value[of])

    def _put_aside(self, spill: SpillFile) -> None:
        number = self._slabs.fullest()
        rows, values = self._take(number)
        parts = [bytes_of(part) for part in (rows, *values.values())]
        self._spilled.setdefault(number, []).append(spill.append(parts))

    def _logged(self, number: int, spill: SpillFile) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The logged rows of a range, wherever they are; they are not in the log afterwards."""
        yield self._take(number)
        for extent in self._spilled.pop(number, ()):
            yield self._unpack(spill.read(extent))

    def _take(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        at = torch.from_numpy(self._slabs.take(number))
        values = {key: kept.index_select(0, at) for key, kept in self._kept.values.items()}
        return self._kept.rows[at], values

    def _unpack(self, data: bytearray) -> tuple[Tensor, dict[str, Tensor]]:
        count = len(data) // self._row_bytes
        flat = torch.frombuffer(data, dtype=torch.uint8)
        offset, values = 8 * count, dict[str, Tensor]()
        for key, tensor in self._like.items():
            shape = torch.Size((count, *tensor.shape[1:]))
            end = offset + shape.numel() * tensor.itemsize
            values[key] = flat[offset:end].view(tensor.dtype).view(shape)
            offset = end
        rows = flat[: 8 * count].view(torch.int64)
        return rows, values

    def _copy(self, numbers: slice | Tensor, count: int) -> dict[str, Tensor]:
        """Into memory that is used again."""
        if not self._copies:
            rows = min(self._range_rows, self._pending.size)
            self._copies = {
                key: torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)
                for key, tensor in self._like.items()
            }
        found = {key: copy[:count] for key, copy in self._copies.items()}
        with torch.cuda.stream(self._stream):
            self._store.read(numbers, found)
        return found
